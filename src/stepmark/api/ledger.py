"""Ledgers of predicted and measured steps, and figures in plotly."""

from collections.abc import Sequence
from typing import Any

from stepmark.predictions.ledger_page import stacked
from stepmark.predictions.predicted_steps import Step as ReportedStep
from stepmark.predictions.predicted_steps import Suggestion
from stepmark.tables.columns import Column, Row, given
from stepmark.tables.columns import Unit as Format
from stepmark.tables.figures import Figure, draw
from stepmark.tables.table import Table, package
from stepmark.timeline.ledger_text import NAMES, differences

_ADDS_UP = "The lines of a bar add up to its step."
_COLUMNS = (
    given("group", heading="ledger"),
    given("line"),
    given("predicted_ns", Format.MS, "predicted ms"),
    given("measured_ns", Format.MS, "measured ms"),
    given("difference_ns", Format.SIGNED_MS, "difference"),
)


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


class Step:
    """A training step that a run measured and profiled, beside its prediction.

    name: model and layout. case_id: of its row. step_s: measured seconds of an optimizer step;
    predicted_s: predicted ones, None where there is no prediction. ledger: every line of both.
    answer: one sentence. suggestions: what is worth doing, each with text, command and gain_ns
    (nanoseconds of a step at most; None: unknown).
    """

    def __init__(self, step: ReportedStep) -> None:
        """Keep a step of a run's report."""
        measured = step.measured.ledger
        ledgers = [measured] if step.predicted is None else [step.predicted, measured]
        self.name = step.name
        self.case_id = step.case_id
        self.step_s: float = measured.window_ns * 1e-9
        self.predicted_s = None if step.predicted is None else step.predicted.window_ns * 1e-9
        self.answer = step.sentence
        self.suggestions: tuple[Suggestion, ...] = step.suggestions
        rows: list[Row] = [
            {
                "group": str(each.line[0]),
                "line": str(each.line[1]),
                "predicted_ns": None if step.predicted is None else each.first_ns,
                "measured_ns": each.second_ns,
                "difference_ns": None if step.predicted is None else each.ns,
            }
            for each in differences(ledgers[0], measured)
        ]
        names = NAMES[-len(ledgers) :]
        figure = stacked(f"Ledger of {step.name}", _ADDS_UP, ledgers, names)
        self.ledger = Ledger(rows, _COLUMNS, figure)

    def __repr__(self) -> str:
        return f"<Step {self.answer}>"


def to_plotly(figure: Figure) -> Any:
    """Return a plotly.graph_objects.Figure. Raises MissingPackageError without plotly."""
    drawn = draw(figure)
    layout = drawn["layout"]
    # A page has the title and the note around a figure; here the figure has them.
    layout["title"] = {"text": figure.title, "subtitle": {"text": figure.note}}
    layout["margin"] |= {"t": 120}
    return package("plotly.graph_objects").Figure(data=drawn["data"], layout=layout)
