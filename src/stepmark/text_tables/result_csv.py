"""Read the CSV of `stepmark comm` and `stepmark op`, and the CSV and JSON of rccl-tests (-Z).

Ours has SI units but for GB/s. Rows of one collective with the same options are one table;
operators are one table per family and differ in their label. rccl-tests has a row per size and
placement in us and GB/s; its JSON is one object per line, later one list. Columns are found by
name; a run on several nodes has `ranks` and `gpusPerRank`, one on a node `gpus`.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stepmark.cases.comm_case import SETTINGS, CommCase
from stepmark.cases.fields import in_words
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.ground.units import GB
from stepmark.model.collectives import collective_named
from stepmark.text_tables import nccl_json, nccl_lines, printed_figures
from stepmark.text_tables.printed_figures import parse_integer, parse_number

Row = Mapping[str, str]
_NEEDED = {"family", "dtype", "case_id", "run_id", "time_s"}
# Equal in all rows of a table of collectives.
_SAME_IN_TABLE = (*SETTINGS, "pair", "method")
# The columns that name an operator.
_OPERATOR_LABEL = (
    *("model", "role", "pass", "shape", "layout", "scale", "dtype", "backend", "device"),
    "rate",
)
_TITLE = ("mode", "api", "backend", "pair")

_RCCL_NEEDED = {"collective", "size", "type", "inplace", "time", "busbw"}
_RCCL_JSON_NEEDED = {"name", "size", "type", "inplace", "time", "busbw"}
_RCCL_PLACEMENTS = {"0": OUT_OF_PLACE, "false": OUT_OF_PLACE, "1": IN_PLACE, "true": IN_PLACE}
_MAX_LOST = 2  # names of a header that is still recognized
_MAX_LINE = 4096
_MAX_NOTES = 5


def is_stepmark(head: str) -> bool:
    """Return whether our header is among the first lines; `# name` may stand above it."""
    first_lines = head[:16384].split("\n")[:3]
    return any({cell.strip() for cell in line.split(",")} >= _NEEDED for line in first_lines)


def is_rccl(head: str) -> bool:
    """Return whether the first line is the header of rccl-tests' CSV, if with lost names."""
    return len(missing_rccl_names(head)) <= _MAX_LOST


def missing_rccl_names(head: str) -> list[str]:
    """Return the needed names that the first line of rccl-tests' CSV lacks."""
    return sorted(_RCCL_NEEDED.difference(_rccl_names(head)))


def read_stepmark(text: str, file: str) -> list[Table]:
    """Return the tables of all parts of the file, in order."""
    collectives: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    operators: dict[str, list[tuple[int, Row]]] = {}
    incomplete_line = 0
    for number, row in _stepmark_rows(text):
        if row is None:
            incomplete_line = number
        elif row.get("collective") and row.get("size_bytes"):
            key = (row["collective"], *(row.get(name, "") for name in _SAME_IN_TABLE))
            collectives.setdefault(key, []).append((number, row))
        elif not row.get("collective"):
            operators.setdefault(row.get("family", ""), []).append((number, row))
    tables = [_collective_table(rows, file) for rows in collectives.values()]
    tables += [_operator_table(rows, file) for rows in operators.values()]
    tables = [table for table in tables if table.readings]
    if incomplete_line:
        notes = (f"line {incomplete_line}: a row that is cut off is left out",)
        tables = [replace(table, notes=notes) for table in tables]
    return tables


def _stepmark_rows(text: str) -> Iterator[tuple[int, Row | None]]:
    """Yield (line, row) of the whole run, not of single ranks; None for an incomplete row."""
    names: list[str] = []
    reader = csv.reader(io.StringIO(text))
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            continue
        if set(cells) >= _NEEDED:
            names = cells
        elif names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            if not row.get("rank"):
                yield number, row
        elif names and len(cells) > 1:
            yield number, None


def _collective_table(rows: Sequence[tuple[int, Row]], file: str) -> Table:
    first = rows[0][1]
    num_ranks = parse_integer(first.get("num_ranks", ""))
    words = [first[name] for name in _TITLE if first.get(name)]
    words += in_words(CommCase, {name: _value(first.get(name, "")) for name in SETTINGS})
    readings = (_collective_reading(number, row) for number, row in rows)
    return Table(
        file=file,
        first_line=rows[0][0],
        last_line=rows[-1][0],
        title=" ".join((first["collective"], f"x{num_ranks}", *words)),
        tool="stepmark",
        collective=first["collective"],
        collective_from="its column",
        num_ranks=num_ranks,
        num_ranks_from="its column" if num_ranks else "",
        method=first.get("method", ""),
        readings=tuple(reading for reading in readings if reading),
    )


def _value(text: str) -> object:
    """Return a cell as the row had it."""
    if text in ("True", "False"):
        return text == "True"
    if (whole := parse_integer(text)) is not None:
        return whole
    number = parse_number(text)
    return number if number is not None else text or None


def _collective_reading(number: int, row: Row) -> Reading | None:
    time_s = parse_number(row["time_s"])
    if not time_s or time_s < 0:
        return None
    return Reading(
        line=number,
        size_bytes=parse_integer(row["size_bytes"]),
        count=parse_integer(row.get("count", "")),
        dtype=row["dtype"],
        redop=row.get("redop", ""),
        root=parse_integer(row.get("root", "")),
        placement=row.get("placement", ""),
        time_s=time_s,
        algbw_bytes_per_s=_gigabytes(row.get("algbw_gb_s", "")),
        busbw_bytes_per_s=_gigabytes(row.get("busbw_gb_s", "")),
        num_wrong=parse_integer(row.get("num_wrong", "")),
    )


def _gigabytes(text: str) -> float | None:
    value = parse_number(text)
    return None if value is None else value * GB


