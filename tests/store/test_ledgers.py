"""Ledgers that stand in for traces."""

from pathlib import Path

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.store import ledgers
from stepmark.timeline.ledger import Group, Ledger, MeasuredLedger

LINES = {(Group.COMPUTE, "matmul"): 70, (Group.IDLE, "unexplained"): -3}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    step = MeasuredLedger(ledger=Ledger(window_ns=67, lines=LINES), rank=3)
    ledgers.write(tmp_path, {"case": step})
    assert ledgers.read(tmp_path) == {"case": step}


def test_a_run_with_traces_has_none(tmp_path: Path) -> None:
    assert ledgers.read(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"case": {"rank": 0, "lines": [["?", "a", 1]]}}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / ledgers.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"ledgers\.json"):
        ledgers.read(tmp_path)
