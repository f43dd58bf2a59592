"""Runs from which steps are predicted."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli import main

from .predicted_runs import Predict, copy_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Predict:
    monkeypatch.chdir(runs.parent)

    def call(words: str) -> tuple[int, Any, str]:
        """Return the exit code, the document of --json and what else is said."""
        more = [] if "--runs" in words else ["--runs", str(runs)]
        code = main.status(["predict", *shlex.split(words), *more, "--json", "-"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, json.loads(out) if out else None, err

    return call
