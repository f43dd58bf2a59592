"""Published runs stay what they are: every record is read, and its case keeps its identity."""

import json
from pathlib import Path

import pytest

from stepmark.store.reader import read_records

REPOSITORY = Path(__file__).parents[2]
RUNS = sorted(file.parent for file in (REPOSITORY / "results").glob("*/records.jsonl"))


def stored(run: Path) -> dict[tuple[str, int], str]:
    """Kind of the last record of each (case_id, launch), as the lines say without our code."""
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {(line["case_id"], line.get("launch", 1)): line["kind"] for line in lines}


def test_there_are_published_runs() -> None:
    assert len(RUNS) >= 40


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_case_ids_of_published_runs_stay(run: Path) -> None:
    read = {(r.case.case_id, r.launch): r.kind for r in read_records(run)}
    assert read == stored(run)
