"""Ranks of commands that run in this process are forked."""

from pathlib import Path

import pytest

from stepmark.launching import slurm
from stepmark.measuring import child, local_ranks

from .launch_programs import Programs


@pytest.fixture(autouse=True)
def _ranks_are_marked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, forked_ranks: None
) -> None:
    if request.node.get_closest_marker("ranks") is None:
        monkeypatch.setattr(local_ranks, "_start", _refuse)


@pytest.fixture(autouse=True)
def _ends_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of the tests start hundreds of commands that take a few hundredths of a second."""
    monkeypatch.setattr(child, "_POLL_S", 0.01)


def _refuse(*_: object) -> None:
    raise AssertionError("a test that measures on ranks needs the mark `ranks`")


@pytest.fixture
def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test, outside any launcher, and follow jobs quickly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    monkeypatch.setattr(slurm, "_TICK_S", 0.01)
    for name in ("RANK", "SLURM_PROCID", "SLURM_RESTART_COUNT", "A"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path / "bin", monkeypatch)
