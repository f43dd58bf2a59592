"""stepmark as a user starts it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import pytest

from stepmark.cli.main import status

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Without a launcher's variables; one thread, so that two cores do not fight."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stepmark", *arguments]


def stepmark_process(
    *arguments: str, cwd: Path, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Return how a process of its own ended, and its output."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def stepmark(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Return the same of a command that runs in this process, with forked ranks."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["stepmark", *arguments])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        streams = {number: os.dup(number) for number in (1, 2)}
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = status(list(arguments))
        finally:
            for number, stream in streams.items():
                os.dup2(stream, number)
                os.close(stream)
        return subprocess.CompletedProcess(arguments, code, _text(out), _text(err))


def _text(stream: TextIO) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


def only_run(folder: Path) -> Path:
    (path,) = (file.parent for file in folder.glob("*/run.json"))
    return path


def lines(run: Path) -> list[dict[str, Any]]:
    """Finished records as plain JSON."""
    text = (run / "records.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]
