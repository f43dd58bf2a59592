"""Ledgers of steps, and figures in plotly."""

from collections.abc import Sequence
from typing import Any

from stepmark.tables.columns import Column, Row
from stepmark.tables.figures import Figure, draw
from stepmark.tables.table import Table, package

_WORDS_HEIGHT = 120  # pixels: of the title, the note and the legend


class Ledger(Table):
    """The lines of a step, a row each: group, line and time in nanoseconds.

    The lines of a pipeline stage, or of a measured rank, add up to its step.
    """

    def __init__(
        self, rows: Sequence[Row], columns: Sequence[Column[Any]], figure: Figure
    ) -> None:
        """Keep the lines and their figure."""
        super().__init__(rows, columns)
        self._figure = figure

    def plot(self) -> Any:
        """Return a plotly figure: a bar per stage, or one predicted and one measured."""
        return to_plotly(self._figure)


def to_plotly(figure: Figure) -> Any:
    """Return a plotly.graph_objects.Figure. Raises MissingPackageError without plotly."""
    drawn = draw(figure)
    layout = drawn["layout"]
    # A page has the title and the note around a figure, which here has them itself.
    layout["title"] = {"text": figure.title, "subtitle": {"text": figure.note}}
    layout["title"] |= {"automargin": True, "yref": "container"}
    layout["legend"] |= {"yref": "container", "y": 0.0}
    layout["height"] = figure.height + _WORDS_HEIGHT
    return package("plotly.graph_objects").Figure(data=drawn["data"], layout=layout)
