"""Rows of declared columns, as text for any width, HTML, SQL and data frames.

Their files are in export.py.
"""

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, overload

from stepmark.ground.errors import MissingPackageError
from stepmark.ground.packages import EXTRAS
from stepmark.tables.columns import Column, Row, View, named
from stepmark.tables.export import names_of, sql_relation

if TYPE_CHECKING:
    import duckdb

_MOST_SHOWN = 40  # rows of a table in a notebook
_ROWS = ", or rows(), which needs nothing"


class Table:
    """Rows as plain dicts, as text, as HTML, or as a data frame.

    Names of columns end in their unit: `_s` is seconds, `_bytes` bytes, `_pct` percent. Unknown
    is None, in pandas NaN.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column[Any]] = (),
        kind_of: Callable[[Row], str] | None = None,
    ) -> None:
        """Keep the rows.

        columns: those that people see, in order; by default all, by the units of their names.
        kind_of: what sets a row apart: "bad", "each" (of one rank) or "".
        """
        self._rows = list(rows)
        self._declared = columns
        self.kind_of = kind_of or (lambda _: "")

    def rows(self) -> list[Row]:
        """Return a dict per row."""
        return self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.rows())

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> "Table": ...
    def __getitem__(self, place: int | slice) -> "Row | Table":
        rows = self.rows()
        if isinstance(place, slice):
            return Table(rows[place], self._declared, self.kind_of)
        if not -len(rows) <= place < len(rows):
            raise IndexError(f"row {place} is invalid: the number of rows is {len(rows)}")
        return rows[place]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows>"

    def shown(self, view: View) -> list[Column[Any]]:
        """Return the columns of a view that are not empty."""
        rows = self.rows()
        columns = self._declared or named(names_of(rows))
        columns = [c for c in columns if view in c.views]
        return [c for c in columns if any(c.shown(row) for row in rows)]

    def text(self, columns: Sequence[Column[Any]] | None = None) -> list[str]:
        """Return lines under a heading, as wide as needed; none without rows.

        columns: by default those of the console that are not empty.
        """
        if not self.rows():
            return []
        columns = self.shown(View.CONSOLE) if columns is None else columns
        cells = [[column.title for column in columns]]
        cells += [[column.shown(row) for column in columns] for row in self.rows()]
        return aligned(cells, [column.unit.is_numeric for column in columns])

    def html(self, columns: Sequence[Column[Any]]) -> str:
        """Return a table of a page: a heading sorts it, a row has the command that makes it."""
        heads = "".join(
            f'<th scope="col" aria-sort="none"{_side(column)}>'
            f'<button type="button">{escape(column.title)}</button></th>'
            for column in columns
        )
        return _html(heads, "\n".join(self._html_row(row, columns) for row in self.rows()))

    def _html_row(self, row: Row, columns: Sequence[Column[Any]]) -> str:
        command = row.get("command")
        data = "" if command is None else f' data-command="{escape(str(command))}"'
        cells = "".join(_html_cell(row, column) for column in columns)
        kind = f' class="{self.kind_of(row)}"' if self.kind_of(row) else ""
        return f"<tr{kind}{data}>{cells}</tr>"

    def _repr_html_(self) -> str:
        """Return the first rows of what a console shows; a notebook has no style of ours."""
        columns = self.shown(View.CONSOLE)
        heads = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
        first = self.rows()[:_MOST_SHOWN]
        more = len(self) - len(first)
        rest = f"<p>{more} more rows</p>" if more else ""
        return _html(heads, "".join(self._html_row(row, columns) for row in first)) + rest

    def create_in(self, connection: "duckdb.DuckDBPyConnection", name: str) -> None:
        """Create a table in DuckDB, with the SQL types of the declared columns."""
        types: dict[str, str | None] = {c.name: c.unit.sql_type for c in self._declared}
        types |= {name: types.get(name) for name in names_of(self.rows())}
        relation, values = sql_relation(self.rows(), types)
        connection.execute(f"CREATE TABLE {name} AS {relation}", values)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame. Raises MissingPackageError without pandas."""
        return package("pandas", _ROWS).DataFrame(self._columns())

    def to_polars(self) -> Any:
        """Return a polars.DataFrame. Raises MissingPackageError without polars."""
        return package("polars", _ROWS).DataFrame(self._columns())

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table. Raises MissingPackageError without pyarrow."""
        return package("pyarrow", _ROWS).table(self._columns())

    def _columns(self) -> dict[str, list[object]]:
        """Return the values of each column, of one type besides None."""
        rows = self.rows()
        return {name: _of_one_type([row.get(name) for row in rows]) for name in names_of(rows)}


def _html(heads: str, lines: str) -> str:
    return f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{lines}</tbody></table>"


def _html_cell(row: Row, column: Column[Any]) -> str:
    """Return a cell; data-v orders numbers that are shown with units."""
    value = row.get(column.name)
    order = f' data-v="{value!r}"' if type(value) in (int, float) else ""
    return f"<td{_side(column)}{order}>{escape(column.shown(row))}</td>"


def _side(column: Column[Any]) -> str:
    return ' style="text-align:right"' if column.unit.is_numeric else ""


class TableLine(str):
    """A line of a table that knows its cells, so that a narrow terminal shows it in parts."""

    cells: Sequence[str]
    is_right: Sequence[bool]

    @classmethod
    def of(cls, text: str, cells: Sequence[str], is_right: Sequence[bool]) -> "TableLine":
        """Return a line of its cells; lines of one table share one is_right."""
        line = cls(text)
        line.cells = cells
        line.is_right = is_right
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
            if number > 0:
                yield ""
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


def _of_one_type(values: list[object]) -> list[object]:
    """Return the values as they are, numbers of two types as floats, anything else as text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 and kinds <= {int, float, bool, str}:
        return values
    if kinds == {int, float}:
        return [None if value is None else float(str(value)) for value in values]
    return [None if value is None else str(value) for value in values]


def package(name: str, instead: str = "") -> Any:
    """Import an optional module. Raises MissingPackageError.

    instead: what needs no package, as the end of the sentence.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        root = name.partition(".")[0]
        source = f"'stepmark[{EXTRAS[root][1]}]'" if root in EXTRAS else root
        text = f"{root} is not installed: use pip install {source}{instead}."
        raise MissingPackageError(text, name=root) from None
