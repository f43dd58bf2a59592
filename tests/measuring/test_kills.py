"""A hundred kills of all measuring verbs lose nothing, and repeat nothing."""

import dataclasses
from pathlib import Path

import pytest
from tests import soak_kills
from tests.collectives.comm_records import comm_measured, comm_run
from tests.measuring.sleeping import plan
from tests.soak_kills import COUNT, SEED, Kill
from tests.store.writers import new_run

from stepmark.cases.record import Failed, Record
from stepmark.store import plans


def written(folder: Path, *records: Record) -> Path:
    with new_run(folder, comm_run(2)) as writer:
        for record in records:
            writer.append(record)
        plans.write(writer.path, plan(2, 2))
    return writer.path


def test_the_harness_sees_what_is_lost_repeated_or_missing(tmp_path: Path) -> None:
    first, second = (
        comm_measured(entry.case, [[1e-5] * 5] * 2)  # type: ignore[arg-type]
        for entry in plan(2, 2).entries
    )
    failed = Failed(run_id="x", case=second.case, cause="lost rank", message="", ranks=(0,))
    whole = written(tmp_path / "whole", first, failed, second)
    before = soak_kills.lines(whole)
    assert len(before) == 3
    assert soak_kills.wrong(whole, before[:2]) == ""
    assert "changed" in soak_kills.wrong(whole, [*before, b"{}"])
    assert "changed" in soak_kills.wrong(whole, before[1:])
    twice = written(tmp_path / "twice", first, second, dataclasses.replace(second))
    assert "twice" in soak_kills.wrong(twice, [])
    cut = written(tmp_path / "cut", first, failed)
    assert "1 cases were not measured" in soak_kills.wrong(cut, [])
    assert "no run" in soak_kills.wrong(tmp_path, [])


# `make soak` runs these: they are kills of whole commands, and take half a minute each.
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_what_was_killed_is_continued(tmp_path: Path, number: int) -> None:
    kill = Kill(number=number, seed=SEED, folder=tmp_path)
    assert kill.check() == "", kill.events
