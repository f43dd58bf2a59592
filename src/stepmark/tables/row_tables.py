"""Rows as tables of their declared columns, on a terminal or in a pipe."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stepmark.ground.grouping import group_by
from stepmark.tables.columns import Column, Row, View, text
from stepmark.tables.outcomes import CACHE_NOT_DEFEATED
from stepmark.tables.table import Table, fitted

if TYPE_CHECKING:
    from rich.console import Console


_MAX_NAMED = 8
BAD = "bad"  # a row that is wrong or above a limit
LEAD = 11  # columns of the subject that a line of findings starts with


def ran(rows: Iterable[Row], columns: Sequence[Column[Any]]) -> Table:
    """Return the table of the rows that ran."""
    return Table(
        [row for row in rows if row["status"] in ("measured", "wrong")], columns, _kind_of
    )


def _kind_of(row: Row) -> str:
    if row["status"] == "wrong" or row.get("over_limit"):
        return BAD
    return "each" if row.get("rank") is not None else ""


def print_rows(
    rows: Sequence[Row],
    console: "Console",
    columns: Sequence[Column[Any]],
    view: View = View.CONSOLE,
) -> None:
    """Print the rows that ran as a table, then one line per skipped or failed case."""
    table = ran(rows, columns)
    print_table(table, _columns_for(table, table.shown(view), console), console)
    print_lines(_cache_lines(table.rows()), console)
    others = [row for row in rows if row["status"] in ("skipped", "failed")]
    print_lines(
        (f"{row['status']}  {describe(row)}: {text(row, 'message')}" for row in others), console
    )


def _cache_lines(measured: Sequence[Row]) -> list[str]:
    """Return a line with the rows whose operands may come from the cache; none without any."""
    rows = [row for row in measured if CACHE_NOT_DEFEATED in text(row, "validity").split(", ")]
    if not rows:
        return []
    named = [*dict.fromkeys(f"{describe(row)} ({row['sets']} sets)" for row in rows)]
    more = f", and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    why = "all operand sets together do not exceed twice the cache"
    return [f"{CACHE_NOT_DEFEATED}: {why}: {', '.join(named[:_MAX_NAMED])}{more}"]


def print_lines(lines: Iterable[str], console: "Console") -> None:
    """Print text as it is, of which words may look like markup; tables fit a terminal."""
    if console.is_terminal:
        lines = fitted(lines, console.width)
    for line in lines:
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_table(table: Table, columns: Sequence[Column[Any]], console: "Console") -> None:
    """Print a table with its styles; one that does not fit a terminal in parts."""
    lines = table.text(columns)
    if not console.is_terminal or max(map(len, lines), default=0) > console.width:
        print_lines(lines, console)
        return
    from rich.table import Table as Drawn  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = Drawn(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_right = column.unit.is_numeric
        drawn.add_column(column.title, justify="right" if is_right else "left", no_wrap=True)
    for row in table:
        whole = "red" if table.kind_of(row) == BAD else ""
        drawn.add_row(
            *(Text(c.shown(row), c.style(row) if c.style else whole) for c in columns)
        )
    console.print(drawn)


def _columns_for(
    table: Table, columns: Sequence[Column[Any]], console: "Console"
) -> Sequence[Column[Any]]:
    """Return the columns that fit a terminal, and name the others.

    Words that are the same in all rows then stand above the table.
    """
    if not console.is_terminal or _fits(table, columns, console.width):
        return columns
    same = constant_columns(table, [c for c in columns if not c.unit.is_numeric])
    left = fitting(table, console.width, [c for c in columns if c not in same])
    if same:
        facts = ", ".join(f"{column.title} {column.shown(table.rows()[0])}" for column in same)
        print_lines([f"all rows: {facts}"], console)
    if hidden := [c.title for c in columns if c not in (*left, *same)]:
        note = f"too wide for {console.width} columns: {', '.join(hidden)}"
        print_lines([f"{note}; --csv FILE has them"], console)
    return left


def constant_columns(table: Table, columns: Sequence[Column[Any]]) -> list[Column[Any]]:
    """Return the columns that show the same in each of several rows."""
    return [c for c in columns if len(table) > 1 and len({c.shown(row) for row in table}) == 1]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows that agree in all keys, in order of appearance."""
    return list(group_by(rows, lambda row: tuple(row.get(key) for key in keys)).values())


def statuses(rows: Sequence[Row]) -> str:
    """Return how many rows there are of each status."""
    counts = Counter(text(row, "status") for row in rows)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def unique_cases(rows: Sequence[Row]) -> list[Row]:
    """Return one row per case: not per rank, and not again for each label."""
    cases: dict[str, Row] = {}
    for row in rows:
        if row["rank"] is None:
            cases.setdefault(text(row, "case_id"), row)
    return list(cases.values())


def validity_counts(rows: Sequence[Row]) -> str:
    """Return how many rows each reason speaks against; empty without any."""
    counts = Counter(
        reason for row in rows for reason in text(row, "validity").split(", ") if reason
    )
    counted = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    return f"{counted} (of {len(rows)})" if counts else ""


def describe(row: Row) -> str:
    """Return a case in one line: its place in a model, its operation, and its settings."""
    keys = ("model", "role", "pass", "family", "shape", "dtype", "backend")
    return " ".join(word for word in (text(row, key) for key in keys) if word)


def _fits(table: Table, columns: Sequence[Column[Any]], available: int) -> bool:
    widths = (max(len(c.title), *(len(c.shown(row)) for row in table)) for c in columns)
    return sum(widths) + 2 * (len(columns) - 1) <= available


def fitting(table: Table, available: int, columns: Sequence[Column[Any]]) -> list[Column[Any]]:
    """Return columns without the least important, but with words that tell rows apart."""
    columns = list(columns)
    droppable = sorted((c for c in columns if c.leaves), key=lambda c: -c.leaves)
    for least in droppable:
        if _fits(table, columns, available):
            break
        others = [c for c in columns if c is not least]
        if least.unit.is_numeric or _num_kinds(table, others) == _num_kinds(table, columns):
            columns = others
    return columns


def _num_kinds(table: Table, columns: Sequence[Column[Any]]) -> int:
    words = [column for column in columns if not column.unit.is_numeric]
    return len({tuple(column.shown(row) for column in words) for row in table})
