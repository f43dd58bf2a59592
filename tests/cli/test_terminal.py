"""Output on terminals of some widths, in pipes, and where only ASCII can be written."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from tests import fork_server

from .process import ROOT, command, environment

pytestmark = pytest.mark.ranks
RESULTS, TRACES = ROOT / "results", ROOT / "tests" / "data" / "traces" / "dlrm8"
GENERATE = "workload generate --model llama-3.1-8b --framework fsdp --world-size 8"
TABLES = [
    f"runs show {RESULTS}/h200-op-all-llama-3.1-70b",
    f"runs show {RESULTS}/h100-x4-comm-ahead-1",
    f"trace breakdown {TRACES}",
    f"trace kernels {TRACES}",
    GENERATE,
    "comm --list",
    f"compare {','.join(f'{RESULTS}/h200-x4-comm-queued-{n}' for n in (1, 2, 3))}"
    f" {','.join(f'{RESULTS}/h200-x4-comm-graph-{n}' for n in (1, 2, 3))} --force",
    f"trace compare {TRACES} {TRACES}",
]
# Tables of the same kind as others, which take seconds.
ALIKE = (TABLES[0], TABLES[3], TABLES[7])
COMMANDS = [
    *(pytest.param(line, marks=[pytest.mark.slow] * (line in ALIKE)) for line in TABLES),
    *("--help", "", "train --help-all", "runs list --runs ."),
]


def on_terminal(line: str, columns: int, cwd: Path, *, has_ranks: bool = False) -> str:
    """Return what a command writes to stdout, a terminal of so many columns.

    It is forked from a process that has imported torch; has_ranks: and so are its ranks.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = environment() | {"TERM": "xterm"}
    variables.pop("COLUMNS", None)
    with Path(os.devnull).open("w") as nothing:
        process = fork_server.server().fork_command(
            [*(["tests.forking"] if has_ranks else []), "stepmark", *line.split()],
            variables | {"PYTHONPATH": f"{variables['PYTHONPATH']}{os.pathsep}{ROOT}"},
            str(cwd),
            (its, nothing.fileno()),
        )
    os.close(its)
    output = b""
    with suppress(OSError):  # the program has closed the terminal
        while chunk := os.read(ours, 65536):
            output += chunk
    os.close(ours)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).replace("\r\n", "\n")


def piped(line: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        command(*line.split()),
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        check=False,
    )


# Transcripts of 80 and 160 columns are in tests/data/outputs.
@pytest.mark.parametrize(
    "columns", [60, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 160))]
)
@pytest.mark.parametrize("line", TABLES)
def test_tables_fit_and_nothing_is_cut(line: str, columns: int, tmp_path: Path) -> None:
    text = on_terminal(line, columns, tmp_path)
    assert "…" not in text
    # Columns are two spaces apart; sentences may be longer, and the terminal folds them.
    rows = [row.rstrip() for row in text.split("\n") if len(re.split(r" {2,}", row)) > 3]
    assert rows
    assert [row for row in rows if len(row) > columns] == []


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    text = on_terminal(TABLES[1], 80, tmp_path)
    (note,) = re.findall(r"too wide for 80 columns: (.+); --csv FILE has them", text)
    assert "min" in note.split(", ")
    assert "all rows: dtype bf16" in text
    # Nothing but its placement tells the second row from the first.
    assert re.findall(r"^all_reduce +1 KiB +(\S+)", text, re.MULTILINE) == [
        "out-of-place",
        "in-place",
    ]


def test_long_names_of_sides_become_letters(tmp_path: Path) -> None:
    text = on_terminal(TABLES[6], 80, tmp_path)
    assert re.search(
        r"^A = .*queued-1 and 2 more\nB = .*graph-1 and 2 more", text, re.MULTILINE
    )
    heads = [line.split() for line in text.split("\n") if line.startswith("family")]
    assert heads == [
        ["family", "placement", "size", "A", "B", "B", "/", "A"],
        ["family", "placement", "size", "verdict"],
    ]


def test_figures_of_a_collective_fit_with_their_size(tmp_path: Path) -> None:
    line = "comm all_reduce --nproc 2 --device cpu -b 8K -e 32K -d fp32,bf16 -n 20 --out runs"
    rows = [row.rstrip() for row in on_terminal(line, 60, tmp_path, has_ranks=True).split("\n")]
    tables = [row for row in rows if row and row[0] != "#"]
    assert max(map(len, tables)) <= 60
    assert sum(row.split()[:4] == ["size", "time", "algbw", "busbw"] for row in tables) == 2
    assert sum(row.split()[:1] == ["32768"] for row in tables) == 4, "two parts a type"


def test_runs_are_a_list_on_a_terminal_and_rows_in_a_pipe(tmp_path: Path) -> None:
    line = f"runs list --runs {RESULTS}/h200-x4-sweep-tuned"
    text = on_terminal(line, 80, tmp_path)
    rows = piped(line, tmp_path).stdout.decode().splitlines()
    runs = [row.split()[0] for row in rows[1:]]
    assert rows[0].split()[0] == "run"
    assert len(runs) > 5
    assert all(f"{run}  4 x NVIDIA H200" in text for run in runs)
    assert text.count("    stepmark comm") == len(runs)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_pipe_gets_plain_text_whatever_the_locale(line: str, tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = piped(line, tmp_path, COLUMNS="80", **ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"Error" not in done.stderr
    assert b"\x1b" not in done.stdout
    assert done.stdout.isascii()


def test_characters_that_cannot_be_written_are_replaced(tmp_path: Path) -> None:
    name = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    generate = piped(f"{GENERATE} --model-name {name} -o w.json", tmp_path)
    assert generate.returncode == 0, generate.stderr
    done = piped("workload show w.json", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"workload caf?" in done.stdout
