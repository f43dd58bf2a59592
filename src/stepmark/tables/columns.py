"""Columns of tables, declared once: CSV, JSON, console, HTML and SQL types read the same.

A row is a dict of plain values by column name, in the order of the declaration.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar, get_args

from stepmark.cases.fields import CaseField, Shown, declared
from stepmark.ground.units import GB, format_bytes, format_time

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
    MEAN = "a count on average: whole, or two decimals"
    NS = "nanoseconds, shown with a unit"
    MS = "nanoseconds, shown in ms"
    US = "nanoseconds, shown in us"
    JSON = "nested values"
    SHARE = "percent, one decimal, with its sign"
    SIGNED_MS = "nanoseconds, shown in ms with + or -"
    SIGNED_PERCENT = "one decimal with + or -"
    WHOLE_SHARE = "percent, a whole number, with its sign"
    GB_S = "bytes per second, shown in GB/s"

    @property
    def sql_type(self) -> str:
        if self in (Unit.COUNT, Unit.BYTES, Unit.NS, Unit.MS, Unit.US):
            return "BIGINT"
        return {Unit.TEXT: "VARCHAR", Unit.FLAG: "BOOLEAN", Unit.JSON: "JSON"}.get(
            self, "DOUBLE"
        )

    @property
    def is_numeric(self) -> bool:
        return self not in (Unit.TEXT, Unit.FLAG, Unit.JSON)

    def show(self, value: object) -> str:
        """Format a value for people: times and sizes with their unit, shares in percent."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "" if value is None else str(value)
        return _FORMS.get(self, digits)(value)


TEXT, FLAG, COUNT, NUMBER, SECONDS, BYTES, PERCENT, RATIO, ERROR, FLOPS, *_MORE = Unit
MEAN, NS, MS, US, JSON, SHARE, SIGNED_MS, SIGNED_PERCENT, WHOLE_SHARE, GB_S = _MORE

# A name ends in the unit of its values.
_ENDS = {"_s": SECONDS, "bytes": BYTES, "flops": FLOPS, "_pct": PERCENT, "_ns": NS}


class View(Enum):
    """Where a column is shown; files have every column."""

    CONSOLE = "console"
    PAGE = "page"
    RANKS = "ranks"  # a line per rank of one case, on the console


NO_HEADING = " "
PAGE = frozenset({View.PAGE})
CONSOLE = frozenset({View.CONSOLE})
SHOWN = PAGE | CONSOLE
BY_RANK = PAGE | {View.RANKS}
EVERYWHERE = frozenset(View)


def digits(value: float | None, places: int = 4) -> str:
    """Format four significant digits without an exponent, and always the whole integer part."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (places - 1) else f"{value:.{places}g}"


def _flops(value: float) -> str:
    prefixes = (item for item in _FLOP_PREFIXES if value >= item[0])
    scale, prefix = next(prefixes, (1.0, ""))
    return f"{digits(value / scale)} {prefix}".rstrip()


# Counts and numbers that are not here have four digits.
_FORMS: dict[Unit, Callable[[float], str]] = {
    SECONDS: format_time,
    BYTES: format_bytes,
    PERCENT: "{:.1f}".format,
    RATIO: "{:.3f}".format,
    ERROR: "{:.1e}".format,
    FLOPS: _flops,
    MEAN: lambda value: f"{value:.0f}" if value == int(value) else f"{value:.2f}",
    NS: lambda value: format_time(value * 1e-9),
    MS: lambda value: f"{value / 1e6:.3f}",
    US: lambda value: f"{value / 1e3:.2f}",
    SHARE: "{:.1f} %".format,
    SIGNED_MS: lambda value: f"{value / 1e6:+.3f}",
    SIGNED_PERCENT: "{:+.1f}".format,
    WHOLE_SHARE: "{:.0f} %".format,
    GB_S: lambda value: f"{value / GB:.2f}",
}


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table whose rows are made from a T.

    of: the value of a T. leaves: the order in which columns are dropped on a narrow terminal,
    the highest first, 0 never. words: what a row shows in place of the value by its unit.
    style: of a cell on a terminal, such as "red".
    """

    name: str
    of: Callable[[T], object] = lambda _item: None  # the rows have it
    unit: Unit = Unit.TEXT
    heading: str = ""
    views: frozenset[View] = frozenset()
    leaves: int = 0
    words: Callable[[Row], str] | None = None
    style: Callable[[Row], str] | None = None

    @property
    def title(self) -> str:
        return self.heading or self.name

    def shown(self, row: Row) -> str:
        """Return what a row shows; empty for what is unknown."""
        return self.words(row) if self.words else self.unit.show(row.get(self.name))


def given(
    name: str, unit: Unit = TEXT, heading: str = "", words: Callable[[Row], str] | None = None
) -> Column[Row]:
    """Return a column of rows that have its value already."""
    return Column(name, unit=unit, heading=heading, views=SHOWN, words=words)


def named(names: Iterable[str]) -> list[Column[Row]]:
    """Return columns of rows that have their values already; a name ends in its unit.

    Values of time and size are shown with their unit, which the heading then leaves out.
    """
    return [given(name, _unit_of(name), re.sub("_(s|ns|bytes)$", "", name)) for name in names]


def _unit_of(name: str) -> Unit:
    return next((unit for end, unit in _ENDS.items() if name.endswith(end)), NUMBER)


_SHOWN_IN = {Shown.FILES: frozenset[View](), Shown.PAGE: PAGE, Shown.TABLES: SHOWN}


def case_columns(case: type, of: Callable[[T], object]) -> tuple[Column[T], ...]:
    """Return the columns of the fields that a class of cases declares. of: the case of a T."""
    return tuple(
        Column(
            field.name,
            _reader(field, of),
            _unit_of_field(field),
            field.heading,
            _SHOWN_IN[field.shown],
            field.leaves,
        )
        for field in declared(case)
        if field.shown is not None
    )


def _reader(field: CaseField, of: Callable[[T], object]) -> Callable[[T], object]:
    return lambda item: field.value(of(item))


def _unit_of_field(field: CaseField) -> Unit:
    kinds = {field.kind, *get_args(field.kind)}  # of `int | None`
    if field.cell or not kinds & {bool, int, float}:
        return TEXT
    if bool in kinds:
        return FLAG
    return COUNT if int in kinds else _unit_of(field.name)


def rows_of(columns: Sequence[Column[T]], outcomes: Iterable[T]) -> list[Row]:
    """Return one row per outcome, with every column."""
    return [{column.name: column.of(outcome) for column in columns} for outcome in outcomes]


def number(row: Row, key: str) -> float | None:
    """Return a numeric cell, or None where it is unknown."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def known(row: Row, key: str) -> float:
    """Return a number that every row of a table has, as it is: whole ones stay whole."""
    value = row[key]
    assert isinstance(value, int | float), key
    return value


def text(row: Row, key: str) -> str:
    """Return a cell as text; empty where it is unknown."""
    value = row.get(key)
    return "" if value is None else str(value)
