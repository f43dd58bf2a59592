"""Plans on disk: plan.jsonl of a run directory, a head line and a line per entry.

It is written once, before ranks start, and ranks read nothing else. A run directory that has
only this file is a run without a result.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec

from stepmark.cases.plan import PLAN_SCHEMA, Entry, Plan
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole
from stepmark.store import codec

FILE = "plan.jsonl"


def write(run: Path, plan: Plan) -> None:
    """Write the plan of a run that has none yet. Raises OSError."""
    with (run / FILE).open("xb") as file:
        file.write(encode(plan))


def replace(run: Path, plan: Plan) -> None:
    """Write the plan with which a run is continued: the same cases, unless that was forced."""
    temporary = run / f"{FILE}.tmp"
    temporary.write_bytes(encode(plan))
    temporary.replace(run / FILE)


def read(run: Path) -> Plan:
    """Read the plan of a run. Raises ConfigError where there is none that can be read."""
    return read_file(run / FILE)


def read_file(path: Path) -> Plan:
    """Read a plan that lies elsewhere than in plan.jsonl of its run. Raises ConfigError."""
    if not os.path.exists(path):  # also where the folder cannot be entered
        raise ConfigError("run", path.parent, f"a run with a {path.name}")
    return decode(read_whole(path, "run"), str(path))


def has_plan(run: Path) -> bool:
    """Return False for runs of older releases."""
    return (run / FILE).is_file()


def encode(plan: Plan) -> bytes:
    """Return the text of plan.jsonl."""
    head = codec.to_plain(dataclasses.replace(plan, entries=()))
    del head["entries"]
    lines: list[Any] = [{"num_entries": len(plan.entries), **head}]
    lines += [
        {
            "launch": entry.launch,
            **({"profile": entry.profile} if entry.profile else {}),
            "kind": entry.case.kind,
            "case": codec.case_to_plain(entry.case),
        }
        for entry in plan.entries
    ]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def decode(text: bytes, where: str = FILE) -> Plan:
    """Read a plan. Raises ConfigError for other JSON, a newer schema, or a part of a plan."""
    first, *lines = text.splitlines() or [b""]
    head = codec.json_object(first, where)
    schema = head.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= PLAN_SCHEMA:
        allowed = f"from 1 to {PLAN_SCHEMA}; a newer stepmark reads newer plans"
        raise ConfigError(f"{where} schema", schema, allowed)
    if head.get("num_entries") != len(lines):
        allowed = f"as many as it says, {head.get('num_entries')}"
        raise ConfigError(f"{where} entries", len(lines), allowed)
    entries = tuple(_entry(position, line, where) for position, line in enumerate(lines))
    return codec.build(Plan, head, {"entries": entries})


def _entry(position: int, line: bytes, where: str) -> Entry:
    plain = codec.json_object(line, f"{where}:{position + 2}")
    case = codec.case_from_plain(plain.get("case"))
    launch = plain.get("launch")
    if not isinstance(launch, int) or launch < 1:
        raise ConfigError(f"{where}:{position + 2} launch", launch, "a whole number from 1")
    known = {"position": position, "launch": launch, "case": case}
    return codec.build(Entry, plain, known)
