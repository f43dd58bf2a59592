"""The recipe of the pictures of a ledger, which the documents show."""

import subprocess
import sys
from pathlib import Path

import pytest

from .process import ROOT, environment

RECIPE = ROOT / "recipes" / "ledger_pictures.py"
RUN, EIGHT = ROOT / "results" / "h100-run", ROOT / "results" / "h200-predictions-2"
NAMES = ("ledger-dark.svg", "ledger-light.svg")


def recipe(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(RECIPE), *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_pictures_of_the_documents_are_those_of_the_run(tmp_path: Path) -> None:
    done = recipe(RUN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for name in NAMES:
        text = (tmp_path / name).read_text()
        assert text == (ROOT / "docs" / "images" / name).read_text()
        assert "var(" not in text  # a picture alone has no colours of a page
        for word in ("gpt2-1.5b", "step = sum", "198.5", "199.4"):
            assert word in text


@pytest.mark.parametrize(("words", "reason"), [((9,), "has 8 steps"), ((0,), "has 8 steps")])
def test_a_step_that_is_not_there_is_refused(
    tmp_path: Path, words: tuple[int], reason: str
) -> None:
    done = recipe(EIGHT, tmp_path, "--step", *words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert list(tmp_path.iterdir()) == []
