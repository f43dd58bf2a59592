"""Read tables of slides (a column per setting) and results of a Hugging Face Trainer.

Cells are separated by tabs or commas. The first column is a message size or a label ("16
nodes, 128 ranks"), the others are figures. Sizes with a unit are binary, as in nccl-tests. The
unit of a figure is the one rate that a heading or the text below the table names; otherwise it
is "" and the figures are kept as printed (compare --unit). A Trainer's result is a dict on one
line, which may have lost quotes when it was copied; loss and epoch are left out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Reading, Table
from stepmark.ground.units import GB, parse_bytes
from stepmark.text_tables.nccl_lines import (
    UNKNOWN_COLLECTIVE,
    UNKNOWN_RANKS,
    collective_in_text,
)
from stepmark.text_tables.printed_figures import (
    NUMBER,
    is_cell,
    is_number,
    parse_number,
    rounding_error,
)

MAX_DISTANCE = 60  # lines between a table and its heading
_MAX_TITLE = 100
_BULLET = re.compile(r"\s*(?:[-*+•]|\d{1,2}[.)])\s+(?P<text>.*)")
_MARKDOWN = re.compile(r"\s*#{1,6}\s+(?P<text>[^\s#].*)")
# Bullets, code, rows of figures, log lines and commands.
_NOT_A_HEADING = re.compile(
    r"\s*(?:[-+•(<{$>\[#]|\*\s|```|\d{1,2}[.)]\s|\d[\d.,]*(?:\t|\s{2})|\|"
    r"|.*(?:NCCL (?:INFO|WARN)|_perf\b|\b(?:srun|mpirun|mpiexec|torchrun)\b))"
)
# Lines of nccl-tests that resemble a Markdown heading.
_NCCL_TESTS_LINE = re.compile(
    r"#\s*(?:nThread|Using devices|Rank\b|out-of-place|size\b|bytes\b|\(B\)|Out of bounds|"
    r"Avg bus|Collective test|\w+-tests version|Blocking Enabled|Errors with|mode \w+ \()"
)

_MAX_LINE = 4096
_MAX_COLUMNS = 24
_LINES_BELOW = 4  # a table, in which its unit may be stated
_SIZE = re.compile(r"\d{1,19}|\d{1,6}(?:\.\d{1,3})?\s?[KMGT]i?B?", re.IGNORECASE | re.ASCII)
_SIZE_HEADING = re.compile(r"\b(?:bytes?|message|msg)\b|size", re.IGNORECASE)
_SIZE_UNIT = re.compile(r"\(\s*([KMGT])i?B\s*\)", re.IGNORECASE)
_RANKS = re.compile(r"\b(\d{1,7}) (?:ranks|GPUs|gpus|GCDs)\b")

_TIME_WORD = re.compile(r"(?i:time|latency|latencies)(?![a-z])")
_RATE_UNIT = re.compile(r"[A-Za-z]+(?:/s\b|/sec\b|ps\b)")
# At the end of a heading: "A (ms)", "time_us", "latency s"; no "node(s)".
_TIME_UNIT = re.compile(r"(?:[\s_]|(?:^|\s)[(\[])(ns|us|µs|μs|ms|s|sec|seconds)[)\]]?$")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3}
_BANDWIDTHS = {
    "busbw": re.compile(r"bus ?_?(?:bw|bandwidth)", re.I),
    "algbw": re.compile(r"alg(?:o(?:rithm)?)? ?_?(?:bw|bandwidth)", re.I),
    "GB/s": re.compile(r"\bGB(?:/s|ps\b)"),
}
_THROUGHPUT = re.compile(r"\b(image|img|sample|token|tok)s?(?:/| per )s", re.I)
_THINGS = {"img": "image", "tok": "token"}
# Steps of one launch: repeats of one figure.
_STEP_HEADING = re.compile(r"(?:global[ _])?(?:step|iter(?:ation)?)s?", re.I)
# Bandwidths in other units than GB/s: bits, binary units, other prefixes.
_OTHER_BANDWIDTH = re.compile(r"\b(?:[KkMT]i?B|GiB|[KkMGT]i?b(?:its?)?)(?:/s|ps\b| per s)")

_METRIC = re.compile(
    rf"""['"]?(?<!\w)(?P<key>[a-z]{{0,20}}_?(?:runtime|[a-z]+_per_second(?:_per_[a-z]+)?))['"]?
    \s{{0,40}}:\s{{0,40}}(?P<value>{NUMBER})(?![\w:])""",
    re.VERBOSE,
)


class _Grid(NamedTuple):
    """Cells below one line of headings."""

    head_line: int  # from 1
    head: list[str]
    rows: list[tuple[int, list[str]]]  # line, cells


def read(lines: Sequence[str], file: str) -> list[Table]:
    """Return all tables with a column per setting, in order; their index is left at 0."""
    return [_table(grid, lines, file) for grid in _grids(lines)]


def read_trainer(lines: Sequence[str], file: str) -> list[Table]:
    """Return a table per result of a Trainer, in order; their index is left at 0."""
    tables = []
    for number, line in enumerate(lines, 1):
        if len(line) > _MAX_LINE or ("_per_second" not in line and "runtime" not in line):
            continue
        if readings := tuple(_metrics(line, number)):
            words = (heading_above(lines, number), _label_above(lines, number))
            tables.append(
                Table(
                    file=file,
                    first_line=number,
                    last_line=number,
                    title=": ".join(filter(None, words)),
                    tool="trainer",
                    unit="per second",
                    readings=readings,
                )
            )
    return tables


def heading_above(lines: Sequence[str], first_line: int) -> str:
    """Return the nearest heading above line `first_line` (from 1), or ""."""
    lowest = max(-1, first_line - 2 - MAX_DISTANCE)
    headings = (_heading(lines, index) for index in range(first_line - 2, lowest, -1))
    return next(filter(None, headings), "")


def unit_of(column: str, titles: Sequence[str], below: str) -> str:
    """Return the rate that the column's heading names, else the titles, else the text below.

    "" where none or several are named, and for a column of times.
    """
    for text in (column, " ".join(titles), below):
        rates = {name for name, pattern in _BANDWIDTHS.items() if pattern.search(text)}
        if len(rates) > 1:
            rates.discard("GB/s")  # the unit of the other
        things = {match[1].lower() for match in _THROUGHPUT.finditer(text)}
        rates |= {f"{_THINGS.get(thing, thing)}s/s" for thing in things}
        rates |= {""} if _OTHER_BANDWIDTH.search(text) else set()
        if rates:
            is_clear = len(rates) == 1 and not _TIME_WORD.search(column)
            return rates.pop() if is_clear else ""
    return ""


def rate_units(columns: Sequence[str]) -> list[str]:
    """Return the different units of rates that headings name, as written: "GB/s" or "none"."""
    return sorted({" ".join(_RATE_UNIT.findall(column)) or "none" for column in columns})


def _seconds_of(column: str) -> float | None:
    """Return the unit of times that the column's heading names, in seconds."""
    match = _TIME_UNIT.search(column)
    if not match or (
        match[1] not in _SECONDS and "_" in match[0] and not _TIME_WORD.search(column)
    ):
        return None  # "img_s" is a rate
    return _SECONDS.get(match[1], 1.0)


def _grids(lines: Sequence[str]) -> Iterator[_Grid]:
    """Yield headings with at least two rows of as many cells below them."""
    index = 0
    while index < len(lines):
        cells = _row_cells(lines[index])
        first = index
        rows: list[tuple[int, list[str]]] = []
        while cells and (not rows or len(cells) == len(rows[0][1])):
            rows.append((index + 1, cells))
            index += 1
            cells = _row_cells(lines[index]) if index < len(lines) else []
        index += not rows
        if len(rows) > 1 and first:
            head = _cells(lines[first - 1])
            is_named = all(cell and not is_number(cell) for cell in head[1:])
            if is_named and len(head) == len(rows[0][1]):
                yield _Grid(first, head, rows)


def _row_cells(line: str) -> list[str]:
    """Return the cells of a row of figures; quickly [] for most other lines."""
    second = line.split(_separator(line), 2)[1:2]
    if not second or not is_cell(second[0].strip(" *`")):
        return []
    cells = _cells(line)
    is_row = len(cells) > 1 and cells[0] and all(map(is_cell, cells[1:]))
    return cells if is_row and any(map(is_number, cells[1:])) else []


def _cells(line: str) -> list[str]:
    """Return the cells of a line; [] for a line without any or with too many."""
    if len(line) > _MAX_LINE:
        return []
    parts = line.rstrip().split(_separator(line), 4 * _MAX_COLUMNS)
    return [cell.strip(" *`") for cell in parts] if 1 < len(parts) <= _MAX_COLUMNS else []


def _separator(line: str) -> str:
    return "\t" if "\t" in line else ","


def _table(grid: _Grid, lines: Sequence[str], file: str) -> Table:
    sizes = _sizes(grid)
    title = heading_above(lines, grid.head_line)
    last_line = grid.rows[-1][0]
    below = " ".join(lines[last_line : last_line + _LINES_BELOW])
    seconds = [_seconds_of(name) for name in grid.head[1:]]
    units = [
        "s" if unit else unit_of(name, (title, grid.head[0]), below)
        for name, unit in zip(grid.head[1:], seconds, strict=True)
    ]
    rate = units[0] if len(set(units)) == 1 else ""
    collective = collective_in_text(f"{title} {grid.head[0]}")
    ranks = set(_RANKS.findall(title))
    num_ranks = int(ranks.pop()) if len(ranks) == 1 else None
    readings = tuple(_readings(grid, sizes, units, seconds))
    bounds = sum(reading.rate_below is not None for reading in readings)
    notes = (
        (bounds, f"{bounds} cells are 0: read as below half of the last printed digit"),
        (sizes and not all(units), "the table does not say what its figures are"),
        (sizes and not collective, UNKNOWN_COLLECTIVE),
        (sizes and num_ranks is None, UNKNOWN_RANKS),
        (sizes and _SIZE_UNIT.search(grid.head[0]), "sizes are read as binary units"),
    )
    return Table(
        file=file,
        first_line=grid.head_line,
        last_line=last_line,
        title=title,
        tool="values",
        unit=rate,
        collective=collective or ("" if sizes or rate == "s" else rate),
        collective_from=f"the heading {title!r}" if collective and sizes else "",
        num_ranks=num_ranks,
        num_ranks_from=f"the heading {title!r}" if num_ranks else "",
        readings=readings,
        columns=tuple(grid.head[1:]),
        notes=tuple(note for is_so, note in notes if is_so),
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
    grid: _Grid,
    sizes: Sequence[int] | None,
    units: Sequence[str],
    seconds: Sequence[float | None],
) -> Iterator[Reading]:
    """Yield figures row by row. A zero among figures with decimals was rounded to zero."""
    # The finest figure decides: spreadsheets drop the zeros at the end of others.
    half = min(
        rounding_error(cell) for _, cells in grid.rows for cell in cells[1:] if is_number(cell)
    )
    is_by_step = _STEP_HEADING.fullmatch(grid.head[0])
    for index, (line, cells) in enumerate(grid.rows):
        columns = zip(grid.head[1:], units, seconds, cells[1:], strict=True)
        for column, unit, time_unit, cell in columns:
            value = parse_number(cell)
            if value is None or value < 0:
                continue
            scale = GB if unit in _BANDWIDTHS else 1.0
            rate = value * scale if value > 0 and not time_unit else None
            yield Reading(
                line=line,
                label="" if sizes else "step" if is_by_step else cells[0],
                column=column,
                size_bytes=sizes[index] if sizes else None,
                time_s=value * time_unit if value > 0 and time_unit else None,
                algbw_bytes_per_s=rate if unit == "algbw" else None,
                busbw_bytes_per_s=rate if unit == "busbw" else None,
                rate=rate,
                rate_below=half * scale if not value and not time_unit else None,
            )


def _metrics(line: str, number: int) -> Iterator[Reading]:
    for match in _METRIC.finditer(line):
        value = parse_number(match["value"])
        if value is None or value < 0:
            continue
        is_time = match["key"].endswith("runtime")
        yield Reading(
            line=number,
            label=match["key"],
            time_s=value if is_time and value > 0 else None,
            rate=value if not is_time and value > 0 else None,
            rate_below=rounding_error(match["value"]) if not is_time and value == 0 else None,
        )


def _label_above(lines: Sequence[str], first_line: int) -> str:
    """Return the text of the bullet directly above, past blank lines and code fences."""
    for index in range(first_line - 2, max(-1, first_line - 8), -1):
        line = lines[index].strip()
        if not line or line.startswith("```"):
            continue
        bullet = _BULLET.match(lines[index])
        label = bullet["text"].strip("*_`: ") if bullet else ""
        return label if len(label) <= _MAX_TITLE else ""
    return ""


def _heading(lines: Sequence[str], index: int) -> str:
    """Return this line without its markup if it is a heading: alone, short, no sentence."""
    line = lines[index]
    text = lines[index].strip()
    if len(line) > 2 * _MAX_TITLE or _NCCL_TESTS_LINE.match(text):
        return ""
    above = lines[index - 1].strip() if index else ""
    if above:
        return ""
    if markdown := _MARKDOWN.match(line):
        return markdown["text"].strip("#*_ ")[:_MAX_TITLE]
    if not text or len(text) > _MAX_TITLE or text[-1] in ".,;:{}\\" or "\t" in text:
        return ""
    below = lines[index + 1] if index + 1 < len(lines) else ""
    if _NOT_A_HEADING.match(line) or (below.strip() and not _BULLET.match(below)):
        return ""
    return text.strip("*_ ") if sum(map(str.isalpha, text)) >= 3 else ""
