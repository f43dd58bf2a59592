"""Transcripts of commands that measure nothing: what they print and write, frozen.

    python tests/outputs.py [NAME ...]     write the transcripts again (`make outputs`)

A file of tests/data/outputs lists commands, `$ stepmark ...` or `$ python SCRIPT ...`, each
followed by what it printed at 80 columns, at 160 where that differs, its exit code, and the
files that it wrote. To freeze another command add its line and write the transcripts;
`git diff` is then the review.

Commands of a file run one after the other in one folder, so that one reads what another wrote.
A command that does not read the width, in COLUMNS, runs once.
"""

import argparse
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from tests.cli.process import environment, stepmark  # noqa: E402

from stepmark.ground import waiting  # noqa: E402
from stepmark.layouts import layout_search  # noqa: E402
from stepmark.traces import trace_files  # noqa: E402
from stepmark.traces.kineto.reader import read_trace  # noqa: E402

FOLDER = ROOT / "tests" / "data" / "outputs"
TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))
WIDTHS = (80, 160)
PROMPT = "$ "
# Of a longer file, its beginning and a digest of the rest are kept.
MAX_LINES, MAX_LINE = 120, 400
LINKED = ("examples", "results", "tests")
# One run of each kind, for verbs that read a whole folder.
FEW = ("h100-run", "h200-x2-gemm", "h200-x4-comm-queued-1", "h200-x4-train-gpt2-1.5b-fsdp")
# Measured steps that are predicted anew, for `make test`; `make soak` takes all.
STEPS = "h100-x4-predictions-1"
# A last digit may differ between processors: sums of numpy are ordered by vector length.
TOLERANCE = 1e-9
# Folders of scripts; a line says that a program reads, if that takes more than 2 s.
UNSTEADY = {
    r"/\w+/tmp\w+": "TEMP",
    r"# reading .* \.\.\.\n": "",
    r"layouts in \d+ s\b": "layouts in SECONDS s",
    r", \d+ days? ago": ", DAYS ago",  # of a run whose parts are used
}
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


def commands(transcript: str) -> list[str]:
    """Return the command lines of a transcript."""
    lines = transcript.splitlines()
    return [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]


def transcribe(lines: list[str]) -> str:
    """Run command lines in a new folder and return their transcript."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name).resolve()
        for linked in LINKED:
            (folder / linked).symlink_to(ROOT / linked)
        (folder / "few").mkdir()
        for run in FEW:
            (folder / "few" / run).symlink_to(ROOT / "results" / run)
        (folder / "steps").mkdir()
        (folder / "steps" / STEPS).symlink_to(ROOT / "results" / STEPS)
        # A trace is read once for all commands.
        patch.setattr(trace_files, "cores", lambda: 1)
        patch.setattr(layout_search, "cores", lambda: 1)
        patch.setattr(trace_files, "read_trace", functools.cache(read_trace))
        patch.setattr(waiting, "_PATIENCE_S", 1e6)  # no line that depends on how long it takes
        variables = _variables_read(patch)
        return "".join(_section(line, folder, patch, variables) for line in lines)


def _variables_read(patch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of variables that this process reads, which grow as it reads them."""
    names: set[str] = set()
    original = os.environ.__class__.__getitem__

    def read(environ: "os._Environ[str]", name: str) -> str:
        names.add(name)
        return original(environ, name)

    patch.setattr(os.environ.__class__, "__getitem__", read)
    # argparse makes a formatter for each option that it is given; none of them prints.
    patch.setattr(argparse.ArgumentParser, "_get_formatter", _formatter)
    return names


def _formatter(parser: argparse.ArgumentParser) -> argparse.HelpFormatter:
    return parser.formatter_class(prog=parser.prog, width=WIDTHS[0])  # type: ignore[call-arg]


