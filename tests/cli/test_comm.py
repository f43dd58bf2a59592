"""stepmark comm on the CPU: what is refused before ranks start, and small real runs."""

import csv
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status
from stepmark.measuring import measure

from .process import command, environment, lines, only_run, stepmark

NAMED = ["all_reduce", "--device", "cpu", "--nproc"]
TWO = [*NAMED, "2"]

BAD: list[tuple[list[str], str]] = [
    ([], "collective"),
    (["nonsense"], "nonsense"),
    ([*TWO, "-b", "1G", "-e", "1K"], "-b 1G"),
    ([*TWO, "-b", "abc"], "-b abc"),
    ([*TWO, "-e", "abc"], "-e abc"),
    ([*TWO, "-b", "0"], "-b 0"),
    ([*TWO, "-b", "1", "-e", "3"], "-e 3"),
    ([*TWO, "-f", "0.5"], "-f 0.5"),
    ([*TWO, "-f", "inf"], "-f inf"),
    ([*TWO, "-f", "nan"], "-f nan"),
    ([*TWO, "-i", "0"], "-i 0"),
    ([*TWO, "-d", "int3"], "-d int3"),
    ([*TWO, "-d", ","], "-d ,"),
    ([*TWO, "-d", "fp8"], "-d fp8_e4m3 is invalid: it cannot run: gloo"),
    ([*TWO, "-o", "xor"], "-o xor"),
    ([*TWO, "-o", "mulsum"], "-o mulsum is invalid: it cannot run: gloo"),
    ([*TWO, "--backend", "magic"], "backend magic"),
    ([*TWO, "--backend", "nccl"], "backend nccl"),
    ([*TWO, "--mode", "fast"], "mode fast"),
    ([*TWO, "--api", "foo"], "api foo"),
    ([*TWO, "--api", "nccl"], "api nccl"),
    ([*TWO, "--style", "foo"], "style foo"),
    ([*NAMED, "1"], "nproc 1"),
    ([*NAMED, "many"], "nproc many"),
    ([*TWO, "-r", "7"], "-r 7"),
    ([*TWO, "-G", "1"], "-G 1"),
    ([*TWO, "-z", "9"], "-z 9"),
    ([*TWO, "--mode", "graph", "-z", "1"], "mode '-z 1 --mode graph'"),
    ([*TWO, "--ranks", "3"], "ranks 3"),
    ([*TWO, "--ranks", "1"], "ranks 1"),
    (["all_reduce", "--device", "x"], "; all but cuda and cpu need --dry-run."),
    ([*NAMED, "4", "--group-split", "mod 3"], "group-split 'mod 3'"),
    ([*NAMED, "4", "--group-split", "xor 3"], "group-split 'xor 3'"),
    (["p2p-matrix", *TWO[1:], "--group-split", "mod 2"], "group-split 'mod 2'"),
    (["p2p", *TWO[1:], "--pair", "0,0"], "pair 0,0"),
    (["p2p", *TWO[1:], "--pair", "0,9"], "pair 0,9"),
    (["p2p-matrix", *TWO[1:], "--partners", "2"], "partners 2"),
    (["p2p-matrix", *TWO[1:], "--partners", "0"], "partners 0"),
    ([*TWO, "--partners", "1"], "partners 1 is invalid: it works only with p2p"),
    ([*TWO, "--pair", "0,1"], "pair 0,1 is invalid: it works only with p2p"),
    (["all_to_all_v", *TWO[1:], "--spread", "x"], "spread x"),
    (["all_to_all_v", *TWO[1:], "--matrix", "none"], "matrix none"),
    (
        ["all_to_all_v", *TWO[1:], "--matrix", "ragged"],
        "matrix ragged is invalid: it must be a square",
    ),
    (
        ["all_to_all_v", *TWO[1:], "--matrix", "negative"],
        "matrix negative is invalid: it must be bytes from",
    ),
    ([*TWO, "--launches", "0"], "launches 0"),
    ([*TWO, "--with", "nothing:1"], "--with nothing:1"),
    ([*TWO, "--max-ctas", "0"], "max-ctas 0"),
    ([*TWO, "--max-ctas", "4"], "max-ctas 4 is invalid: it works only with nccl"),
    ([*TWO, "--timeout", "0"], "timeout 0"),
    ([*TWO, "--budget", "x"], "budget x"),
    ([*TWO, "--skew", "100s"], "skew 100s"),
    ([*TWO, "-m", "4"], "-m 4 is invalid: it cannot run: gloo"),
    ([*TWO, "-n", "0"], "-n 0"),
    ([*TWO, "-c", "-1"], "-c -1"),
    ([*TWO, "--placement", "out"], "placement out"),
    ([*TWO, "-J", "x.txt"], "-J x.txt"),
    ([*TWO, "-J", "/proc/x.json"], "-J /proc"),
    ([*TWO, "--out", "/proc/runs"], "out /proc/runs"),
    ([*TWO, "--json", "-", "--csv", "-"], "csv -"),
    ([*TWO, "--resume", "none", "--out", "."], "run none"),
    ([*TWO, "--device", "tpu"], "device tpu"),
]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_bad_input_is_one_line_before_ranks_start(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(*_: object, **__: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(measure, "supervise", started)
    (tmp_path / "ragged").write_text("1 2\n3\n")
    (tmp_path / "negative").write_text("1 -2\n3 4\n")
    assert status(["comm", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("stepmark: ")
    assert said in err
    assert not (tmp_path / "runs").exists()


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["comm", "--list"]) == 0
    out = capsys.readouterr().out
    assert "all_reduce" in out
    assert "p2p-matrix" in out


def measured(folder: Path, words: str) -> "subprocess.CompletedProcess[str]":
    """A run that goes well."""
    done: subprocess.CompletedProcess[str] = stepmark(
        "comm", *words.split(), "--device", "cpu", "-n", "5", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def table(text: str) -> list[list[str]]:
    """Data lines in nccl-tests' layout."""
    return [line.split() for line in text.splitlines() if line and line[0] != "#"]


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.ranks
def test_a_sweep_with_every_file_and_what_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("kept")
    done = measured(
        tmp_path,
        "alltoall_perf broadcast all_to_all_v barrier --nproc 2 -b 1K -e 1T -f 1073741824 "
        "-r -1 -d half,bfloat16 --spread 0.5 -J x.json --csv out/ --json out/rows.json",
    )
    found: list[dict[str, Any]] = json.loads((tmp_path / "out/rows.json").read_text())["rows"]
    records = lines(only_run(tmp_path / "runs"))
    assert len(found) == len(records) == 2 * (2 + 4 + 2) + 1
    too_big = [row for row in found if row["size_bytes"] > 2**30]
    assert len(too_big) == 8
    assert {row["status"] for row in too_big} == {"skipped"}
    assert all(row["message"].startswith("needs ") for row in too_big)
    assert all(r["needed_bytes"] >= 2**40 for r in records if r["kind"] == "skipped")
    assert done.stdout.count("skipped: needs ") == 8
    fits = [row for row in found if row not in too_big]
    assert all(row["num_wrong"] in (0, None) and row["time_s"] > 0 for row in fits)
    assert {line[2] for line in table(done.stdout)} == {"half", "bfloat16", "uint8"}
    files = {path.stem: path for path in (tmp_path / "out").glob("*.csv")}
    assert files.keys() == {"all_to_all", "broadcast", "all_to_all_v", "barrier"}
    for name, path in files.items():
        wanted = [row["case_id"] for row in found if row["family"] == name]
        assert [row["case_id"] for row in csv_rows(path)] == wanted
    assert (tmp_path / "x.json").read_text() == "kept"
    document = json.loads((tmp_path / "x.json.0").read_text())
    assert {row["type"] for row in document["results"]} >= {"half", "bfloat16"}


@pytest.mark.ranks
def test_launches_are_new_processes_pooled_in_one_row(tmp_path: Path) -> None:
    done = measured(
        tmp_path,
        "all_reduce --with gemm:16 -b 1K -e 1K -c 0 --launches 2 --wide --nproc 2 "
        "--csv rows.csv",
    )
    records = lines(only_run(tmp_path / "runs"))
    assert [record["launch"] for record in records] == [1, 1, 2, 2]
    levels = [record["levels"] for record in records]
    assert len({level["process"] for level in levels}) == 2
    assert {(level["communicator"], level["round"]) for level in levels} == {(1, None)}
    assert {level["machine"] for level in levels} == {platform.node()}
    for record in records:
        assert sum(record["samples"]["batches"]) == len(record["samples"]["seconds"][0])
    found = csv_rows(tmp_path / "rows.csv")
    assert [row["beside"] for row in found] == ["", "gemm:16"]
    assert [row["launches"] for row in found] == ["2", "2"]
    assert all(row["launch_spread_pct"] and not row["num_wrong"] for row in found)
    assert "compute x alone" in done.stdout


@pytest.mark.ranks
def test_smaller_communicators_and_a_matrix_of_pairs(tmp_path: Path) -> None:
    words = "all_reduce p2p-matrix -g 3 --ranks 2,3 -b 1M -e 1M"
    done = measured(tmp_path, f"{words} --json rows.json")
    found = json.loads((tmp_path / "rows.json").read_text())["rows"]
    sums = [row for row in found if row["family"] == "all_reduce"]
    assert [(row["num_ranks"], row["world_size"]) for row in sums] == [(2, 3), (3, 3)]
    assert all(row["num_wrong"] == 0 for row in found)
    assert len(found) == 2 + 2 * 6, "pairs of the smaller communicator are measured once"
    assert "bandwidth, one direction (GB/s), 1 MiB" in done.stdout
    assert "latency, one way of a ping-pong (us), 8 B" in done.stdout
    assert done.stdout.count("from \\ to") == 2
    # Everything is measured: the same rows again, as pure JSON.
    run = only_run(tmp_path / "runs")
    again = measured(tmp_path, f"{words} --resume {run.name} --json -")
    assert json.loads(again.stdout)["rows"] == found


def test_a_reader_that_goes_away_and_a_full_disk(tmp_path: Path) -> None:
    words = command("comm", "all_reduce", "--device", "cpu", "--nproc", "2", "--dry-run")

    def into(fd: int) -> tuple[int, str]:
        done = subprocess.run(
            words, env=environment(), stdout=fd, stderr=subprocess.PIPE, check=False
        )
        return done.returncode, done.stderr.decode()

    with Path("/dev/full").open("w") as full:
        code, err = into(full.fileno())
    assert (code, err.count("stepmark: ")) == (2, 1), err
    assert "No space left on device" in err
    reader, writer = os.pipe()
    os.close(reader)
    code, err = into(writer)
    os.close(writer)
    assert code == 0
    assert "Traceback" not in err
