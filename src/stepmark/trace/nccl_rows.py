"""One row of nccl-tests, rccl-tests or nccom-test: its leading words and its figures.

Columns are found from the right end: what stands between type and figures (redop, root)
differs by version and collective, and copies into slides lose empty cells.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmark.trace.numerals import NUMBER

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
# What may follow them: a date and a time of day.
_STAMP = re.compile(r"[\s|,]*(?:\d{4}-\d\d-\d\d\s+\d\d:\d\d:\d\d)?[\s|,]*")
# A log line that follows a figure at once: the row was printed in parts.
_GLUED = re.compile(rf"[\s|,]+(?P<cell>N/A|{NUMBER})(?=[A-Za-z\[])")
LONGEST = 4096

# The figures of one placement, by how many there are. Five: rccl-tests' device time.
_HALVES = {
    3: ("time", "algbw", "busbw"),
    4: ("time", "algbw", "busbw", "wrong"),
    5: ("time", "hipevt", "algbw", "busbw", "wrong"),
    8: ("time", "algbw", "busbw", "wrong", "i_min", "i_max", "i_p99", "i_cv"),
}
# Figures in a row -> (placements, figures of each); one more is the root.
_BY_WIDTH = {8: (2, 4), 4: (1, 4), 16: (2, 8), 10: (2, 5), 3: (1, 3)}
_HEAD_WORD = {"cputime": "time", "#wrong": "wrong", "error": "wrong", "res": "wrong"}


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
    """How the cells of all rows of one table are divided."""

    width: int  # cells of a complete row, root included
    halves: int
    columns: tuple[str, ...]

    @property
    def has_root(self) -> bool:
        return self.width > self.halves * len(self.columns)


def parse_row(line: str, number: int) -> Row | None:
    """A row, maybe an incomplete one, or None for any other line."""
    if len(line) > LONGEST:
        return None
    found = _ROW.match(line)
    if not found or found["type"].lower() not in TYPES:
        return None
    return Row(
        line=number,
        size=int(found["size"]),
        count=int(found["count"]),
        dtype=found["type"],
        redop=(found["redop"] or "").lower(),
        cells=_figures(line, found.end())[0],
        last_line=number,
    )


def continuation(line: str) -> list[str]:
    """The figures of a line that holds nothing else; [] for any other."""
    if len(line) > LONGEST:
        return []
    cells, rest, is_glued = _figures(" " + line, 0)
    return cells if is_glued or _STAMP.fullmatch(rest) else []


def _figures(line: str, start: int) -> tuple[list[str], str, bool]:
    """(figures, what follows, whether a log line follows the last figure at once)."""
    found = _FIGURES.match(line, start)
    end = found.end() if found else start
    cells = [cell.rstrip("%") for cell in _SEPARATORS.split(line[start:end]) if cell]
    glued = _GLUED.match(line, end)
    return ([*cells, glued["cell"]] if glued else cells), line[end:], glued is not None


def promised(columns: Sequence[str]) -> Layout | None:
    """The layout that header words in their usual order promise; None for scrambled ones."""
    words = [_HEAD_WORD.get(word, word.rstrip("%")) for word in columns if word[0] != "("]
    if "time" not in words:
        return _neuron(columns)
    start = words.index("time")
    tail = words[start:]
    while tail and tail[-1] not in ("wrong", "i_cv"):
        tail.pop()
    halves = tail.count("time")
    width = len(tail) // max(halves, 1)
    half = tuple(tail[:width])
    if half not in _HALVES.values() or list(half) * halves != tail or halves > 2:
        return None
    return Layout(halves * width + ("root" in words), halves, half)


def layout_of(rows: Sequence[Row], columns: Sequence[str]) -> Layout | None:
    """The header's layout if rows have it, else the one that most rows' width tells."""
    widths = Counter(len(row.cells) for row in rows)
    head = promised(columns)
    if head and widths[head.width] * 2 >= len(rows):
        return head
    known = [width for width, _ in widths.most_common() if _by_width(width)]
    if not known:
        return head if head and widths[head.width] else None
    best = max(known, key=lambda width: (widths[width], width))
    halves, figures_each = _by_width(best) or (0, 0)
    return Layout(best, halves, _HALVES[figures_each])


def _by_width(width: int) -> tuple[int, int] | None:
    """Four and a root rather than rccl-tests' five without one; three only without."""
    return _BY_WIDTH.get(width) or (_BY_WIDTH.get(width - 1) if width != 4 else None)


def _neuron(columns: Sequence[str]) -> Layout | None:
    bare = [word.partition("(")[0].partition(":")[0] for word in columns]
    return Layout(3, 1, _HALVES[3]) if bare[-3:] == ["time", "algbw", "busbw"] else None
