"""A comparison as a table on a terminal or in a pipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stepmark.core.comparison import Cell, Comparison, Line
from stepmark.core.ratio import Verdict
from stepmark.report.comparison import (
    closing,
    headline,
    mean_text,
    ratio_text,
    shown,
    size_text,
    split_fields,
    value_text,
    verdict_text,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLE = {Verdict.FASTER: "green", Verdict.SLOWER: "red"}
# Up to this many sides beside the baseline have their values, intervals and verdicts in the
# table; more have the ratio and a mark.
_WIDE = 2
_MARKS = {
    Verdict.FASTER: "+",
    Verdict.SLOWER: "-",
    Verdict.SAME: "=",
    Verdict.CANNOT_TELL: "?",
}
_MARKS_SAY = "ratios with + faster, - slower, = same, ? cannot tell; intervals: --json, --csv"


def printed(comparison: Comparison, console: "Console") -> None:
    """Constants, a line per size or shape, geometric means, and what else is to be known."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    others = comparison.names[1:]
    constant, varying = split_fields(comparison.lines)
    console.print(Text(headline(comparison, constant)), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    has_sizes = any(line.size_bytes is not None for line in comparison.lines)
    for head in [*varying, *(["size"] if has_sizes else [])]:
        table.add_column(head, justify="right" if head == "size" else "left", no_wrap=True)
    ratio_cells = _columns(comparison, table)
    valued = comparison.names if len(others) <= _WIDE else comparison.names[:1]
    for line in comparison.lines:
        words = [shown(line.fields.get(name)) for name in varying]
        words += [size_text(line)] if has_sizes else []
        words += [value_text(line, line.cells.get(name)) for name in valued]
        table.add_row(*map(Text, words), *ratio_cells(line))
    console.print(table)
    marks = [_MARKS_SAY] if len(others) > _WIDE else []
    for text in (*marks, *map(mean_text, comparison.overall), *closing(comparison)):
        console.print(Text(text), soft_wrap=True)


def _columns(comparison: Comparison, table: "Table") -> "Callable[[Line], list[Text]]":
    """Declare the columns of values and ratios; what makes a line's cells of the ratios."""
    base, *others = comparison.names
    if len(others) > _WIDE:
        table.add_column(base, justify="right")
        for name in others:
            table.add_column(name, justify="right", overflow="fold", max_width=24)
        return lambda line: [_marked(line.cells.get(name)) for name in others]
    for name in comparison.names:
        table.add_column(name, justify="right", overflow="fold")
    judged = {name for name in others if _is_judged(comparison, name)}
    for name in others:
        table.add_column(f"{name} / {base}", justify="right", overflow="fold")
        if name in judged:
            table.add_column("", no_wrap=True)
    return lambda line: [
        cell
        for name in others
        for cell in _ratio_cells(line.cells.get(name))[: 2 if name in judged else 1]
    ]


def _marked(cell: Cell | None) -> "Text":
    from rich.text import Text  # noqa: PLC0415

    if cell is None or cell.ratio is None:
        return Text("")
    found = cell.ratio
    mark, style = _MARKS[found.verdict], _STYLE.get(found.verdict, "")
    return Text(f"{found.speed:.3f} {mark}", style=style)


def _is_judged(comparison: Comparison, name: str) -> bool:
    """Whether anything is known of how this side's values vary; else ratios stand alone."""
    cells = (line.cells.get(name) for line in comparison.lines)
    return any(cell and cell.ratio and cell.ratio.low is not None for cell in cells)


def _ratio_cells(cell: Cell | None) -> "list[Text]":
    from rich.text import Text  # noqa: PLC0415

    if cell is None:
        return [Text(""), Text("")]
    found = cell.ratio
    if found is None:
        return [Text(""), Text("cannot tell (printed as 0)")]
    style = _STYLE.get(found.verdict, "")
    return [Text(ratio_text(found)), Text(verdict_text(found), style=style)]
