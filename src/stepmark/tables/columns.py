"""Columns of tables, declared once: CSV, JSON, console, HTML and SQL types read the same.

A row is a dict of plain values by column name, in the order of the declaration.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from stepmark.ground.units import format_bytes, format_time

T = TypeVar("T")
Row = dict[str, object]


_FLOP_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Unit(Enum):
    """Kind of a value, which decides how it is formatted and its SQL type."""

    TEXT = "text"
    FLAG = "yes or no"
    COUNT = "whole number"
    NUMBER = "four significant digits"
    SECONDS = "time"
    BYTES = "size"
    PERCENT = "one decimal"
    RATIO = "three decimals"
    ERROR = "with an exponent"
    FLOPS = "with a prefix, from k to P"

    @property
    def sql_type(self) -> str:
        kinds = {
            Unit.TEXT: "VARCHAR",
            Unit.FLAG: "BOOLEAN",
            Unit.COUNT: "BIGINT",
            Unit.BYTES: "BIGINT",
        }
        return kinds.get(self, "DOUBLE")

    @property
    def is_numeric(self) -> bool:
        return self not in (Unit.TEXT, Unit.FLAG)

    def show(self, value: object) -> str:
        """Format a value for people: times and sizes with their unit, shares in percent."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "" if value is None else str(value)
        if self is Unit.SECONDS:
            return format_time(value)
        if self is Unit.BYTES:
            return format_bytes(value)
        if self is Unit.FLOPS:
            prefixes = (item for item in _FLOP_PREFIXES if value >= item[0])
            scale, prefix = next(prefixes, (1.0, ""))
            return f"{digits(value / scale)} {prefix}".rstrip()
        places = {Unit.PERCENT: ".1f", Unit.RATIO: ".3f", Unit.ERROR: ".1e"}
        return f"{value:{places[self]}}" if self in places else digits(value)


TEXT, FLAG, COUNT, NUMBER, SECONDS, BYTES, PERCENT, RATIO, ERROR, FLOPS = Unit


class View(Enum):
    """Where a column is shown; files have every column."""

    CONSOLE = "console"
    PAGE = "page"
    RANKS = "ranks"  # a line per rank of one case, on the console


PAGE = frozenset({View.PAGE})
SHOWN = PAGE | {View.CONSOLE}
BY_RANK = PAGE | {View.RANKS}
EVERYWHERE = frozenset(View)


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table whose rows are made from a T.

    `leaves` is the order in which columns are dropped on a narrow terminal: the highest first,
    0 never.
    """

    name: str
    of: Callable[[T], object]
    unit: Unit = Unit.TEXT
    heading: str = ""
    views: frozenset[View] = frozenset()
    leaves: int = 0

    @property
    def title(self) -> str:
        return self.heading or self.name


def rows(columns: Sequence[Column[T]], outcomes: Iterable[T]) -> list[Row]:
    """Return one row per outcome, with every column."""
    return [{column.name: column.of(outcome) for column in columns} for outcome in outcomes]


class TableLine(str):
    """A line of a table that knows its cells, so that a narrow terminal shows it in parts."""

    cells: Sequence[str]
    is_right: Sequence[bool]

    @classmethod
    def of(cls, text: str, cells: Sequence[str], is_right: Sequence[bool]) -> "TableLine":
        """Return a line of its cells; lines of one table share one is_right."""
        line = cls(text)
        line.cells, line.is_right = cells, is_right
        return line


def aligned(cells: Sequence[Sequence[str]], is_right: Sequence[bool]) -> list[str]:
    """Return the lines of a table as wide as needed; the first line of cells is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for words in cells:
        padded = (
            word.rjust(width) if right else word.ljust(width)
            for word, width, right in zip(words, widths, is_right, strict=True)
        )
        lines.append(TableLine.of("  ".join(padded).rstrip(), words, is_right))
    return lines


def fitted(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines, but a table that is wider in parts below each other.

    Each part begins with the columns that tell the rows apart.
    """
    for _, group in itertools.groupby(lines, lambda line: id(getattr(line, "is_right", None))):
        block = list(group)
        table = [line for line in block if isinstance(line, TableLine)]
        if not table or max(map(len, table)) <= width:
            yield from block
            continue
        parts = _parts([line.cells for line in table], table[0].is_right, width)
        for number, places in enumerate(parts):
            cells = [[line.cells[place] for place in places] for line in table]
            yield from [""] * (number > 0)
            lines_of_part = aligned(cells, [table[0].is_right[place] for place in places])
            yield from filter(None, lines_of_part)  # a line of the head may have no cell here


def _parts(
    cells: Sequence[Sequence[str]], is_right: Sequence[bool], width: int
) -> Iterator[list[int]]:
    """Yield the places of the columns of each part."""
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    keys = _keys(cells, is_right, widths, width)
    part = keys
    for place in range(len(widths)):
        if place in keys:
            continue
        if part != keys and sum(widths[each] for each in (*part, place)) - 2 > width:
            yield part
            part = keys
        part = [*part, place]
    yield part


def _keys(
    cells: Sequence[Sequence[str]], is_right: Sequence[bool], widths: Sequence[int], width: int
) -> list[int]:
    """Return the places of columns that tell the rows apart, of words rather than figures."""

    def num_kinds(places: Sequence[int]) -> int:
        return len({tuple(row[place] for place in places) for row in cells})

    keys: list[int] = []
    for place in sorted(
        range(len(widths)), key=lambda p: (is_right[p], 0 if is_right[p] else -num_kinds([p]))
    ):
        is_narrow = sum(widths[each] for each in (*keys, place)) <= width / 2
        if is_narrow and num_kinds([*keys, place]) > num_kinds(keys):
            keys.append(place)
    while len(keys) > 1 and sum(widths[place] for place in keys) - 2 > width - max(
        (each for place, each in enumerate(widths) if place not in keys), default=0
    ):
        keys.pop()
    return sorted(keys) or [0]


def digits(value: float | None, places: int = 4) -> str:
    """Format four significant digits without an exponent, and always the whole integer part."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (places - 1) else f"{value:.{places}g}"


def number(row: Row, key: str) -> float | None:
    """Return a numeric cell, or None where it is unknown."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def text(row: Row, key: str) -> str:
    """Return a cell as text; empty where it is unknown."""
    value = row.get(key)
    return "" if value is None else str(value)