def _operator_table(rows: Sequence[tuple[int, Row]], file: str) -> Table:
    methods = {row.get("method", "") for _, row in rows if row.get("time_s")}
    return Table(
        file=file,
        first_line=rows[0][0],
        last_line=rows[-1][0],
        title=rows[0][1]["family"],
        tool="stepmark",
        collective=rows[0][1]["family"],
        collective_from="its column",
        method=methods.pop() if len(methods) == 1 else "",
        readings=tuple(
            Reading(
                line=number,
                label=" ".join(row[name] for name in _OPERATOR_LABEL if row.get(name)),
                dtype=row["dtype"],
                time_s=time_s,
                num_wrong=parse_integer(row.get("num_wrong", "")),
            )
            for number, row in rows
            if (time_s := parse_number(row["time_s"])) and time_s > 0
        ),
    )


def read_rccl(text: str, file: str) -> list[Table]:
    """Return the tables of rccl-tests' CSV, one per collective and number of ranks."""
    lines = text.lstrip("\ufeff \t\r\n").splitlines()
    first_line = 1 + len(text.splitlines()) - len(lines)
    names = _rccl_names(lines[0])
    # A release leaves `nodes` out of its header (ROCm/rocm-systems, pull request 6004).
    lacks_nodes = "rankspernode" in names and "nodes" not in names
    rows: list[tuple[int, Row]] = []
    notes: list[str] = []
    for number, line in enumerate(lines[1:], first_line + 1):
        # The first releases put a space behind each comma.
        cells = [cell.strip().strip('"') for cell in line[:_MAX_LINE].split(",")]
        if len(cells) == len(names) + 1 and lacks_nodes:
            cells.pop(names.index("collective") + 1)
        if len(cells) == len(names) and _RCCL_NEEDED.issubset(names):
            rows.append((number, dict(zip(names, cells, strict=True))))
        elif any(cells):
            notes.append(f"line {number}: {len(cells)} of {len(names)} cells: left out")
    return _rccl_tables(rows, file, notes)


def _rccl_names(text: str) -> list[str]:
    first_line = text[:_MAX_LINE].partition("\n")[0]
    return [name.strip().strip('"').lower() for name in first_line.split(",")]


def read_rccl_json(text: str, file: str) -> list[Table]:
    """Return the tables of JSON lines or of one list; [] for JSON of another kind."""
    head = text[:_MAX_LINE].lower()
    if '"busbw"' not in head or '"inplace"' not in head:
        return []
    document = nccl_json.decode(text)
    if isinstance(document, list):
        parts: list[tuple[int, object]] = [(1, part) for part in document]
    else:  # an object per line, or a list that was never closed
        lines = enumerate(text.split("\n"), 1)
        bare = ((number, line.strip(" \t\r,[]")) for number, line in lines)
        parts = [(number, nccl_json.decode(line)) for number, line in bare if line]
    rows: list[tuple[int, Row]] = []
    notes: list[str] = []
    for number, part in parts:
        if not isinstance(part, dict):
            notes.append(f"line {number}: no complete result: left out")
            continue
        row = {str(key).lower(): str(value) for key, value in part.items()}
        if row.keys() >= _RCCL_JSON_NEEDED:
            rows.append((number, row))
    return _rccl_tables(rows, file, notes)


def _rccl_tables(
    rows: Sequence[tuple[int, Row]], file: str, notes: Sequence[str]
) -> list[Table]:
    groups: dict[tuple[str, int | None, str], list[Reading]] = {}
    for number, row in rows:
        if reading := _rccl_reading(number, row):
            name = collective_named(row.get("collective") or row.get("name") or "")
            groups.setdefault((name, *_rccl_num_ranks(row)), []).append(reading)
    tables: list[Table] = []
    for (collective, stated, source), readings in groups.items():
        num_ranks = stated
        reason = source
        if num_ranks is None:
            num_ranks, reason = printed_figures.num_ranks_of(readings, collective)
        tables.append(
            Table(
                file=file,
                first_line=readings[0].line,
                last_line=readings[-1].line,
                title=collective,
                tool="rccl-tests",
                collective=collective,
                collective_from="its column" if collective else "",
                num_ranks=num_ranks,
                num_ranks_from=reason if num_ranks else "",
                readings=tuple(readings),
                notes=tuple(notes[:_MAX_NOTES]) if not tables else (),
            )
        )
    return tables


def _rccl_num_ranks(row: Row) -> tuple[int | None, str]:
    ranks = parse_integer(row.get("ranks", ""))
    each = parse_integer(row.get("gpusperrank", ""))
    if ranks and each:
        return ranks * each, f"{ranks} ranks x {each} GPUs, its columns"
    gpus = parse_integer(row.get("gpus", ""))
    return (gpus, "its column gpus") if gpus else (None, "")


def _rccl_reading(number: int, row: Row) -> Reading | None:
    size = parse_integer(row["size"])
    time = parse_number(row["time"])
    busbw = _gigabytes(row["busbw"])
    if size is None or (time is None and busbw is None):
        return None
    return Reading(
        line=number,
        size_bytes=size,
        dtype=nccl_lines.dtype_named(row["type"]),
        redop=row.get("redop", "").lower(),
        placement=_RCCL_PLACEMENTS.get(row.get("inplace", "").lower(), ""),
        time_s=time * 1e-6 if time and time > 0 else None,
        algbw_bytes_per_s=_gigabytes(row.get("algbw", "")),
        busbw_bytes_per_s=busbw,
        num_wrong=parse_integer(row.get("#wrong", row.get("wrong", ""))),
        cycle=max(0, parse_integer(row.get("numcycle", "")) or 0),
        printed=(row["time"], row.get("algbw", ""), row["busbw"]),
    )
