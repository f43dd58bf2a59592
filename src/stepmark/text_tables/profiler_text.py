"""Read tables of torch.profiler's `key_averages().table()`, as printed or copied with tabs.

Columns are known by their headings, in any order; times, shares and calls are read. torch 1.8
and newer print rows between rules of dashes, and their sums below; a copied table often has
neither. What is no whole row is flagged and left out, also all rows of a table that is printed
otherwise.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from stepmark.text_tables.printed_figures import NUMBER, parse_number, rounding_error
from stepmark.text_tables.profiler_table import Figure, Flag, ProfilerTable, RowKind, TableRow
from stepmark.text_tables.slide_tables import heading_above

DAMAGED = "damaged"  # rule of a flag: the text lost something
# Columns that put one name in several rows.
GROUPING = frozenset(("Overload Name", "Input Shapes", "Source Location", "Node ID"))
_TIME = re.compile(r"(?P<self>Self )?(?P<unit>\w+)(?P<what> total| time avg)?(?P<share> %)?")
_KEYS = {"Name": "name", "# of Calls": "calls"}
_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_CELL = re.compile(rf"({NUMBER})([a-z]{{0,2}}|%)")
_EMPTY = frozenset(("", "--", "NaN", "nan", "0"))  # 0 is the share of async rows
_SEPARATOR = re.compile(r"\s{2,}|\t")
_RULE = re.compile(r"-{4,}(?:  -{4,})+\s*$")
_SUM = re.compile(r"Self (\w+) time total: (\S+)\s*$")
_TOP_LEVEL = "only display top-level ops"
_MAX_LINE = 16384
_MAX_GAP = 3
_LINES_BELOW = 12

_ANNOTATION = re.compile(
    r"ProfilerStep|Optimizer\.|DistributedDataParallel\.|FSDP::|FullyShardedDataParallel\."
    r"|nccl:|## |Torch-Compiled|enumerate\(DataLoader\)"
)
COLLECTIVE = "all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
_HOST_ROWS = {
    RowKind.HOST_CALL: re.compile(r"(?:cuda|hip|cu|ur|ze|mcr|musa)[A-Z]\w+$|INVALID$"),
    RowKind.COLLECTIVE: re.compile(
        r"(?:c10d::|record_param_comms|(?:nccl|gloo|mpi|ucc|xccl):|_?c10d_functional)"
        rf"|.*(?:{COLLECTIVE})",
        re.IGNORECASE,
    ),
    RowKind.ANNOTATION: _ANNOTATION,
}
_DEVICE_ROWS = {
    RowKind.MARKER: re.compile(r"Marker$"),
    RowKind.ANNOTATION: _ANNOTATION,
    RowKind.COMM_KERNEL: re.compile(
        r"(?:void )?(?:nccl|rccl|msccl)(?!:)|.*(?:one_?rank|cross_device_reduce|oneccl"
        r"|nvshmem|deep_ep::|(?:multimem|one_shot|two_shot)_\w*(?:reduce|gather|scatter))",
        re.IGNORECASE,
    ),
    RowKind.COPY: re.compile(
        r"Mem(?:cpy|set)\b|Copy(?:Device|Host)To|FillBuffer|__amd_rocclr_|MEMORY_COPY"
    ),
    RowKind.KERNEL: re.compile(
        rf"(?!.*(?:{COLLECTIVE}|ccl))(?:void |.*(?:[<(]|kernel|gemm|cutlass|cudnn)"
        r"|(?:nvjet|triton|ampere|volta|sm\d\d|fmha|cijk)_)",
        re.IGNORECASE,
    ),
}


class _Layout(NamedTuple):
    """Where the cells of a table's lines are."""

    headings: dict[str, str]  # by key; a column that is not read has its heading as key
    device: str
    offset: int  # behind a launcher's prefix
    spans: list[slice]  # of columns between rules of dashes; [] if cells have tabs
    is_known: bool


def read(lines: Sequence[str], file: str) -> list[ProfilerTable]:
    """Return all tables in order."""
    layouts = ((index, _layout(lines, index)) for index in range(len(lines)))
    return [_table(lines, index, layout, file) for index, layout in layouts if layout]


def _layout(lines: Sequence[str], index: int) -> _Layout | None:
    """Return the layout of a table whose headings are on this line, or None."""
    line = lines[index]
    if "Name" not in line or "Self CPU" not in line or len(line) > _MAX_LINE:
        return None
    names = _SEPARATOR.split(line.strip())
    names = names[names.index("Name") :] if "Name" in names else []  # behind a prefix
    headings = {_key(name): name for name in names}
    if len(headings) != len(names) or "self_cpu" not in headings:
        return None
    rule = _RULE.search(lines[index - 1]) if index else None
    spans = [slice(*dashes.span()) for dashes in re.finditer("-+", rule[0] if rule else "")]
    device = headings.get("self_device", "").removeprefix("Self ")
    is_known = len(spans) == len(names) or ("\t" in line and not spans)
    return _Layout(headings, device, rule.start() if rule else 0, spans, is_known)


def _key(heading: str) -> str:
    """Return the key of a column: "self_device_pct" for "Self CUDA %"."""
    match = _TIME.fullmatch(heading)
    if heading in _KEYS or not match or not any(match.group("self", "what", "share")):
        return _KEYS.get(heading, heading)
    key = ("self_" if match["self"] else "") + ("cpu" if match["unit"] == "CPU" else "device")
    key += "_avg" if match["what"] == " time avg" else ""
    return key + ("_pct" if match["share"] else "")


