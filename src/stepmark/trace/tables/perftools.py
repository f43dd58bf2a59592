"""Read and check the accelerator tables of HPE Perftools (CrayPat).

pat_report prints columns between bars, with headings over several lines; copied from a page,
cells have tabs and headings lost their columns. Columns of copies by size ("16<= HtoA CpySz
<256 Count") become bins, whose edges are Perftools' own. They count copies between host and
accelerator, not messages of collectives.

A copied row may have one cell too many. It is read if the places behind the point, which each
column keeps, leave one way to do so; other rows that do not fit are flagged and left out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from stepmark.core.profiler_table import (
    COPY_EDGES,
    Communication,
    Figure,
    Flag,
    ProfilerTable,
    TableRow,
)
from stepmark.core.units import MIB, format_bytes, format_time, parse_bytes
from stepmark.trace.tables.printed_figures import NUMBER, parse_number, rounding_error
from stepmark.trace.tables.profiler_checks import flag_on
from stepmark.trace.tables.profiler_text import damage, repeated
from stepmark.trace.tables.slide_tables import heading_above

_TITLE = re.compile(r"\s*Table \d+:\s+(.*Accelerator Regions.*)")
_TOTAL_ROW = re.compile(r"[\s|]*100\.0%")
_SCALES = {"time": 1e9, "acc_time": 1e9, "copy_in": MIB, "copy_out": MIB, "copy_peer": MIB}
_LOWER = re.compile(r"(\d+(?:[KM]iB)?)<=")
_DIRECTIONS = {"HtoA": "copy_in", "AtoH": "copy_out", "AtoA": "copy_peer"}
_LEVEL = re.compile(r" *(?:(\d)\|+|(\|+)|(\d)\.(?=\d+\.\d+%))?")
_CELL = re.compile(rf"{NUMBER}%?")
_EMPTY = ("", "-", "--")
_SOURCE_LINE = re.compile(r"line\.\d+")
_COLLECTIVE = re.compile(
    r".*(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|\bbroadcast|\bnccl|\brccl)",
    re.I,
)
_MAX_HEAD, _MAX_GAP = 16, 2


def read(lines: Sequence[str], file: str) -> list[ProfilerTable]:
    """Return all tables in order, with their flags; their index is left at 0."""
    titles = (number for number, line in enumerate(lines) if _TITLE.match(line))
    tables = (_table(lines, number, file) for number in titles)
    return [checked(table) for table in tables if table]


def has_table(lines: Sequence[str]) -> bool:
    """Return whether a line has the title of a table."""
    return any(map(_TITLE.match, lines))


def _table(lines: Sequence[str], title: int, file: str) -> ProfilerTable | None:
    """Return the table whose title is on this line, or None for one of unknown columns."""
    end = min(len(lines), title + 1 + _MAX_HEAD)
    first = next((n for n in range(title + 1, end) if _TOTAL_ROW.match(lines[n])), None)
    if first is None or not any("MiB" in line for line in lines[title + 1 : first]):
        return None
    columns = _columns(lines[title + 1 : first])
    _, total, _ = _split(lines[first])
    if len(columns) != len(total) or "acc_time" not in columns or "" in columns:
        return None
    rows: list[TableRow] = []
    flags: list[Flag] = []
    gap = 0
    for number in range(first, len(lines)):
        level, cells, words = _split(lines[number])
        if any(cells):
            gap = 0
            is_copied = "\t" in lines[number]
            fitting = _fitting(cells, total, is_copied)
            if fitting is None or not words:
                reason = f"{len(cells)} figures do not fit {len(total)} columns"
                flags.append(damage(number + 1, lines[number].strip()[:80], reason))
            else:
                if is_copied and rows and _SOURCE_LINE.fullmatch(words[0]):  # of the row above
                    rows[-1] = _with_source(rows[-1], words.pop(0))
                rows.append(
                    _row(number + 1, level, dict(zip(columns, fitting, strict=True)), words)
                )
        elif words and rows and cells and not gap:
            rows[-1] = _with_source(rows[-1], *words)
        elif _TITLE.match(lines[number]) or (gap := gap + (not words)) > _MAX_GAP:
            break
    name = lines[title].partition(":")[2].strip()
    return ProfilerTable(
        file=file,
        first_line=title + 1,
        last_line=rows[-1].line if rows else first + 1,
        title=": ".join(filter(None, (heading_above(lines, title + 1), name))),
        tool="Perftools",
        device="accelerator",
        columns=columns,
        rows=tuple(rows),
        flags=(*flags, *repeated(rows)),
    )


def _split(line: str) -> tuple[int, list[str], list[str]]:
    """Return (level, figures, words) of a row; figures of a continued source are empty."""
    match = _LEVEL.match(line)
    level = next((word for word in match.groups() if word), "") if match else ""
    rest = line[match.end() :] if match else line
    cells = [cell.strip() for cell in rest.split("\t" if "\t" in line else "|")]
    places = [n for n, cell in enumerate(cells) if cell not in _EMPTY and not _is_figure(cell)]
    end = places[0] if places else len(cells)
    figures, words = cells[:end] if len(cells) > 1 else [], list(filter(None, cells[end:]))
    return int(level) if level.isdecimal() else len(level), figures, words


def _is_figure(cell: str) -> bool:
    return _CELL.fullmatch(cell.replace(",", "")) is not None


def _columns(head: Sequence[str]) -> dict[str, str]:
    """Return headings by key; the key "" stands for headings that are not known."""
    with_bars = [line.split("|") for line in head if line.count("|") > 2]
    if with_bars:
        width = max(map(len, with_bars))
        stacks = zip(*(cells for cells in with_bars if len(cells) == width), strict=True)
        headings = [" ".join(filter(None, map(str.strip, stack))) for stack in stacks]
    else:
        cells = next((line.split("\t") for line in head if line.startswith("Time%")), [])
        headings = list(_unstacked([cell.strip() for cell in cells if cell.strip()]))
    words = re.compile(r".*Function|Source$")
    return {_key(heading): heading for heading in headings if not words.match(heading)}


def _unstacked(cells: Sequence[str]) -> Iterator[str]:
    """Yield headings from the first line of stacked headings, whose words became cells."""
    bare, copies = iter(("Acc Time%", "Acc Time")), iter(("Acc Copy In", "Acc Copy Out"))
    direction = ""
    for cell, after in pairwise((*cells, "")):
        if cell == "Acc" and after == "Copy":
            yield next(copies, "")
        elif cell == "Acc" and after == "To":
            direction = "AtoA"
            yield "Acc To Acc"
        elif cell == "Acc":
            yield next(bare, "")
        elif cell in _DIRECTIONS:
            direction = cell
            yield f"{cell} CpySz <16 Count"
        elif _LOWER.fullmatch(cell):
            yield f"{cell} {direction} CpySz Count"
        elif cell not in ("Copy", "To"):
            yield cell


def _key(heading: str) -> str:
    """Return the key of a column: copy_in_4096 counts copies from host from 4 KiB on."""
    direction = next((key for word, key in _DIRECTIONS.items() if word in heading), "")
    if direction:
        match = _LOWER.search(heading)
        edge = parse_bytes(match[1], "size") if match else 0
        return f"{direction}_{edge}" if edge in COPY_EDGES else ""
    side = "acc_time" if "Acc" in heading else "time"
    names = {
        "Acc Copy In": "copy_in",
        "Acc Copy Out": "copy_out",
        "Acc To Acc": "copy_peer",
        "Time%": f"{side}_pct",
        "Time": side,
        "Events": "events",
    }
    return next((key for words, key in names.items() if words in heading), "")


def _fitting(
    cells: Sequence[str], total: Sequence[str], is_copied: bool
) -> Sequence[str] | None:
    """Return the cells by column, without one surplus empty or zero cell; None if unclear."""
    if not is_copied:
        return cells if len(cells) == len(total) else None
    for surplus in ((), _EMPTY, ("0", "0.0", "0.00")):
        places = [n for n, cell in enumerate(cells) if cell in surplus]
        ways = {(*cells[:n], *cells[n + 1 :]) for n in places} if surplus else {tuple(cells)}
        fitting = [way for way in ways if _is_alike(way, total)]
        if len(fitting) == 1:
            return fitting[0]
    return None


def _is_alike(cells: Sequence[str], total: Sequence[str]) -> bool:
    """Return whether every cell is printed as its column is."""
    return len(cells) == len(total) and all(
        cell in (*_EMPTY, "0") or _places(cell) == _places(other)
        for cell, other in zip(cells, total, strict=True)
    )


def _places(cell: str) -> tuple[bool, int]:
    """Return whether a figure is a share, and how many digits are behind its point."""
    return cell[-1:] == "%", len(cell.rstrip("%").partition(".")[2])


def _row(line: int, level: int, cells: dict[str, str], words: Sequence[str]) -> TableRow:
    place = next((n for n, word in enumerate(words) if "/" not in word), 0)
    name = words[place] if words else ""
    source = [word for word in words[place + 1 :] if "/" in word]
    figures = {}
    for key, cell in cells.items():
        plain = cell.replace(",", "").rstrip("%")
        value = parse_number(plain)
        if value is not None and cell not in _EMPTY:
            scale = _SCALES.get(key, 1.0)
            scaled = round(value * scale) if "time" in key and scale > 1 else value * scale
            figures[key] = Figure(scaled, rounding_error(plain) * scale, cell)
    source_words = {"source": source[0]} if source else {}
    return TableRow(line=line, name=name, level=level, words=source_words, figures=figures)


def _with_source(row: TableRow, *words: str) -> TableRow:
    """Return the row with the words of a line that continues it."""
    if not row.name:
        return replace(row, name=words[0], words={"source": " ".join(words[1:])})
    source = " ".join(filter(None, (row.words.get("source", ""), *words)))
    return replace(row, words=row.words | {"source": source})


def checked(table: ProfilerTable) -> ProfilerTable:
    """Return the table with its impossible figures and what it says of communication."""
    flags = (*table.flags, *_flags(table))
    return replace(table, flags=flags, communication=_communication(table))


def _flags(table: ProfilerTable) -> Iterator[Flag]:
    """Yield shares of another sum, figures above the total, and copies that fit no bins."""
    total = table.rows[0].figures if table.rows else {}
    for row in table.rows:
        for key, figure in row.figures.items():
            whole, share = total.get(key), row.figures.get(f"{key}_pct")
            if whole and figure.low > whole.high:
                reason = f"above the {whole.printed} of {table.rows[0].name}"
                yield flag_on(table, row, key, "over-all", reason)
            if not whole or not share:
                continue
            low, high = share.low / 100 * whole.low, share.high / 100 * whole.high
            if figure.high < low or figure.low > high:
                middle = format_time((low + high) / 2e9)
                reason = f"{share.printed} of {whole.printed} is {middle}"
                yield flag_on(table, row, key, "percent", reason)
        for key in _DIRECTIONS.values():
            copied, span = row.figures.get(key), _bytes_of_bins(row, key)
            if copied and span and (copied.high < span[0] or copied.low > span[1]):
                reason = f"its copies by size hold {format_bytes(span[0])} to {_size(span[1])}"
                yield flag_on(table, row, key, "bins", reason)


def _bytes_of_bins(row: TableRow, key: str) -> tuple[float, float] | None:
    """Return the least and the most bytes that the row's copies by size hold."""
    low, high, is_binned = 0.0, 0.0, False
    for edge, upper in pairwise((*COPY_EDGES, inf)):
        if number := row.figures.get(f"{key}_{edge}"):
            is_binned = True
            low += max(number.low, 0.0) * edge
            high += number.high * upper if number.value else 0.0
    return (low, high) if is_binned else None


def _size(num_bytes: float) -> str:
    return "any size" if num_bytes == inf else format_bytes(num_bytes)


def _communication(table: ProfilerTable) -> Communication:
    """Return the largest time of a collective's function: rows may stand below one another."""
    total = table.rows[0].figures.get("acc_time") if table.rows else None
    if total is None or table.flags:
        reason = "its total is missing" if total is None else "rows of the table may be lost"
        return Communication(bound=None, reasons=(reason,))
    functions = [
        (row.figures["acc_time"].low, row.name, row.figures["acc_time"].printed)
        for row in table.rows
        if "acc_time" in row.figures and "/" not in row.name and _COLLECTIVE.match(row.name)
    ]
    low, name, printed = max(functions, default=(0.0, "no function of a collective", "0"))
    return Communication(
        bound=True if low > total.high / 2 else None,
        low_ns=max(low, 0.0),
        device_low_ns=total.low,
        device_high_ns=total.high,
        definition="Acc Time of all functions",
        reasons=(
            f"{name} has an Acc Time of {printed} s",
            "the table does not say which kernels ran under the other functions",
        ),
    )
