"""Rows as a table of a page, with a filter and commands."""

from stepmark.tables.columns import View
from stepmark.tables.page import Html, paragraph
from stepmark.tables.row_tables import constant_columns
from stepmark.tables.table import Table

_UNSET = ("none", "-1")  # of a setting, such as the root of an all_reduce


def page_table(table: Table) -> list[Html]:
    """Return a table with a filter; a click on a row shows what measures it.

    What is the same in all rows is above the table, not a column of it.
    """
    if not len(table):
        return [paragraph("Nothing was measured.")]
    columns = table.shown(View.PAGE)
    titles = [column.title for column in columns]
    unique = [column for column in columns if titles.count(column.title) == 1]
    same = constant_columns(table, unique)
    facts = [(column.title, column.shown(table.rows()[0])) for column in same]
    text = "; ".join(f"{title} {value}" for title, value in facts if value not in _UNSET)
    command = (
        '<pre class="command" aria-live="polite">Click a row for the command that measures it '
        "alone; click a heading to sort.</pre>"
    )
    has_commands = any("command" in row for row in table)
    html = table.html([column for column in columns if column not in same])
    return [
        *([paragraph(f"All rows: {text}.", "quiet")] if text else []),
        Html(
            '<p class="tools"><input class="filter" type="search" placeholder="Filter rows" '
            'aria-label="Filter rows"> <span class="shown quiet"></span></p>'
            f'{command if has_commands else ""}<div class="box rows">{html}</div>'
        ),
    ]
