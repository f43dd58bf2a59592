"""`stepmark train --cp` as a user starts it: the same sequences, divided over ranks."""

from pathlib import Path

import pytest

from .process import lines, only_run, stepmark

pytestmark = pytest.mark.ranks

TINY = ["--device", "cpu", "--scale", "tiny", "--seq-len", "64", "--mbs", "2", "--steps", "4"]


def first_losses(cwd: Path, *words: str) -> list[float]:
    done = stepmark("train", "llama-3.1-8b", *words, *TINY, "--lr", "0.003", cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = lines(only_run(cwd / "runs"))
    found: list[float] = line["training"]["loss"][:5]
    return found


def test_it_learns_what_one_rank_learns(tmp_path: Path) -> None:
    """What is told is the mean over the parts of a sequence, of the same data."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    want = first_losses(folders[0], "--strategy", "single")
    assert len(set(want)) == 5
    assert first_losses(folders[1], "--strategy", "cp") == pytest.approx(want, rel=1e-5)