def _section(line: str, folder: Path, patch: pytest.MonkeyPatch, variables: set[str]) -> str:
    """Return what one command did. variables: those that this process has read."""
    program, *words = shlex.split(line)
    before = _written(folder)
    shown = []
    for width in WIDTHS:
        patch.setenv("COLUMNS", str(width))
        variables.clear()
        run = stepmark if program == "stepmark" else _script
        done = run(*words, cwd=folder)
        text = _block("to stdout", _plain(done.stdout, folder))
        text += _block("to stderr", _plain(done.stderr, folder))
        shown.append(text)
        if program != "stepmark" or "COLUMNS" not in variables:
            break  # nor does a script, which prints no tables that know a width
    section = f"{PROMPT}{line}\n{shown[0]}"
    if shown[-1] != shown[0]:
        section += f"# at {WIDTHS[-1]} columns\n{shown[-1]}"
    section += f"# exit code {done.returncode}\n"
    for path, content in _written(folder).items():
        if before.get(path) != content:
            section += _block(f"writes {path}", _shortened(_plain(content, folder)))
    return section + "\n"


def _script(path: str, *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ROOT / path, *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def _block(head: str, text: str) -> str:
    """Return lines below a head; nothing where there are none."""
    lines = "".join(f"  {line}".rstrip() + "\n" for line in text.splitlines())
    return f"# {head}\n{lines}" if lines else ""


def _plain(text: str, folder: Path) -> str:
    """Return a text without what differs between machines and runs."""
    names = {str(folder): "FOLDER", sys.executable: "PYTHON", str(ROOT): "ROOT"}
    for name, stands_in in names.items():
        text = text.replace(name, stands_in)
    for pattern, stands_in in UNSTEADY.items():
        text = re.sub(pattern, stands_in, text)
    return text


def _written(folder: Path) -> dict[str, str]:
    """Return the files that commands wrote into a folder, by their names."""
    return {path.relative_to(folder).as_posix(): _content(path) for path in _files(folder)}


def _content(path: Path) -> str:
    """Return the text of a file; of one that is no text its size and digest."""
    data = path.read_bytes()
    text = data.decode(errors="replace")
    if "".join(text.split()).isprintable():
        return text
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}\n"


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.is_file():
            yield path


def _shortened(text: str) -> str:
    """Return a text, or its beginning with a digest of what is left out.

    Numbers count in the digest with nine digits, so that it is equal on any machine.
    """
    rounded = NUMBER.sub(lambda number: f"{float(number[0]):.9g}", text)
    digest = hashlib.sha256(rounded.encode()).hexdigest()[:16]
    lines = [line[:MAX_LINE] for line in text.splitlines()[:MAX_LINES]]
    is_whole = lines == text.splitlines()
    return "\n".join(lines if is_whole else [*lines, f"... sha256 {digest}"])


def first_difference(kept: str, now: str) -> str:
    """Return the command and the lines that differ; nothing where no line does.

    Numbers with decimals may differ in their last digits.
    """
    kept_lines = kept.splitlines()
    now_lines = now.splitlines()
    command = ""
    for number, line in enumerate(kept_lines):
        if line.startswith(PROMPT):
            command = line
        other = now_lines[number] if number < len(now_lines) else "(nothing)"
        if not _is_same(line, other):
            return f"{command}\n- {line}\n+ {other}"
    if len(now_lines) > len(kept_lines):
        return f"{command}\n+ {now_lines[len(kept_lines)]}"
    return ""


def _is_same(kept: str, now: str) -> bool:
    if kept == now:
        return True
    if NUMBER.sub("", kept) != NUMBER.sub("", now):
        return False
    pairs = zip(NUMBER.findall(kept), NUMBER.findall(now), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=TOLERANCE, abs=0) for a, b in pairs)


def main(names: list[str]) -> int:
    """Write the transcripts of these names, or all."""
    for path in TRANSCRIPTS:
        if not names or path.stem in names:
            kept = path.read_text()
            now = transcribe(commands(kept))
            # Digits in which machines differ are no change that a review should see.
            if first_difference(kept, now):
                path.write_text(now)
                print(f"{path.relative_to(ROOT)}: changed")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
