"""The training steps of a run, with their ledgers."""

from pathlib import Path

from stepmark.api.ledger import Ledger
from stepmark.predictions.ledger_page import stacked
from stepmark.predictions.predicted_steps import Step as ReportedStep
from stepmark.predictions.predicted_steps import Suggestion
from stepmark.runs.step_report import step_report
from stepmark.store.view import View
from stepmark.tables.columns import Row, given
from stepmark.tables.columns import Unit as Format
from stepmark.timeline.ledger_text import NAMES, differences

_ADDS_UP = "The lines of a bar add up to its step."
_COLUMNS = (
    given("group", heading="ledger"),
    given("line"),
    given("predicted_ns", Format.MS, "predicted ms"),
    given("measured_ns", Format.MS, "measured ms"),
    given("difference_ns", Format.SIGNED_MS, "difference"),
)


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


def steps_of(path: Path, view: View) -> list[Step]:
    """Return the steps that a run predicted. Raises ConfigError for a changed prediction."""
    report = step_report(path, view)
    return [Step(step) for step in report.steps] if report else []
