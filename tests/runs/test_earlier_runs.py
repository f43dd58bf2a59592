"""Runs, plans and sweeps of the version before the folders of features are read and resumed."""

import shutil
from pathlib import Path

import pytest
from tests.cli.process import stepmark

from stepmark.cases.sweep import Outcome
from stepmark.store import sweeps

EARLIER = Path(__file__).parents[1] / "data" / "earlier"

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("forked_ranks")]


def test_a_run_is_shown_and_goes_on_by_its_plan(tmp_path: Path) -> None:
    run = shutil.copytree(EARLIER / "run", tmp_path / "run")
    before = (run / "records.jsonl").read_bytes()
    shown = stepmark("runs", "show", str(run), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "128 KiB" in shown.stdout
    refused = stepmark("resume", str(run), cwd=tmp_path)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    resumed = stepmark("resume", "--force", str(run), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    after = (run / "records.jsonl").read_bytes()
    assert after.startswith(before)
    assert (before.count(b"\n"), after.count(b"\n")) == (3, 4)


def test_a_sweep_goes_on(tmp_path: Path) -> None:
    path = shutil.copytree(EARLIER / "sweep", tmp_path / "sweep")
    done = [one for one in sweeps.read(path).tries if one.outcome is Outcome.DONE]
    assert len(done) == 1
    resumed = stepmark("sweep", "--resume", str(path), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    tries = sweeps.read(path).tries
    assert [one for one in tries if one.run == done[0].run] == done
    assert {one.setting for one in tries if one.outcome is Outcome.DONE} == {"default", "A=1"}
