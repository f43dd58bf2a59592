"""Tables with a column per setting, as in slides: `Message Size | No Plugin | With Plugin`.

Cells are separated by tabs, bars or commas. The first column is a message size or a label
("16 nodes, 128 ranks"), the others are figures. Sizes with a unit are binary, as in nccl-tests.
The unit of a figure is only what a heading or the text beside the table states; otherwise it
is "" and the figures are kept as printed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepmark.core.errors import ConfigError
from stepmark.core.reading import Reading, Table
from stepmark.core.units import GB, parse_bytes
from stepmark.trace.parse_numbers import is_cell, is_number, parse_number, rounding_error
from stepmark.trace.tables.nccl_lines import collective_in_text
from stepmark.trace.tables.table_titles import heading_above

_MAX_LINE, _MAX_COLUMNS = 4096, 24
_LINES_BESIDE = 4  # below a table, in which its unit may be stated
_RULE = re.compile(r"[\s|:+=-]+")
_LAST_CHARACTERS = frozenset('0123456789|-\t *`"aAnN')
_SIZE = re.compile(r"\d{1,19}|\d{1,6}(?:\.\d{1,3})?\s?[KMGT]i?B?", re.IGNORECASE | re.ASCII)
_SIZE_HEADING = re.compile(r"\b(?:bytes?|message|msg)\b|size", re.IGNORECASE)
_SIZE_UNIT = re.compile(r"\(\s*([KMGT])i?B\s*\)", re.IGNORECASE)
_RANKS = re.compile(r"\b(\d{1,7}) (?:ranks|GPUs|gpus|GCDs)\b")

# Units are lower case, as they are written: "(US)" is a country. "step(s)" is a plural.
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "ns": 1e-9}
_SECONDS |= dict.fromkeys(("us", "µs", "μs"), 1e-6)
_TIME_UNIT = f"(?P<unit>{'|'.join(sorted(_SECONDS, key=len, reverse=True))})(?![\\w'’/])"
_TIME_WORD = re.compile(r"(?i:time|latency|latencies)(?![a-z])")
_TIME_AFTER_WORD = re.compile(rf"{_TIME_WORD.pattern}[ _,(\[]*{_TIME_UNIT}")
_TIME_IN_BRACKETS = re.compile(rf"(?:\[|(?<!\w)\()\s*{_TIME_UNIT}")
_BANDWIDTHS = {
    "busbw": re.compile(r"bus ?_?(?:bw|bandwidth)", re.I),
    "algbw": re.compile(r"alg(?:o(?:rithm)?)? ?_?(?:bw|bandwidth)", re.I),
    "GB/s": re.compile(r"\bGB(?:/s|ps\b)"),
}
_THROUGHPUT = re.compile(r"\b(image|img|sample|token|tok)s?(?:/| per )s", re.I)
_THINGS = {"img": "image", "tok": "token"}
# Bandwidths in other units than GB/s: bits, binary units, other prefixes.
_OTHER_BANDWIDTH = re.compile(r"\b(?:[KkMT]i?B|GiB|[KkMGT]i?b(?:its?)?)(?:/s|ps\b| per s)")


@dataclass(frozen=True, slots=True)
class FigureUnit:
    """Unit of a column: a rate, or seconds per printed unit of time; neither if unknown."""

    rate: str = ""
    seconds: float | None = None

    @property
    def scale(self) -> float:
        """SI units per printed unit of a rate."""
        return GB if self.rate in _BANDWIDTHS else 1.0

    @property
    def is_known(self) -> bool:
        return bool(self.rate) or self.seconds is not None


@dataclass(frozen=True, slots=True)
class _Grid:
    """Cells below one line of headings."""

    head_line: int  # from 1
    head: list[str]
    rows: list[tuple[int, list[str]]]  # line, cells


def read(lines: Sequence[str], file: str) -> list[Table]:
    """Return all such tables, in order; their index is left at 0."""
    return [_table(grid, lines, file) for grid in _grids(lines)]


def unit_of(column: str, titles: Sequence[str], prose: str) -> FigureUnit:
    """Return the unit by the column's heading, else the titles, else the text beside."""
    if own := _unit_in(column, is_heading=True):
        return own
    around = _unit_in(" ".join(titles), is_heading=True) or _unit_in(prose, is_heading=False)
    if around and around.rate and _TIME_WORD.search(column):
        return FigureUnit()  # a column of latencies in a table of bandwidths has no stated unit
    return around or FigureUnit()


