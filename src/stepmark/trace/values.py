"""Tables with a column per setting: `Message Size | No Plugin | With Plugin`.

Cells are separated by tabs, bars, commas or two spaces. The first column is a message size
or a label ("16 nodes, 128 ranks"), all others are figures under a heading. Sizes with a unit
are binary, as nccl-tests reads them. What the figures are is taken only from what is said in
the headings or beside the table; otherwise the unit is "" and the figures stand as printed.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.core.errors import ConfigError
from stepmark.core.reading import Reading, Table
from stepmark.core.units import parse_bytes
from stepmark.trace.figure_units import Meaning, meaning
from stepmark.trace.headings import heading_above
from stepmark.trace.nccl_facts import collective_in_text
from stepmark.trace.numerals import (
    NUMBER,
    half_unit,
    is_absent,
    is_cell,
    is_number,
    ungrouped,
    value_of,
)

_LONGEST, _MOST_COLUMNS = 4096, 24
_SPACES = re.compile(r"\s{2,}|\t")
_RULE = re.compile(r"[\s|:+=-]+")
_ENDS = frozenset('0123456789|-\t *`"aAnN')
_FIGURE = rf"(?:{NUMBER}|(?i:N/A|-?nan|--?))"
_ALIGNED = re.compile(rf"\s*\d[\d.]{{0,19}}(?: ?[KMGT]i?B?)?(?:\s{{2,}}{_FIGURE})+\s*", re.I)
_SIZE = re.compile(r"\d{1,19}|\d{1,6}(?:\.\d{1,3})?\s?[KMGT]i?B?", re.IGNORECASE | re.ASCII)
_SIZE_HEAD = re.compile(r"\b(?:size|bytes?|message|msg)\b|size", re.IGNORECASE)
_SIZE_UNIT = re.compile(r"\(\s*([KMGT])i?B\s*\)", re.IGNORECASE)
_RANKS = re.compile(r"\b(\d{1,7}) (?:ranks|GPUs|gpus|GCDs)\b")
_BESIDE = 4  # lines below a table in which its unit may stand


@dataclass(frozen=True, slots=True)
class _Found:
    first_line: int
    head: list[str]
    rows: list[tuple[int, list[str]]]


def read(lines: Sequence[str], file: str) -> list[Table]:
    """All such tables, in order; their index is left at 0."""
    return [table for found in _runs(lines) if (table := _table(found, lines, file))]


def _runs(lines: Sequence[str]) -> Iterator[_Found]:
    """Headings with at least two rows of as many cells below them."""
    index, size = 0, len(lines)
    while index < size:
        cells, kind = _row_cells(lines[index])
        if not cells:
            index += 1
            continue
        first = index
        rows = [(index + 1, cells)]
        while index + 1 < size:
            after, _ = _row_cells(lines[index + 1], kind)
            if len(after) != len(cells):
                break
            rows.append((index + 2, after))
            index += 1
        index += 1
        head = _head(lines, first, kind, len(cells))
        if head and len(rows) > 1:
            yield _Found(first - 1, head, rows)


def _row_cells(line: str, kind: str = "") -> tuple[list[str], str]:
    """(cells, what separates them) of a row; ([], "") for most other lines, quickly."""
    if not line or line[-1] not in _ENDS or len(line) > _LONGEST:
        return [], kind
    kind = kind or next((sign for sign in "\t|," if sign in line), " ")
    if kind == " " and not _ALIGNED.fullmatch(line):
        return [], kind
    if kind in "\t,":
        second = line.split(kind, 2)[1:2]
        cell = second[0].strip(' *`"') if second else "?"
        if not is_cell(ungrouped(cell)) and '"' not in line:
            return [], kind
    cells = _cells(line, kind)
    return (cells, kind) if _is_row(cells) else ([], kind)


def _cells(line: str, kind: str) -> list[str]:
    """The cells of a line; [] for one that has none or far too many."""
    if len(line) > _LONGEST:
        return []
    if kind == ",":
        cells = next(csv.reader([line]), []) if '"' in line else line.split(",")
    elif kind == " ":
        cells = _SPACES.split(line.strip())
    else:
        cells = line.rstrip().split(kind)
        cells = cells[1:] if kind == "|" and cells and not cells[0].strip() else cells
    cells = [cell.strip(" *`") for cell in cells]
    while len(cells) > 1 and not cells[-1]:
        cells.pop()
    return cells if 1 < len(cells) <= _MOST_COLUMNS else []


def _is_row(cells: Sequence[str]) -> bool:
    """A label and figures, one of them at least a number."""
    if not cells or not cells[0]:
        return False
    values = [ungrouped(cell) for cell in cells[1:]]
    return any(map(is_number, values)) and all(is_number(v) or is_absent(v) for v in values)


def _head(lines: Sequence[str], first: int, kind: str, width: int) -> list[str]:
    """The heading's cells above row `first`, past a rule; [] if there is none."""
    above = first - 1
    if above >= 0 and lines[above].strip() and _RULE.fullmatch(lines[above][:_LONGEST]):
        above -= 1
    if above < 0 or not lines[above].strip():
        return []
    cells = _cells(lines[above].lstrip("# ") if kind == " " else lines[above], kind)
    if len(cells) != width or any(not cell or is_number(cell) for cell in cells[1:]):
        return []
    return cells


