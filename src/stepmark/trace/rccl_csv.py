"""rccl-tests -Z csv and -Z json: a row per size and placement, in us and GB/s.

JSON is one object per line, later one list. Columns are found by name; a run on several
nodes has `ranks` and `gpusPerRank`, one on a node `gpus`.
"""

import csv
import io
from collections.abc import Mapping, Sequence

import msgspec

from stepmark.core.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.core.units import GB
from stepmark.trace import infer, nccl_facts
from stepmark.trace.numerals import value_of, whole_of

_NEEDED = {"collective", "size", "type", "inplace", "time", "busbw"}
_JSON_NEEDED = {"name", "size", "type", "inplace", "time", "busbw"}
_FIRST_LINE = 4096


def is_csv(head: str) -> bool:
    """Whether the first line is the header of rccl-tests' CSV."""
    first = head[:_FIRST_LINE].partition("\n")[0]
    return {word.strip().strip('"').lower() for word in first.split(",")} >= _NEEDED


def read(text: str, file: str) -> list[Table]:
    """The tables of a CSV, one per collective and number of ranks."""
    lines = text.lstrip("\ufeff \t\r\n").splitlines()
    skipped = len(text.splitlines()) - len(lines)
    if not lines:
        return []
    names = [name.strip().strip('"').lower() for name in lines[0].split(",")]
    rows: list[tuple[int, dict[str, str]]] = []
    notes: list[str] = []
    for number, line in enumerate(lines[1:], 2 + skipped):
        cells = [cell.strip() for cell in _cells(line[:_FIRST_LINE])]
        if len(cells) == len(names):
            rows.append((number, dict(zip(names, cells, strict=True))))
        elif any(cells) and len(notes) < 5:
            notes.append(f"line {number}: {len(cells)} of {len(names)} cells: left out")
    return _tables(rows, file, notes)


def read_json(text: str, file: str) -> list[Table]:
    """The tables of JSON lines or of one list; [] for JSON of another kind."""
    head = text[:_FIRST_LINE].lower()
    if not all(f'"{name}"' in head for name in ("busbw", "inplace")):
        return []
    rows: list[tuple[int, dict[str, str]]] = []
    notes: list[str] = []
    whole = _decoded(text)
    parts = [(1, one) for one in whole] if isinstance(whole, list) else _by_line(text)
    for number, found in parts:
        if not isinstance(found, dict):
            notes += [f"line {number}: no complete result: left out"] if len(notes) < 5 else []
            continue
        row = {str(key).lower(): str(value) for key, value in found.items()}
        if row.keys() >= _JSON_NEEDED:
            rows.append((number, row))
    return _tables(rows, file, notes)


def _cells(line: str) -> list[str]:
    """The first releases put a space behind each comma."""
    try:
        return next(csv.reader(io.StringIO(line), skipinitialspace=True), [])
    except csv.Error:
        return []


def _by_line(text: str) -> list[tuple[int, object]]:
    """Objects of a text with one per line, also of a list that was never closed."""
    return [
        (number, _decoded(line.strip().strip(",[]")))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip(" \t\r,[]")
    ]


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return None


def _tables(
    rows: Sequence[tuple[int, Mapping[str, str]]], file: str, notes: Sequence[str]
) -> list[Table]:
    held: dict[tuple[str, int | None, str], list[tuple[int, Reading]]] = {}
    for number, row in rows:
        reading = _reading(number, row)
        if reading is None:
            continue
        name = nccl_facts.collective_named(row.get("collective") or row.get("name") or "")
        key = (name, *_num_ranks(row))
        held.setdefault(key, []).append((number, reading))
    tables: list[Table] = []
    for (collective, stated, stated_by), found in held.items():
        readings = tuple(reading for _, reading in found)
        num_ranks, reason = stated, stated_by
        if num_ranks is None:
            num_ranks, reason = infer.num_ranks_of(readings, collective)
        tables.append(
            Table(
                file=file,
                index=0,
                first_line=found[0][0],
                last_line=found[-1][0],
                title=collective,
                tool="rccl-tests",
                collective=collective,
                collective_from="its column" if collective else "",
                num_ranks=num_ranks,
                num_ranks_from=reason if num_ranks else "",
                readings=readings,
                notes=tuple(notes) if not tables else (),
            )
        )
    return tables


def _num_ranks(row: Mapping[str, str]) -> tuple[int | None, str]:
    ranks, each = whole_of(row.get("ranks", "")), whole_of(row.get("gpusperrank", ""))
    if ranks and each:
        return ranks * each, f"{ranks} ranks x {each} GPUs, its columns"
    gpus = whole_of(row.get("gpus", ""))
    return (gpus, "its column gpus") if gpus else (None, "")


def _reading(number: int, row: Mapping[str, str]) -> Reading | None:
    size, time = whole_of(row["size"]), value_of(row["time"])
    algbw, busbw = value_of(row.get("algbw", "")), value_of(row["busbw"])
    if size is None or (time is None and busbw is None):
        return None
    inplace = row.get("inplace", "").lower()
    wrong = row.get("#wrong", row.get("wrong", ""))
    return Reading(
        line=number,
        size_bytes=size,
        dtype=nccl_facts.dtype_named(row["type"]),
        redop=row.get("redop", "").lower(),
        placement=IN_PLACE
        if inplace in ("1", "true")
        else OUT_OF_PLACE
        if inplace in ("0", "false")
        else "",
        time_s=time * 1e-6 if time and time > 0 else None,
        algbw_bytes_per_s=None if algbw is None else algbw * GB,
        busbw_bytes_per_s=None if busbw is None else busbw * GB,
        num_wrong=whole_of(wrong),
        cycle=max(0, (whole_of(row.get("numcycle", "")) or 0)),
        printed=(row["time"], row.get("algbw", ""), row["busbw"]),
    )