def _unit_in(text: str, *, is_heading: bool) -> FigureUnit | None:
    """Return None if the text names no unit, and an unknown one if it names several."""
    patterns = (_TIME_AFTER_WORD, _TIME_IN_BRACKETS) if is_heading else (_TIME_AFTER_WORD,)
    seconds = {_SECONDS[m["unit"]] for pattern in patterns for m in pattern.finditer(text)}
    rates = {name for name, pattern in _BANDWIDTHS.items() if pattern.search(text)}
    if len(rates) > 1:
        rates.discard("GB/s")  # the unit of the other
    for match in _THROUGHPUT.finditer(text):
        thing = match[1].lower()
        rates.add(f"{_THINGS.get(thing, thing)}s/s")
    is_other = _OTHER_BANDWIDTH.search(text) is not None
    if not (seconds or rates or is_other):
        return None
    if is_other or len(seconds) + len(rates) > 1:
        return FigureUnit()
    return FigureUnit(rate=rates.pop()) if rates else FigureUnit(seconds=seconds.pop())


def _grids(lines: Sequence[str]) -> Iterator[_Grid]:
    """Yield headings with at least two rows of as many cells below them."""
    index = 0
    while index < len(lines):
        cells, separator = _row_cells(lines[index])
        first = index
        rows: list[tuple[int, list[str]]] = []
        while cells and (not rows or len(cells) == len(rows[0][1])):
            rows.append((index + 1, cells))
            index += 1
            cells = _row_cells(lines[index], separator)[0] if index < len(lines) else []
        index += not rows
        if len(rows) > 1 and (head := _head(lines, first, separator, len(rows[0][1]))):
            yield _Grid(first, head, rows)


def _row_cells(line: str, separator: str = "") -> tuple[list[str], str]:
    """Return (cells, separator) of a row of figures; quickly ([], "") for most other lines."""
    if not line or line[-1] not in _LAST_CHARACTERS or len(line) > _MAX_LINE:
        return [], ""
    separator = separator or next((sign for sign in "\t|," if sign in line), "")
    if not separator:
        return [], ""
    if separator != "|":  # most lines of logs with commas or tabs end here
        second = line.split(separator, 2)[1:2]
        if not second or not is_cell(second[0].strip(" *`")):
            return [], ""
    cells = _cells(line, separator)
    is_row = len(cells) > 1 and cells[0] and all(map(is_cell, cells[1:]))
    return (cells, separator) if is_row and any(map(is_number, cells[1:])) else ([], "")


def _cells(line: str, separator: str) -> list[str]:
    """Return the cells of a line; [] for a line without any or with too many."""
    if len(line) > _MAX_LINE:
        return []
    cells = [cell.strip(" *`") for cell in line.rstrip().split(separator, 4 * _MAX_COLUMNS)]
    if separator == "|" and not cells[0]:
        del cells[0]
    while len(cells) > 1 and not cells[-1]:
        cells.pop()
    return cells if 1 < len(cells) <= _MAX_COLUMNS else []


def _head(lines: Sequence[str], first: int, separator: str, width: int) -> list[str]:
    """Return the heading's cells above row `first`, past a rule; [] if there is none."""
    above = first - 1
    if above >= 0 and lines[above].strip() and _RULE.fullmatch(lines[above][:_MAX_LINE]):
        above -= 1
    cells = _cells(lines[above], separator) if above >= 0 else []
    is_head = len(cells) == width and all(cell and not is_number(cell) for cell in cells[1:])
    return cells if is_head else []


