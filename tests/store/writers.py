"""Runs that tests write."""

from pathlib import Path

from stepmark.cases.record import RunInfo
from stepmark.store.runs import RunWriter


def new_run(root: Path, info: RunInfo) -> RunWriter:
    path = root / info.run_id
    path.mkdir(parents=True)
    return RunWriter.begin(path, info)
