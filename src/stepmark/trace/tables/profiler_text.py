"""Read tables of torch.profiler's `key_averages().table()`, as printed or copied from a page.

Columns are known by their headings, in any number and order: CPU and device times, shares,
memory, calls, shapes, FLOPs, source. A printed table has its columns between rules of dashes
and its sums below; a copied one has tabs and often neither. A row that lost a part is flagged
and left out.

torch 2.0 to 2.13 write the cells of "Source Location" and "Total FLOPs" in the other order
than the headings; they are exchanged here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from stepmark.core.profiler_table import Figure, Flag, ProfilerTable, RowKind, TableRow
from stepmark.trace.tables.printed_figures import NUMBER, parse_number, rounding_error
from stepmark.trace.tables.slide_tables import heading_above

DAMAGED = "damaged"  # rule of a flag: the text lost something
_HEADING = re.compile(
    r"(?P<self>Self )?(?P<unit>\w+)(?P<what> total| time avg| Mem)?(?P<share> %)?",
    re.IGNORECASE,
)
_OTHER_HEADINGS = {
    "name": "name",
    "overload name": "overload",
    "# of calls": "calls",
    "number of calls": "calls",
    "node id": "node_id",
    "input shapes": "shapes",
    "source location": "source",
}
_WORDS = frozenset(("name", "overload", "shapes", "source"))
GROUPING = frozenset(("overload", "shapes", "source", "node_id"))  # one name in several rows
_FLOPS = re.compile(r"total [kmgtp]?flops", re.IGNORECASE)
_UNITS = {
    "time": {"ns": 1.0, "us": 1e3, "µs": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9},
    "memory": {"b": 1.0, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30, "tb": 2.0**40},
    "share": {"%": 1.0},
    "count": {"": 1.0},
}
_CELL = re.compile(rf"({NUMBER}) ?([A-Za-zµμ]{{1,2}}|%|)")
_EMPTY = frozenset(("", "--", "NaN", "nan"))
_RULE = re.compile(r"-{4,}(?:  -{4,})+\s*$")
_SUM = re.compile(r"Self (\w+) time total: (\S+)\s*$")
_TOP_LEVEL = "only display top-level ops"
_MAX_LINE, _MAX_GAP, _LINES_BELOW = 16384, 3, 12

_HOST_CALL = re.compile(r"(?:cuda|hip|cu|ur|ze|mcr|musa)[A-Z]\w+$|INVALID$")
_COLLECTIVE = re.compile(
    r"(?:c10d::|record_param_comms|(?:nccl|gloo|mpi|ucc|xccl):|_?c10d_functional)"
    r"|.*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
_COMM_KERNEL = re.compile(
    r"(?:void )?(?:nccl|rccl|msccl)(?!:)|.*(?:one_?rank|cross_device_reduce|oneccl|nvshmem"
    r"|deep_ep::|(?:multimem|one_shot|two_shot)_\w*(?:reduce|gather|scatter))",
    re.IGNORECASE,
)
_COPY = re.compile(
    r"Mem(?:cpy|set)\b|Copy(?:Device|Host)To|FillBuffer|__amd_rocclr_|MEMORY_COPY"
)
_ANNOTATION = re.compile(
    r"ProfilerStep|Optimizer\.|DistributedDataParallel\.|FSDP::|FullyShardedDataParallel\."
    r"|nccl:|## |Torch-Compiled|enumerate\(DataLoader\)"
)


class _Layout(NamedTuple):
    """Where the cells of a table's lines are."""

    headings: dict[str, str]  # by key
    device: str
    offset: int  # of the first column; a launcher's prefix stands before it
    spans: list[slice]  # of columns, after the offset; [] without rules of dashes
    width: int = 0  # of a whole row; 0 unknown
    is_left: bool = False  # names are aligned left, as before torch 1.8

    def cells(self, line: str) -> list[str]:
        number = len(self.headings)
        if "\t" in line:
            cells = [cell.strip() for cell in line.split("\t", 2 * number)]
            surplus = len(cells) - number
            return list(filter(None, cells)) if 0 < surplus == cells.count("") else cells
        text = line[self.offset :]
        cells = re.split(r"\s{2,}", text.strip())
        if len(cells) != number and self.spans:
            cells = [text[span].strip() for span in self.spans]
        return cells

    def is_cut(self, line: str) -> bool:
        """Return whether a row lost its beginning or end, by where its cells stand."""
        if not self.spans:
            return False
        text, end = line[self.offset :].rstrip(), self.spans[0].stop
        edge = text[:1] if self.is_left else text[end - 1 : end]
        return len(text) < self.width or not edge.strip() or bool(text[end : end + 1].strip())


def read(lines: Sequence[str], file: str) -> list[ProfilerTable]:
    """Return all tables in order; their index is left at 0."""
    layouts = ((index, _layout(lines, index)) for index in range(len(lines)))
    return [_table(lines, index, layout, file) for index, layout in layouts if layout]