def _table(grid: _Grid, lines: Sequence[str], file: str) -> Table:
    sizes = _sizes(grid)
    title = heading_above(lines, grid.head_line)
    last_line = grid.rows[-1][0]
    beside = " ".join(lines[last_line : last_line + _LINES_BESIDE])
    units = [unit_of(name, (title, grid.head[0]), beside) for name in grid.head[1:]]
    rates = {unit.rate for unit in units if unit.seconds is None}
    rate = rates.pop() if len(rates) == 1 else ""
    collective = collective_in_text(f"{title} {grid.head[0]}")
    ranks = set(_RANKS.findall(title))
    num_ranks = int(ranks.pop()) if len(ranks) == 1 else None
    readings = tuple(_readings(grid, sizes, units))
    notes = _zero_notes(readings)
    if sizes:
        if not all(unit.is_known for unit in units):
            notes.append("the table does not say what its figures are")
        if not collective:
            notes.append("the collective is not known (compare --collective NAME)")
        if num_ranks is None:
            notes.append("the number of ranks is not known (compare --ranks N)")
        if _SIZE_UNIT.search(grid.head[0]):
            notes.append("sizes are read as binary units")
    return Table(
        file=file,
        first_line=grid.head_line,
        last_line=last_line,
        title=title,
        tool="values",
        unit=rate,
        collective=collective or ("" if sizes else rate),
        collective_from=f"the heading {title!r}" if collective and sizes else "",
        num_ranks=num_ranks,
        num_ranks_from=f"the heading {title!r}" if num_ranks else "",
        readings=readings,
        columns=tuple(grid.head[1:]),
        notes=tuple(notes),
    )


def _sizes(grid: _Grid) -> list[int] | None:
    """Return the bytes of the first column, or None if it holds labels."""
    texts = [cells[0] for _, cells in grid.rows]
    if not all(map(_SIZE.fullmatch, texts)):
        return None
    is_plain = all(map(str.isdecimal, texts))
    if is_plain and not _SIZE_HEADING.search(grid.head[0]):
        values = [int(text) for text in texts]
        if any(value < 1024 or value & (value - 1) for value in values):
            return None
    unit = _SIZE_UNIT.search(grid.head[0]) if is_plain else None
    try:
        return [parse_bytes(text + (unit[1] if unit else ""), "size") for text in texts]
    except ConfigError:
        return None


def _readings(
    grid: _Grid, sizes: Sequence[int] | None, units: Sequence[FigureUnit]
) -> Iterator[Reading]:
    """Yield figures row by row. A zero among figures with decimals was rounded to zero."""
    # Of the finest figure: spreadsheets drop the zeros at the end of others.
    half = min(
        rounding_error(cell) for _, cells in grid.rows for cell in cells[1:] if is_number(cell)
    )
    for index, (line, cells) in enumerate(grid.rows):
        for column, unit, cell in zip(grid.head[1:], units, cells[1:], strict=True):
            value = parse_number(cell)
            if value is None or value < 0:
                continue
            is_time = unit.seconds is not None
            time_s = value * unit.seconds if unit.seconds else 0.0
            is_bound = value == 0 and not is_time
            rate = None if is_time or is_bound else value * unit.scale
            yield Reading(
                line=line,
                label="" if sizes else cells[0],
                column=column,
                size_bytes=sizes[index] if sizes else None,
                time_s=time_s if time_s > 0 else None,
                algbw_bytes_per_s=rate if unit.rate == "algbw" else None,
                busbw_bytes_per_s=rate if unit.rate == "busbw" else None,
                rate=rate,
                rate_below=half * unit.scale if is_bound else None,
            )


def _zero_notes(readings: Sequence[Reading]) -> list[str]:
    notes = []
    if bounds := sum(one.rate_below is not None for one in readings):
        notes.append(f"{bounds} cells are 0: read as below half of the last printed digit")
    if zeros := sum(one.rate is one.rate_below is one.time_s is None for one in readings):
        notes.append(f"{zeros} times are 0 and left out")
    return notes
