"""Calls of stepmark launch, and programs of a made-up cluster in front of PATH."""

import contextlib
import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepmark.cli.main import status

DOCS = Path(__file__).parents[2] / "docs/launch.md"


COMM = ("comm", "all_reduce", "-b", "1K", "-e", "4K")


SLURM = ("--slurm", "-N", "2", "--gpus-per-node", "2")


HOSTS = ("--hosts", "a,b", "--gpus-per-node", "2")


def called(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = status(["launch", *arguments])
    return code, out.getvalue(), err.getvalue()


def script_of(*flags: str, words: Sequence[str] = COMM) -> str:
    code, out, err = called(*flags, "--", *words)
    assert (code, err) == (0, "")
    checked = subprocess.run(["bash", "-n"], input=out, text=True, check=False)
    assert checked.returncode == 0, out
    return out


class Programs:
    """Shell scripts in front of PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def add(self, name: str, body: str) -> Path:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\ncd {self.folder}\n{body}\n")
        file.chmod(0o755)
        return file
