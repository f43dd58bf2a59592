"""stepmark's command line in this process, with what it wrote to stdout as bytes."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status
from stepmark.step import native
from stepmark.step.workload import Workload

AICB = Path(__file__).parents[1] / "data" / "aicb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def workload(self) -> Workload:
        return native.decode(self.out)


@dataclass(frozen=True, slots=True)
class Program:
    """Called with the words of a command line behind `stepmark workload`."""

    captured: "pytest.CaptureFixture[bytes]"

    def __call__(self, line: str, *more: object, verb: str = "workload") -> Done:
        code = status([verb, *shlex.split(line), *map(str, more)])
        told = self.captured.readouterr()
        return Done(code=code, out=told.out, err=told.err.decode())

    def made(self, line: str) -> Done:
        """generate, to stdout, which must work."""
        done = self(f"generate {line} -o -")
        assert done.code == 0, done.err
        return done


def refused(done: Done, *words: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    said = [line for line in done.err.splitlines() if not line.startswith("#")]
    assert (done.code, done.out, len(said)) == (2, b"", 1), done
    assert said[0].startswith("stepmark: ")
    for word in words:
        assert word in said[0]


def program(capture: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(folder)
    return Program(capture)
