"""Rows with named columns, for whichever library of data frames is installed."""

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from stepmark.ground.errors import StepmarkError
from stepmark.tables.columns import Column, Row, Unit

_MOST_SHOWN = 40  # rows of a table in a notebook
_UNITS = {
    "_s": Unit.SECONDS,
    "bytes": Unit.BYTES,
    "flops": Unit.FLOPS,
    "_pct": Unit.PERCENT,
}


class Table:
    """Rows as plain dicts, as a data frame, or as HTML in a notebook.

    Names of columns end in their unit: `_s` is seconds, `_bytes` bytes, `_pct` percent. Unknown
    is None, in pandas NaN.
    """

    def __init__(self, rows: Sequence[Row], shown: Sequence[Column[Any]] = ()) -> None:
        """Keep the rows. shown: the columns in HTML; by default those that are not empty."""
        self._rows = list(rows)
        self._shown = shown

    def rows(self) -> list[Row]:
        """Return a dict per row."""
        return self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.rows())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows>"

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame. Raises StepmarkError where pandas is not installed."""
        return _package("pandas").DataFrame(self._columns())

    def to_polars(self) -> Any:
        """Return a polars.DataFrame. Raises StepmarkError where polars is not installed."""
        return _package("polars").DataFrame(self._columns())

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table. Raises StepmarkError where pyarrow is not installed."""
        return _package("pyarrow").table(self._columns())

    def _columns(self) -> dict[str, list[object]]:
        """Return the values of each column, of one type besides None."""
        rows = self.rows()
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: _of_one_type([row.get(name) for row in rows]) for name in names}

    def _repr_html_(self) -> str:
        rows = self.rows()
        names = dict.fromkeys(name for row in rows for name in row)
        shown = self._shown or columns_named(names)
        shown = [c for c in shown if any(row.get(c.name) not in (None, "") for row in rows)]
        heads = "".join(f"<th>{escape(column.title)}</th>" for column in shown)
        lines = "".join(f"<tr>{_cells(row, shown)}</tr>" for row in rows[:_MOST_SHOWN])
        more = len(rows) - _MOST_SHOWN
        rest = f"<p>{more} more rows</p>" if more > 0 else ""
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>{rest}"


def columns_named(names: Iterable[str]) -> list[Column[Any]]:
    """Return columns of rows that are there already, with the unit that each name ends in.

    Values of time and size are shown with their unit, which the heading then leaves out.
    """
    return [
        Column(name, _nothing, _unit_of(name), re.sub("_(s|ns|bytes)$", "", name))
        for name in names
    ]


def _cells(row: Row, shown: Sequence[Column[Any]]) -> str:
    return "".join(
        f'<td style="text-align:{"right" if column.unit.is_numeric else "left"}">'
        f"{escape(_shown(column, row.get(column.name)))}</td>"
        for column in shown
    )


def _shown(column: Column[Any], value: object) -> str:
    if column.name.endswith("_ns") and isinstance(value, int):
        return Unit.SECONDS.show(value * 1e-9)
    return column.unit.show(value)


def _nothing(_row: object) -> None:
    """Return no value: the rows have it."""


def _unit_of(name: str) -> Unit:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), Unit.NUMBER)


def _of_one_type(values: list[object]) -> list[object]:
    """Return the values as they are, numbers of two types as floats, anything else as text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 and kinds <= {int, float, bool, str}:
        return values
    if kinds == {int, float}:
        return [None if value is None else float(str(value)) for value in values]
    return [None if value is None else str(value) for value in values]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        text = (
            f"{name} is not installed: use pip install {name}, or rows(), which needs nothing"
        )
        raise StepmarkError(f"{text}.") from None
