"""Ledgers of measured steps in place of their traces, which are large: a run's ledgers.json."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole
from stepmark.timeline.ledger import Group, Ledger, MeasuredLedger

FILE = "ledgers.json"


class _Step(msgspec.Struct, kw_only=True):
    rank: int
    lines: list[tuple[Group, str, int]]  # group, name, ns


def write(run: Path, steps: Mapping[str, MeasuredLedger]) -> None:
    """Write the ledgers of a run, by case."""
    document = {
        case_id: {
            "rank": step.rank,
            "lines": [
                (str(group), name, ns) for (group, name), ns in step.ledger.lines.items()
            ],
        }
        for case_id, step in steps.items()
    }
    (run / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read(run: Path) -> dict[str, MeasuredLedger]:
    """Return the ledgers of a run without traces, by case. Raises ConfigError."""
    path = run / FILE
    if not path.is_file():
        return {}
    try:
        steps = json_text.decode(read_whole(path, "ledgers"), dict[str, _Step])
    except ValueError as error:
        raise ConfigError("ledgers", path, f"ledgers by case ({error})") from None
    ledgers = {}
    for case_id, step in steps.items():
        lines = {(group, name): ns for group, name, ns in step.lines}
        ledger = Ledger(window_ns=sum(lines.values()), lines=lines)
        ledgers[case_id] = MeasuredLedger(ledger=ledger, rank=step.rank)
    return ledgers