def has_table(lines: Sequence[str]) -> bool:
    """Return whether a line has the headings of a table."""
    return any(_layout(lines, index) for index in range(len(lines)))


def column_of(heading: str) -> tuple[str, str]:
    """Return (key, device) of a heading; ("", "") for an unknown one."""
    plain = " ".join(heading.split())
    if key := _OTHER_HEADINGS.get(plain.lower()):
        return key, ""
    if _FLOPS.fullmatch(plain):
        return "flops", ""
    match = _HEADING.fullmatch(plain)
    if not match or not (match["self"] or match["what"] or match["share"]):
        return "", ""
    is_cpu = match["unit"].lower() == "cpu"
    what = (match["what"] or "").lower()
    ending = "_avg" if "avg" in what else "_mem" if "mem" in what else ""
    ending += "_pct" if match["share"] else ""
    key = ("self_" if match["self"] else "") + ("cpu" if is_cpu else "device") + ending
    return key, "" if is_cpu else match["unit"]


def kind_of_column(key: str) -> str:
    """Return what the cells of a column are: a key of _UNITS, or "" for words."""
    if key in _WORDS:
        return ""
    if key in ("calls", "node_id", "flops"):
        return "count"
    return "share" if key.endswith("_pct") else "memory" if key.endswith("_mem") else "time"


def figure(cell: str, kind: str) -> Figure | None:
    """Return the number of a cell in ns, bytes or percent; None for another text."""
    match = _CELL.fullmatch(cell)
    value = parse_number(match[1]) if match else None
    if match is None or value is None:
        return None
    scale = _UNITS[kind].get(match[2].lower())
    if scale is None and not (value == 0 and not match[2]):  # torch writes 0 for async rows
        return None
    scale = scale or 1.0
    scaled = round(value * scale) if kind == "time" else value * scale
    half = 0.0 if kind == "count" else rounding_error(match[1]) * scale
    return Figure(scaled, half, cell)


def _layout(lines: Sequence[str], index: int) -> _Layout | None:
    """Return the layout of a table whose headings are on this line, or None."""
    line = lines[index]
    if "Name" not in line or "%" not in line or len(line) > _MAX_LINE:
        return None
    rule = _RULE.search(lines[index - 1]) if index else None
    offset = rule.start() if rule else 0
    parts = line.split("\t") if "\t" in line else re.split(r"\s{2,}", line[offset:])
    names = [part.strip() for part in parts if part.strip()]
    columns = [column_of(name) for name in names]
    keys = [key for key, _ in columns]
    if keys[:1] != ["name"] or "" in keys or len(set(keys)) != len(keys) or len(keys) < 3:
        return None
    if keys[-2:] == ["source", "flops"]:
        keys[-2:], names[-2:] = keys[:-3:-1], names[:-3:-1]
    spans = [slice(*dashes.span()) for dashes in re.finditer("-+", rule[0])] if rule else []
    if len(spans) != len(keys):
        spans = []
    width = spans[-1].stop if spans and keys[-1] != "source" else 0
    spans[-1:] = [slice(spans[-1].start, None)] if spans else []
    device = next((device for _, device in columns if device), "")
    return _Layout(
        dict(zip(keys, names, strict=True)),
        device,
        offset,
        spans,
        width,
        line[offset : offset + 4] == "Name",
    )


def _table(lines: Sequence[str], head: int, layout: _Layout, file: str) -> ProfilerTable:
    """Return the table whose headings are on line `head` (from 0)."""
    rows: list[TableRow] = []
    flags: list[Flag] = []
    between: list[tuple[int, str]] = []  # lines since the last row that are none
    is_ruled, is_closed = bool(layout.spans), False
    for index in range(head + 1, len(lines)):
        line = lines[index]
        if _RULE.fullmatch(line[layout.offset :]):
            is_closed = is_ruled and index > head + 1
            if is_closed:
                break
            continue
        if "Name" in line and _layout(lines, index):
            break
        row = _row(layout, line, index + 1)
        if row:
            flags += _lost(layout, between)
            rows.append(row)
            between.clear()
        elif not is_ruled and len(between) == _MAX_GAP:
            break
        else:
            between.append((index + 1, line))
    flags += _lost(layout, between) if is_closed else []
    rows = list(_classified(rows))
    last = rows[-1].line if rows else head + 1
    sums = _sums(lines[last : last + _LINES_BELOW], layout.device)
    if is_ruled and not is_closed:
        flags.append(damage(last, "", "the table was cut: its last rule is missing"))
    for key, side in (("self_cpu", "CPU"), ("self_device", layout.device)):
        if is_closed and side and key not in sums:
            reason = f"the table was cut: its Self {side} time total is missing"
            flags.append(replace(damage(last, "", reason), rule="cut"))
    flags += repeated(rows)
    is_partial = any(_TOP_LEVEL in line for line in lines[max(0, head - 3) : head])
    return ProfilerTable(
        file=file,
        first_line=head + 1,
        last_line=last,
        title=heading_above(lines, head + 1 - is_ruled),
        tool="PyTorch profiler",
        device=layout.device,
        columns=layout.headings,
        sorted_by=() if is_partial else tuple(_sorted_by(rows, layout.headings)),
        rows=tuple(rows),
        totals=sums,
        flags=tuple(flags),
    )


