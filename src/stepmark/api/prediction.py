"""Predict a training step."""

import os
from html import escape

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.model import Model
from stepmark.api.workload import Workload
from stepmark.predictions import prediction as core
from stepmark.predictions import prediction_text
from stepmark.predictions.predict import predicted
from stepmark.predictions.predict_options import PredictOptions
from stepmark.tables.table import Table


class Prediction(Table):
    """A predicted step. Its rows are the lines of the ledger of each pipeline stage.

    step_s: seconds of an optimizer step; is_lower_bound: at least as many. memory: of a rank,
    with a verdict whether it fits; None where it is unknown. notes: how far it is to be
    trusted. document: everything, as `stepmark predict --json` writes it. prediction: with the
    simulated step, whose `step.timeline()` has every operation, and the sources of the costs.
    """

    def __init__(self, prediction: core.Prediction) -> None:
        """Keep a prediction."""
        super().__init__(prediction.rows(), prediction_text.LEDGER_COLUMNS)
        self.step_s = prediction.step_s
        self.is_lower_bound = prediction.is_lower_bound
        self.memory = prediction.memory
        self.notes = list(prediction.notes)
        self.document = prediction.document()
        self.prediction = prediction

    def show(self) -> None:
        """Print what `stepmark predict` prints."""
        print("\n".join(prediction_text.lines(self.document)))  # noqa: T201

    def __repr__(self) -> str:
        return f"<Prediction {self.document['name']}: {self.step_s * 1e3:.2f} ms>"

    def _repr_html_(self) -> str:
        facts = self.document
        where = f"{facts['name']} on {facts['num_ranks']} x {facts['device']}"
        pairs = prediction_text.headline(facts)
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
    workload = what.program if isinstance(what, Workload) else None
    words = [] if what is None or workload else [what]
    return Prediction(predicted(read(PredictOptions, words, options), workload))
