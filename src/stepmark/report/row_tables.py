"""Rows as tables of their declared columns, on a terminal, in a pipe or on a page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from stepmark.core.columns import Column, Row, View, aligned, fitted, number, text
from stepmark.report.outcomes import CACHE_NOT_DEFEATED

if TYPE_CHECKING:
    from rich.console import Console


_MAX_NAMED = 8


def print_rows(
    table: Sequence[Row],
    console: "Console",
    columns: Sequence[Column[Any]],
    view: View = View.CONSOLE,
) -> None:
    """Print the rows that ran as a table, then one line per skipped or failed case."""
    ran = [row for row in table if row["status"] in ("measured", "wrong")]
    columns = [column for column in columns if view in column.views]
    if ran and console.is_terminal:
        _print_fitted(ran, console, columns)
    elif ran:
        print_lines(_plain_lines(ran, _fitting(ran, None, columns)), console)
    print_lines(_cache_lines(ran), console)
    others = [row for row in table if row["status"] in ("skipped", "failed")]
    print_lines(
        (f"{row['status']}  {describe(row)}: {text(row, 'message')}" for row in others), console
    )


def _cache_lines(ran: Sequence[Row]) -> list[str]:
    """Return a line with the rows whose operands may come from the cache; none without any."""
    rows = [row for row in ran if CACHE_NOT_DEFEATED in text(row, "validity").split(", ")]
    if not rows:
        return []
    named = [*dict.fromkeys(f"{describe(row)} ({row['sets']} sets)" for row in rows)]
    more = f", and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    why = "all operand sets together do not exceed twice the cache"
    return [f"{CACHE_NOT_DEFEATED}: {why}: {', '.join(named[:_MAX_NAMED])}{more}"]


def print_lines(lines: Iterable[str], console: "Console") -> None:
    """Print text as it is: words of other people's files may look like markup."""
    for line in lines:
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _print_fitted(
    ran: Sequence[Row], console: "Console", columns: Sequence[Column[Any]]
) -> None:
    """Print a table of the columns that fit, and name the others.

    Words that are the same in all rows stand above the table.
    """
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    every = _fitting(ran, None, columns)
    same = _same(ran, every) if sum(_width(ran, c) for c in every) > console.width else []
    columns = _fitting(ran, console.width, [column for column in every if column not in same])
    hidden = [column.title for column in every if column not in (*columns, *same)]
    if same:
        facts = ", ".join(f"{column.title} {_printed(ran[0], column)}" for column in same)
        print_lines([f"all rows: {facts}"], console)
    if hidden:
        note = f"too wide for {console.width} columns: {', '.join(hidden)}; --csv FILE has them"
        print_lines([note], console)
    if sum(_width(ran, column) for column in columns) > console.width:
        print_lines(fitted(_plain_lines(ran, columns), console.width), console)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.unit.is_numeric
        justify: Literal["left", "right"] = "right" if right else "left"
        drawn.add_column(column.title, justify=justify, overflow="fold", no_wrap=right)
    for row in ran:
        style = "red" if row["status"] == "wrong" or row["over_limit"] else ""
        drawn.add_row(*(Text(_printed(row, column)) for column in columns), style=style)
    console.print(drawn)


def _same(ran: Sequence[Row], columns: Sequence[Column[Any]]) -> list[Column[Any]]:
    """Return the columns of words that have the same word in each of several rows."""
    words = [column for column in columns if not column.unit.is_numeric]
    return [c for c in words if len(ran) > 1 and len({_printed(row, c) for row in ran}) == 1]


def _plain_lines(ran: Sequence[Row], columns: Sequence[Column[Any]]) -> list[str]:
    """Return the table as wide as it needs to be, because a file or a pipe has no edge."""
    cells = [[column.title for column in columns]]
    cells += [[_printed(row, column) for column in columns] for row in ran]
    return aligned(cells, [column.unit.is_numeric for column in columns])


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows that agree in all keys, in order of appearance."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(groups.values())


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


def _printed(row: Row, column: Column[Any]) -> str:
    key = column.name
    if key == "rank" and row["rank"] is None and row["num_ranks"] != 1:
        return "all"
    if key == "role":
        return text(row, "role") or ("" if "collective" in row else text(row, "family"))
    if key == "status":
        above = "above limit" if row["over_limit"] else ""
        return above if row["status"] == "measured" else f"{row['status']} {above}".strip()
    return column.unit.show(row[key])


def _width(table: Sequence[Row], column: Column[Any]) -> int:
    return max([len(column.title), *(len(_printed(row, column)) for row in table)]) + 2


def _fitting(
    table: Sequence[Row], available: int | None, columns: Sequence[Column[Any]]
) -> list[Column[Any]]:
    """Return columns that are not empty; on a terminal, without the least important."""
    columns = [c for c in columns if any(_printed(row, c) for row in table)]
    while available is not None:
        wide = sum(_width(table, c) for c in columns) > available
        least = max(columns, key=lambda c: c.leaves, default=None)
        if not wide or least is None or not least.leaves:
            break
        columns.remove(least)
    return columns


def table(rows: Sequence[Row], columns: Sequence[Column[Any]]) -> str:
    """Return HTML of all that ran. A click on a row shows the command that measures it."""
    ran = [row for row in rows if row["status"] in ("measured", "wrong")]
    if not ran:
        return "<p>Nothing was measured.</p>"
    columns = [
        c
        for c in columns
        if View.PAGE in c.views and any(row[c.name] is not None for row in ran)
    ]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{_numeric(column)}>'
        f'<button type="button">{escape(column.title)}</button></th>'
        for column in columns
    )
    lines = "\n".join(_line(row, columns) for row in ran)
    return (
        '<p class="tools"><input class="filter" type="search" placeholder="Filter rows" '
        'aria-label="Filter rows"> <span class="shown quiet"></span></p>'
        '<pre class="command" aria-live="polite">Click a row for the command that measures it '
        'alone; click a heading to sort.</pre><div class="box"><table class="rows">'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def _line(row: Row, columns: Sequence[Column[Any]]) -> str:
    kinds = ["each"] if row.get("rank") is not None else []
    kinds += ["bad"] if row["status"] == "wrong" or row["over_limit"] else []
    cells = []
    for column in columns:
        key = column.name
        cell = column.unit.show(row[key])
        if key == "rank" and row["rank"] is None and row["num_ranks"] != 1:
            cell = "all"
        if key == "status" and row["over_limit"]:
            cell += ", above limit"
        value = number(row, key)
        order = "" if value is None else f' data-v="{value!r}"'
        cells.append(f"<td{_numeric(column)}{order}>{escape(cell)}</td>")
    opened = f'<tr class="{" ".join(kinds)}" data-command="{escape(text(row, "command"))}">'
    return opened + "".join(cells) + "</tr>"


def _numeric(column: Column[Any]) -> str:
    return ' class="num"' if column.unit.is_numeric else ""