def figure(cell: str, units: Mapping[str, float]) -> Figure | None:
    """Return the number of a cell in one of these units; None for another text."""
    match = _CELL.fullmatch(cell.replace(",", ""))
    number = parse_number(match[1]) if match else None
    if match is None or number is None or match[2] not in units:
        return None
    scale = units[match[2]]
    value = round(number * scale, 3)
    half = rounding_error(match[1]) * scale
    return Figure(value, value - half, value + half, cell)


def _table(lines: Sequence[str], head: int, layout: _Layout, file: str) -> ProfilerTable:
    """Return the table whose headings are on line `head` (from 0)."""
    rows: list[TableRow] = []
    flags: list[Flag] = []
    torn: list[Flag] = []  # on lines since the last row
    seen: dict[str, int] = {}  # line number of each row's text
    is_closed = False
    has_source = layout.spans and "Source Location" in layout.headings
    for index in range(head + 1, len(lines) if layout.is_known else 0):
        line = lines[index][layout.offset :]
        is_rule = _RULE.fullmatch(line) is not None
        is_closed = is_rule and index > head + 1
        if is_closed or ("Name" in line and _layout(lines, index)):
            break
        if row := _row(layout, line, index + 1):
            rows.append(row)
            flags += torn
            torn.clear()
            if (first := seen.setdefault(line.strip(), row.line)) != row.line:
                flags.append(damage(row.line, row.name, f"it repeats line {first}"))
        elif not is_rule and (not has_source or line[: layout.spans[0].stop].strip()):
            torn.append(damage(index + 1, line, "a line among the rows is no whole row"))
        if not layout.spans and len(torn) > _MAX_GAP:
            break
    last = rows[-1].line if rows else head + 1
    below = takewhile(lambda line: "Name" not in line, lines[last : last + _LINES_BELOW])
    keys = {"CPU": "self_cpu", layout.device: "self_device"}
    sums = {keys.get(match[1]): match[2] for match in map(_SUM.search, below) if match}
    totals = {key: total for key in sums if key and (total := figure(sums[key], _UNITS))}
    is_complete = is_closed and len(totals) == 1 + bool(layout.device)
    if not layout.is_known:
        reason = "the headings have no rule of dashes above them, or one of other columns"
        flags.append(damage(head + 1, lines[head], reason))
    elif layout.spans and not is_complete:
        flags.append(damage(last, "", "the last rule or a sum below it is missing"))
    elif layout.spans:
        flags += torn
    if any(_TOP_LEVEL in line for line in lines[max(0, head - 3) : head]):
        flags.append(damage(head + 1, "", "the table has top-level operators only"))
    return ProfilerTable(
        file=file,
        first_line=head + 1,
        title=heading_above(lines, head + 1 - bool(layout.spans)),
        tool="PyTorch profiler",
        columns=layout.headings,
        rows=tuple(_classified(rows)),
        totals=totals,
        flags=tuple(flags),
    )


def _row(layout: _Layout, line: str, number: int) -> TableRow | None:
    """Return the row of a line, or None for any other line and for a torn row."""
    if len(line) > _MAX_LINE or _is_cut(layout, line):
        return None
    cells = _SEPARATOR.split(line.strip())
    if layout.spans and len(cells) != len(layout.headings):
        *spans, last = layout.spans
        cells = [line[span].strip() for span in (*spans, slice(last.start, None))]
    if len(cells) != len(layout.headings):
        return None
    figures = {}
    for (key, heading), cell in zip(layout.headings.items(), cells, strict=True):
        units = {"%": 1.0} if key.endswith("_pct") else {"": 1.0} if key == "calls" else _UNITS
        if key in ("name", heading):
            continue
        if value := figure(cell, units):
            figures[key] = value
        elif cell not in _EMPTY:
            return None
    return TableRow(line=number, name=cells[0], figures=figures) if figures else None


def _is_cut(layout: _Layout, line: str) -> bool:
    """Return whether a row lost its beginning or end, by where its cells stand."""
    if not layout.spans:
        return False
    columns = zip(layout.spans, layout.headings.items(), strict=True)
    width = max(span.stop for span, (key, heading) in columns if key != heading)
    text = line.rstrip()
    end = layout.spans[0].stop
    return len(text) < width or not text[end - 1 : end].strip() or text[end : end + 1] > " "


def damage(line: int, printed: str, reason: str) -> Flag:
    """Return a flag on a line that lost something."""
    return Flag(DAMAGED, line, reason, printed=printed.strip()[:80])


def _classified(rows: Sequence[TableRow]) -> Iterator[TableRow]:
    """Yield the rows with their kinds.

    A device row has no CPU time, and all its device time is its own. It is an annotation, as
    torch copies them to the device, if a row of the host with its name launched no kernel.
    """
    launched = {row.name: row.value("self_device") for row in rows if not _is_device_row(row)}
    for row in rows:
        is_device = _is_device_row(row)
        kind = RowKind.DEVICE_ROW if is_device else RowKind.OPERATOR
        patterns = _DEVICE_ROWS if is_device else _HOST_ROWS
        kind = next((each for each in patterns if patterns[each].match(row.name)), kind)
        is_copied = is_device and launched.get(row.name) == 0
        yield replace(row, kind=RowKind.ANNOTATION if is_copied else kind)


def _is_device_row(row: TableRow) -> bool:
    cpu = (row.value("self_cpu"), row.value("cpu"))
    own = row.value("self_device")
    return bool(own) and own == row.value("device") and cpu == (0, 0)
