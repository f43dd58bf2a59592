"""Columns of tables, declared once: CSV, JSON, console, HTML and SQL types read the same.

A row is a dict of plain values by column name, in the order of the declaration.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from stepmark.core.units import format_bytes, format_time

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


def aligned(cells: Sequence[Sequence[str]], is_right: Sequence[bool]) -> list[str]:
    """Return the lines of a table as wide as needed; the first line of cells is the heading."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_right, strict=True)
        ).rstrip()
        for line in cells
    ]


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