def _row(layout: _Layout, line: str, number: int) -> TableRow | None:
    """Return the row of a line, or None for any other line and for a torn row."""
    if len(line) > _MAX_LINE or not line.strip():
        return None
    cells = layout.cells(line)
    if len(cells) != len(layout.headings) or not cells[0] or layout.is_cut(line):
        return None
    figures, words = {}, {}
    for key, cell in zip(layout.headings, cells, strict=True):
        kind = kind_of_column(key)
        if not kind:
            words[key] = cell
        elif value := figure(cell, kind):
            figures[key] = value
        elif cell not in _EMPTY:
            return None
    if not figures:
        return None
    return TableRow(line=number, name=words.pop("name"), words=words, figures=figures)


def _lost(layout: _Layout, between: Sequence[tuple[int, str]]) -> Iterator[Flag]:
    """Yield a flag per line among the rows that is no row; lines of a row's source are."""
    for number, line in between:
        text = line[layout.offset :]
        is_source = "source" in layout.headings and (
            not text.strip() or (layout.spans and not text[: layout.spans[-2].start].strip())
        )
        if not is_source:
            yield damage(number, line.strip()[:80], "a line among the rows is no whole row")


def damage(line: int, printed: str, reason: str) -> Flag:
    """Return a flag on a line that lost something."""
    return Flag(rule=DAMAGED, line=line, row="", column="", printed=printed, reason=reason)


def repeated(rows: Sequence[TableRow]) -> Iterator[Flag]:
    """Yield a flag per row that stands twice."""
    seen: dict[object, int] = {}
    for row in rows:
        printed = tuple(each.printed for each in row.figures.values())
        first = seen.setdefault((row.name, printed, *row.words.values()), row.line)
        if first != row.line:
            yield damage(row.line, row.name, f"the row is that of line {first} again")


def _sums(lines: Sequence[str], device: str) -> dict[str, Figure]:
    """Return the sums that stand below a table."""
    sums: dict[str, Figure] = {}
    for line in lines:
        if "Name" in line:  # the next table
            break
        match = _SUM.search(line)
        value = figure(match[2], "time") if match else None
        if match and value and match[1] in ("CPU", device):
            sums.setdefault("self_cpu" if match[1] == "CPU" else "self_device", value)
    return sums


def _sorted_by(rows: Sequence[TableRow], headings: Mapping[str, str]) -> Iterator[str]:
    """Yield the columns in which every row has a figure and none is above the one before."""
    for key in headings:
        values = [row.figures[key].value for row in rows if key in row.figures]
        is_known = len(values) == len(rows) > 2 and values[0] > values[-1]
        if is_known and all(after <= before for before, after in pairwise(values)):
            yield key


def _classified(rows: Sequence[TableRow]) -> Iterator[TableRow]:
    """Yield the rows with their kinds.

    A device row has no CPU time, and all its device time is its own. It is an annotation, as
    torch copies them to the device, if a row of the host with its name launched no kernel.
    """
    launched = {row.name: row.value("self_device") for row in rows if not _is_device_row(row)}
    for row in rows:
        yield replace(row, kind=_kind(row, launched.get(row.name) == 0))


def _is_device_row(row: TableRow) -> bool:
    cpu, own = (row.value("self_cpu"), row.value("cpu")), row.value("self_device")
    return bool(own) and own == row.value("device") and cpu == (0, 0)


def _kind(row: TableRow, is_annotation: bool) -> RowKind:
    if _is_device_row(row):
        kinds = (
            (row.name == "Marker", RowKind.MARKER),
            (is_annotation or _ANNOTATION.match(row.name), RowKind.ANNOTATION),
            (_COMM_KERNEL.match(row.name), RowKind.COMM_KERNEL),
            (_COPY.match(row.name), RowKind.COPY),
        )
        return next((kind for is_so, kind in kinds if is_so), RowKind.KERNEL)
    host_kinds = (
        (_HOST_CALL, RowKind.HOST_CALL),
        (_COLLECTIVE, RowKind.COLLECTIVE),
        (_ANNOTATION, RowKind.ANNOTATION),
    )
    matching = (kind for pattern, kind in host_kinds if pattern.match(row.name))
    return next(matching, RowKind.OPERATOR)
