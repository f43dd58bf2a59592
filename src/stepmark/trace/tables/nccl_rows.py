"""One row of nccl-tests or rccl-tests: its leading words and its figures.

Columns are found from the right end: what stands between type and figures (redop, root)
differs by version and collective, and copies into slides lose empty cells.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmark.trace.parse_numbers import NUMBER

TYPES = frozenset(
    (
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "char"),
        *("int", "half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2", "fp8_e4m3"),
        *("fp8_e5m2", "fp8", "fp64", "fp32", "fp16", "bf16", "float16", "float32", "float64"),
    )
)
_ROW = re.compile(
    r"\s*(?:[-*>|]\s*)?(?P<size>\d{1,19})[\s|,]+(?P<count>\d{1,19})[\s|,]+"
    r"(?P<type>[A-Za-z]\w{2,11})(?![\w.])"
    r"(?:[\s|,]+(?P<redop>(?i:sum|prod|min|max|avg|mulsum|none))(?![^\s|,]))?"
)
_CELL = rf"(?:{NUMBER}|(?i:N/A|-?nan|-?inf|--?))"
# Up to a time stamp, algorithm names or a log line.
_FIGURES = re.compile(rf"(?:[\s|,]+{_CELL}[*%]?(?![^\s|,]))*")
_SEPARATORS = re.compile(r"[\s|,]+")
_TIME_STAMP = re.compile(r"[\s|,]*(?:\d{4}-\d\d-\d\d\s+\d\d:\d\d:\d\d)?[\s|,]*")
# A log line that follows a figure directly: the row was printed in parts.
_CELL_BEFORE_LOG = re.compile(rf"[\s|,]+(?P<cell>N/A|{NUMBER})(?=[A-Za-z\[])")
MAX_LINE = 4096

# The figures of one placement by their number. Five: rccl-tests' device time.
_FIGURE_NAMES = {
    3: ("time", "algbw", "busbw"),
    4: ("time", "algbw", "busbw", "wrong"),
    5: ("time", "hipevt", "algbw", "busbw", "wrong"),
    8: ("time", "algbw", "busbw", "wrong", "i_min", "i_max", "i_p99", "i_cv"),
}
# Figures in a row -> (placements, figures of each); one more is the root.
_LAYOUT_BY_WIDTH = {8: (2, 4), 4: (1, 4), 16: (2, 8), 10: (2, 5), 3: (1, 3)}
_COLUMN_NAMES = {"cputime": "time", "#wrong": "wrong", "error": "wrong", "res": "wrong"}


@dataclass(slots=True)
class Row:
    """A row as printed; `cells` are the figures, with the root in front if it is there."""

    line: int
    size: int
    count: int
    dtype: str
    redop: str
    cells: list[str] = field(default_factory=list)
    last_line: int = 0  # of a row broken in two


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of the cells of all rows of one table."""

    width: int  # cells of a complete row, root included
    placements: int
    columns: tuple[str, ...]  # of each placement

    @property
    def has_root(self) -> bool:
        return self.width > self.placements * len(self.columns)


def parse_row(line: str, number: int) -> Row | None:
    """Return a row, possibly an incomplete one, or None for any other line."""
    if len(line) > MAX_LINE:
        return None
    match = _ROW.match(line)
    if not match or match["type"].lower() not in TYPES:
        return None
    return Row(
        line=number,
        size=int(match["size"]),
        count=int(match["count"]),
        dtype=match["type"],
        redop=(match["redop"] or "").lower(),
        cells=_figures(line, match.end())[0],
        last_line=number,
    )


def parse_continuation(line: str) -> list[str]:
    """Return the figures of a line that holds nothing else; [] for any other."""
    if len(line) > MAX_LINE:
        return []
    cells, rest, is_before_log = _figures(" " + line, 0)
    return cells if is_before_log or _TIME_STAMP.fullmatch(rest) else []


def _figures(line: str, start: int) -> tuple[list[str], str, bool]:
    """Return (figures, what follows, whether a log line follows the last figure directly)."""
    match = _FIGURES.match(line, start)
    end = match.end() if match else start
    cells = [cell.rstrip("%") for cell in _SEPARATORS.split(line[start:end]) if cell]
    last = _CELL_BEFORE_LOG.match(line, end)
    return ([*cells, last["cell"]] if last else cells), line[end:], last is not None


def header_layout(columns: Sequence[str]) -> Layout | None:
    """Return the layout that header words in usual order state; None for scrambled ones."""
    words = [_COLUMN_NAMES.get(word, word.rstrip("%")) for word in columns if word[0] != "("]
    if "time" not in words:
        return None
    figures = words[words.index("time") :]
    while figures and figures[-1] not in ("wrong", "i_cv"):
        figures.pop()
    placements = figures.count("time")
    width = len(figures) // max(placements, 1)
    names = tuple(figures[:width])
    known = names in _FIGURE_NAMES.values() and list(names) * placements == figures
    if not known or placements > 2:
        return None
    return Layout(placements * width + ("root" in words), placements, names)


def layout_of(rows: Sequence[Row], columns: Sequence[str]) -> Layout | None:
    """Return the header's layout if rows have it, else the one by the most frequent width."""
    widths = Counter(len(row.cells) for row in rows)
    stated = header_layout(columns)
    if stated and widths[stated.width] * 2 >= len(rows):
        return stated
    known = [width for width in widths if _layout_by_width(width)]
    if not known:
        return stated if stated and widths[stated.width] else None
    best = max(known, key=lambda width: (widths[width], width))
    placements, num_figures = _layout_by_width(best) or (0, 0)
    return Layout(best, placements, _FIGURE_NAMES[num_figures])


def _layout_by_width(width: int) -> tuple[int, int] | None:
    """Prefer four figures and a root to rccl-tests' five; three come without a root."""
    return _LAYOUT_BY_WIDTH.get(width) or (
        _LAYOUT_BY_WIDTH.get(width - 1) if width != 4 else None
    )