# A heading that names a figure and no setting: "time_us", "busbw (GB/s)".
_FIGURE_HEAD = re.compile(
    r"(time|latency|duration|algbw|busbw|bandwidth|bus ?bw|alg ?bw)"
    r"[ _]*[\[(]?(ns|us|ms|s|g[bi]*/?p?s)?[\])]?",
    re.IGNORECASE,
)
_TIMES = ("time", "latency", "duration")


def _of_figures(found: _Found) -> _Found | None:
    """A table whose columns are figures of one setting, cut to its time or first figure."""
    figures = found.head[1:]
    if len(figures) < 2 or not all(_FIGURE_HEAD.fullmatch(cell) for cell in figures):
        return None
    timed = (place for place, cell in enumerate(figures, 1) if cell.lower().startswith(_TIMES))
    place = next(timed, 1)
    rows = [(line, [cells[0], cells[place]]) for line, cells in found.rows]
    return replace(found, head=[found.head[0], found.head[place]], rows=rows)


def _table(whole: _Found, lines: Sequence[str], file: str) -> Table | None:
    cut = _of_figures(whole)
    found = cut or whole
    head, first = found.head, found.first_line + 1
    sizes = _sizes(found)
    aligned = "\t" not in lines[first] and "|" not in lines[first] and "," not in lines[first]
    if sizes is None and aligned:
        return None
    title = heading_above(lines, first)
    last_line = found.rows[-1][0]
    beside = " ".join(lines[last_line : last_line + _BESIDE])
    meanings = [meaning(cell, (title, head[0]), beside) for cell in head[1:]]
    collective = collective_in_text(f"{title} {head[0]}")
    ranks = set(_RANKS.findall(title))
    num_ranks = int(ranks.pop()) if len(ranks) == 1 else None
    readings = tuple(_readings(found, sizes, meanings))
    kinds = {one.unit for one in meanings if one.seconds is None}
    unit = kinds.pop() if len(kinds) == 1 else ""
    is_said = all(one.is_said for one in meanings)
    if not collective and sizes is None:
        collective = unit
    return Table(
        file=file,
        index=0,
        first_line=first,
        last_line=last_line,
        title=title,
        tool="values",
        unit=unit,
        collective=collective,
        collective_from=f"the heading {title!r}" if collective and sizes else "",
        num_ranks=num_ranks,
        num_ranks_from=f"the heading {title!r}" if num_ranks else "",
        readings=readings,
        columns=() if cut else tuple(head[1:]),
        notes=_notes(found, readings, is_said, collective, num_ranks, sizes is not None),
    )


def _sizes(found: _Found) -> list[int] | None:
    """Bytes of the first column, or None if it is a label."""
    texts = [cells[0] for _, cells in found.rows]
    if not all(_SIZE.fullmatch(text) for text in texts):
        return None
    plain = all(text.isdecimal() for text in texts)
    named = _SIZE_HEAD.search(found.head[0]) is not None
    if plain and not named and not all(_is_power_of_two(int(text)) for text in texts):
        return None
    unit = _SIZE_UNIT.search(found.head[0]) if plain else None
    try:
        return [parse_bytes(text + (unit[1] if unit else ""), "size") for text in texts]
    except ConfigError:
        return None


def _is_power_of_two(value: int) -> bool:
    return value >= 1024 and value & (value - 1) == 0


def _readings(
    found: _Found, sizes: Sequence[int] | None, meanings: Sequence[Meaning]
) -> Iterator[Reading]:
    """Row by row. A zero among figures with decimals is one that was rounded away."""
    half = _last_digit([cell for _, cells in found.rows for cell in cells[1:]])
    heads = list(zip(found.head[1:], meanings, strict=True))
    for index, (line, cells) in enumerate(found.rows):
        for (column, said), cell in zip(heads, cells[1:], strict=True):
            value = value_of(ungrouped(cell))
            if value is None or value < 0:
                continue
            is_time = said.seconds is not None
            time = value * said.seconds if said.seconds else 0.0
            censored = value == 0 and not is_time
            rate = None if is_time or censored else value * said.scale
            yield Reading(
                line=line,
                label="" if sizes else cells[0],
                column=column,
                size_bytes=sizes[index] if sizes else None,
                time_s=time if time > 0 else None,
                algbw_bytes_per_s=rate if said.unit == "algbw" else None,
                busbw_bytes_per_s=rate if said.unit == "busbw" else None,
                rate=rate,
                rate_below=half * said.scale if censored else None,
            )


def _last_digit(cells: Sequence[str]) -> float:
    """Half a unit of the finest figure: spreadsheets drop the zeros at the end of others."""
    return min(half_unit(ungrouped(cell)) for cell in cells if is_number(ungrouped(cell)))


def _notes(
    found: _Found,
    readings: Sequence[Reading],
    is_said: bool,
    collective: str,
    num_ranks: int | None,
    sized: bool,
) -> tuple[str, ...]:
    notes = []
    if zeros := sum(one.rate_below is not None for one in readings):
        notes.append(f"{zeros} cells are 0: taken as below half of the last printed digit")
    zeros = sum(one.rate is one.rate_below is one.time_s is None for one in readings)
    if zeros:
        notes.append(f"{zeros} times are 0: left out")
    if sized and not is_said:
        notes.append("what the figures are is not said")
    if sized and not collective:
        notes.append("the collective is not known (compare --collective NAME)")
    if sized and num_ranks is None:
        notes.append("the number of ranks is not known (compare --ranks N)")
    if sized and _SIZE_UNIT.search(found.head[0]):
        notes.append("sizes are taken as binary units")
    return tuple(notes)
