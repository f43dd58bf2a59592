"""Rows as tables of their declared columns, on a terminal, in a pipe or on a page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from stepmark.tables.columns import Column, Row, View, aligned, fitted, number, text
from stepmark.tables.outcomes import CACHE_NOT_DEFEATED

if TYPE_CHECKING:
    from rich.console import Console


_MAX_NAMED = 8
LEAD = 11  # columns of the subject that a line of findings starts with


def print_rows(
    table: Sequence[Row],
    console: "Console",
    columns: Sequence[Column[Any]],
    view: View = View.CONSOLE,
) -> None:
    """Print the rows that ran as a table, then one line per skipped or failed case."""
    ran = [row for row in table if row["status"] in ("measured", "wrong")]
    columns = [c for c in columns if view in c.views and any(_printed(row, c) for row in ran)]
    if ran:
        _print_ran(ran, console, columns)
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
    """Print text as it is, of which words may look like markup; tables fit a terminal."""
    if console.is_terminal:
        lines = fitted(lines, console.width)
    for line in lines:
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_table(
    titles: Sequence[str],
    cells: Sequence[Sequence[str]],
    is_right: Sequence[bool],
    styles: Sequence[Sequence[str]],
    console: "Console",
) -> None:
    """Print a table with a style per cell; one that does not fit a terminal in parts."""
    lines = aligned([titles, *cells], is_right)
    if not console.is_terminal or max(map(len, lines)) > console.width:
        print_lines(lines, console)
        return
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in zip(titles, is_right, strict=True):
        drawn.add_column(title, justify="right" if right else "left", no_wrap=True)
    for words, of_words in zip(cells, styles, strict=True):
        drawn.add_row(*(Text(*pair) for pair in zip(words, of_words, strict=True)))
    console.print(drawn)


def _print_ran(ran: Sequence[Row], console: "Console", columns: Sequence[Column[Any]]) -> None:
    """Print a table; on a narrow terminal of the columns that fit, and name the others.

    Words that are the same in all rows then stand above the table.
    """
    if console.is_terminal and not _fits(ran, columns, console.width):
        same = _same(ran, columns)
        left = _fitting(ran, console.width, [c for c in columns if c not in same])
        if same:
            facts = ", ".join(f"{column.title} {_printed(ran[0], column)}" for column in same)
            print_lines([f"all rows: {facts}"], console)
        if hidden := [c.title for c in columns if c not in (*left, *same)]:
            note = f"too wide for {console.width} columns: {', '.join(hidden)}"
            print_lines([f"{note}; --csv FILE has them"], console)
        columns = left
    style = {True: "red", False: ""}
    print_table(
        [column.title for column in columns],
        [[_printed(row, column) for column in columns] for row in ran],
        [column.unit.is_numeric for column in columns],
        [
            [style[row["status"] == "wrong" or bool(row.get("over_limit"))]] * len(columns)
            for row in ran
        ],
        console,
    )


def _same(ran: Sequence[Row], columns: Sequence[Column[Any]]) -> list[Column[Any]]:
    """Return the columns of words that have the same word in each of several rows."""
    words = [column for column in columns if not column.unit.is_numeric]
    return [c for c in words if len(ran) > 1 and len({_printed(row, c) for row in ran}) == 1]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows that agree in all keys, in order of appearance."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(groups.values())


def statuses(rows: Sequence[Row]) -> str:
    """Return how many rows there are of each status."""
    counts = Counter(text(row, "status") for row in rows)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


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


def _fits(ran: Sequence[Row], columns: Sequence[Column[Any]], available: int) -> bool:
    widths = (max(len(c.title), *(len(_printed(row, c)) for row in ran)) for c in columns)
    return sum(widths) + 2 * (len(columns) - 1) <= available


def _fitting(
    ran: Sequence[Row], available: int, columns: Sequence[Column[Any]]
) -> list[Column[Any]]:
    """Return columns without the least important, but with words that tell rows apart."""
    columns = list(columns)
    droppable = sorted((c for c in columns if c.leaves), key=lambda c: -c.leaves)
    for least in droppable:
        if _fits(ran, columns, available):
            break
        others = [c for c in columns if c is not least]
        if least.unit.is_numeric or _num_kinds(ran, others) == _num_kinds(ran, columns):
            columns = others
    return columns


def _num_kinds(ran: Sequence[Row], columns: Sequence[Column[Any]]) -> int:
    words = [column for column in columns if not column.unit.is_numeric]
    return len({tuple(_printed(row, column) for column in words) for row in ran})


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
