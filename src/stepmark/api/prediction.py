"""Predict a training step."""

import os
from html import escape

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.model import Model
from stepmark.api.workload import Workload, in_files
from stepmark.predictions import prediction as report
from stepmark.predictions.predict import predicted
from stepmark.predictions.predict_options import PredictOptions
from stepmark.tables.table import Table
from stepmark.timeline.prediction import StepMemory, StepPrediction


class Prediction(Table):
    """A predicted step. Its rows are the lines of the ledger of each pipeline stage.

    step_s: seconds of an optimizer step; is_lower_bound: at least as many. memory: of a rank,
    with a verdict whether it fits; None where it is unknown. notes: how far it is to be
    trusted. document: everything, as `stepmark predict --json` writes it. prediction: with the
    timeline, and the sources of the costs.
    """

    def __init__(
        self, facts: report.Facts, prediction: StepPrediction, notes: list[str]
    ) -> None:
        """Keep a prediction. facts: of the step. notes: how far it is to be trusted."""
        super().__init__(report.rows(prediction), report.LEDGER_COLUMNS)
        self.step_s = prediction.step_s
        self.is_lower_bound = prediction.is_lower_bound
        self.memory: StepMemory | None = facts.memory
        self.notes = notes
        self.document = report.document(facts, prediction, notes)
        self.prediction = prediction

    def show(self) -> None:
        """Print what `stepmark predict` prints."""
        print("\n".join(report.lines(self.document, self.prediction)))  # noqa: T201

    def __repr__(self) -> str:
        return f"<Prediction {self.document['name']}: {self.step_s * 1e3:.2f} ms>"

    def _repr_html_(self) -> str:
        facts = self.document
        where = f"{facts['name']} on {facts['num_ranks']} x {facts['device']}"
        pairs = report.headline(facts, self.step_s)
        lines = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in pairs)
        notes = "".join(f"<p>note: {escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(where)}</p><ul>{lines}</ul>{super()._repr_html_()}{notes}"


@spells_keywords
def predict(
    what: str | os.PathLike[str] | Model | Workload | None = None, **options: object
) -> Prediction:
    """Predict a training step from measured parts, or by the data sheet of a device.

    what: a model, or a workload or its file; None with from_run="latest". options: those of
    `stepmark predict`, e.g. device="h200", nproc=8, strategy="fsdp", mbs=2;
    `options("predict")` lists them. Raises ConfigError.
    """
    with in_files([] if what is None else [what]) as words:
        return Prediction(*predicted(read(PredictOptions, words, options)))
