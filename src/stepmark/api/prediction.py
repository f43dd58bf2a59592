"""Predict a training step."""

import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, overload

from stepmark.api.keywords import (
    as_typed,
    in_keywords,
    is_list,
    names_of,
    spells_keywords,
    text,
    with_options,
)
from stepmark.api.ledger import Ledger, to_plotly
from stepmark.api.model import Model
from stepmark.api.workload import Workload
from stepmark.framework_files import configuration
from stepmark.ground.errors import ConfigError
from stepmark.ground.option_grid import read_grid
from stepmark.predictions import framework_job, ledger_page, prediction_grid, prediction_text
from stepmark.predictions import prediction as core
from stepmark.predictions.predict import Job, of_job
from stepmark.predictions.predict_options import LISTED, PredictOptions
from stepmark.predictions.prediction_grid import PredictionGrid
from stepmark.step.workload import Workload as Program
from stepmark.tables.table import Table
from stepmark.workloads import workload_flags
from stepmark.workloads.rules import find_rule


class Prediction(Table):
    """A predicted step. Its rows are the lines of the ledger of each pipeline stage.

    step_s: seconds of an optimizer step; is_lower_bound: at least as many. interval: low_s and
    high_s, seconds between which the step is with the probability coverage (0.9: 90 %); None
    where no errors are known. tokens_per_s, tokens_per_s_gpu: tokens per second of all GPUs and
    of one. mfu_pct, hfu_pct: model and hardware FLOPs utilization (causal) in percent.
    exposed_comm_s, bubble_s: seconds of communication that nothing hides, and of the pipeline's
    bubble. days, gpu_hours, cost: of the training run of tokens and price, else None. ledger:
    the lines as a table with plot(); where stages wait for others, waiting is a line, and the
    rest of exposed communication another. memory: of a rank, None where it is unknown:
    allocated_bytes, reserved_bytes, device_bytes, verdict, and fits: True, False, or None where
    it is close. notes: how far it is to be trusted. document: everything, as `stepmark predict
    --json` writes it. prediction: with the simulated step, whose `step.timeline()` has every
    operation, and the sources of the costs.
    """

    def __init__(self, prediction: core.Prediction) -> None:
        """Keep a prediction."""
        self.document = prediction.document()
        super().__init__(self.document["ledger"], prediction_text.LEDGER_COLUMNS)
        self.step_s = prediction.step_s
        self.is_lower_bound = prediction.is_lower_bound
        self.memory = prediction.memory
        self.notes: list[str] = self.document["notes"]
        interval = prediction.interval
        self.interval = interval if interval and interval.is_known else None
        self.tokens_per_s: float | None = self.document["tokens_per_s"]
        self.tokens_per_s_gpu: float | None = self.document["tokens_per_s_gpu"]
        self.mfu_pct: float | None = self.document["mfu_pct"]
        self.hfu_pct: float | None = self.document["hfu_pct"]
        self.exposed_comm_s: float = self.document["exposed_comm_s"]
        self.bubble_s: float | None = self.document["bubble_s"]
        self.days: float | None = self.document["days"]
        self.gpu_hours: float | None = self.document["gpu_hours"]
        self.cost: float | None = self.document["cost"]
        figure = ledger_page.stages(prediction.step.ledgers)
        self.ledger = Ledger(self.rows(), prediction_text.LEDGER_COLUMNS, figure)
        self.prediction = prediction

    def show(self, *, stages: bool = False, notes: bool = False) -> None:
        """Print what `stepmark predict` prints, with --stages or --notes if asked for."""
        text = prediction_text.lines(
            self.prediction, self.document, all_stages=stages, all_notes=notes
        )
        print("\n".join(text))  # noqa: T201

    def __repr__(self) -> str:
        return f"<Prediction {self.document['name']}: {self.step_s * 1e3:.2f} ms>"

    def _repr_html_(self) -> str:
        facts = self.document
        where = f"{facts['name']} on {facts['num_ranks']} x {facts['device']}"
        pairs = prediction_text.headline(facts)
        lines = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in pairs)
        notes = "".join(f"<p>note: {escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(where)}</p><ul>{lines}</ul>{super()._repr_html_()}{notes}"


class Predictions(Table):
    """Predicted steps of all combinations of lists. Its rows are those of the combinations.

    Columns end in their unit: step_s, interval_low_s, interval_high_s, comm_s, exposed_comm_s,
    contention_s, bubble_s, tokens_per_s_gpu, mfu_pct, allocated_bytes, reserved_bytes, ...
    The best is first: by whether its memory fits, then by tokens/s of a GPU, or with prices of
    several devices by cost. best: the first row; None where none fits. refused: combinations
    that no step can have, with the reason. notes: how far rows are to be trusted, each with
    the number of rows. document: everything, as `stepmark predict --json` writes it.
    """

    def __init__(self, grid: PredictionGrid, workload: Program | None = None) -> None:
        """Keep the predictions of a grid."""
        super().__init__(grid.rows, grid.columns)
        self.best = grid.best
        self.refused = Table(grid.refused)
        self.notes = grid.notes
        self.document = grid.document()
        self._grid = grid
        self._workload = workload

    @spells_keywords
    def predict(self, number: int = 0) -> Prediction:
        """Predict the combination of a row. Raises IndexError where there is no such row."""
        self[number]  # an IndexError with the number of rows
        return Prediction(of_job(self._grid.jobs[number], self._workload))

    def plot(self) -> Any:
        """Return a plotly figure: tokens/s of a GPU, else the step, of each combination."""
        return to_plotly(prediction_grid.figure(self._grid))

    def show(self) -> None:
        """Print what `stepmark predict` prints."""
        print("\n".join(prediction_grid.lines(self._grid)))  # noqa: T201


Single = str | float | os.PathLike[str] | None


@overload
def predict(
    what: str | os.PathLike[str] | Model | Workload | None = None,
    *,
    framework: str | None = None,
    **options: Single,
) -> Prediction: ...
@overload
def predict(
    what: str | os.PathLike[str] | Model | Workload | None = None,
    *,
    framework: str | None = None,
    **options: object,
) -> Prediction | Predictions: ...
@spells_keywords
def predict(
    what: str | os.PathLike[str] | Model | Workload | None = None,
    *,
    framework: str | None = None,
    **options: object,
) -> Prediction | Predictions:
    """Predict a training step from measured parts, or by the data sheet of a device.

    what: a model, a workload or its file, or a framework's file; None with
    from_run="latest". framework: megatron, deepspeed or pytorch, whose rules and settings
    apply; None: the step that `stepmark train` runs. options: those of `stepmark predict`, e.g.
    device="h200", nproc=8, strategy="fsdp", mbs=2; `options("predict", framework)` lists them.
    Of options with lists, such as tp=[2, 4, 8], each combination is predicted: the result is
    Predictions, also of a list of one. Lists are for device, host, network, nproc, strategy,
    tp, pp, cp, ep, dp_shard, dp_replicate, mbs, gbs, grad_accum, seq_len, precision, ac,
    pp_schedule, pp_microbatches, and of a framework vpp, stage and recompute_...; what_if,
    switches and others have one value of each call. Raises ConfigError.
    """
    workload = what.program if isinstance(what, Workload) else None
    words = [] if what is None or workload else [what]
    if framework is not None:
        if workload:
            raise ConfigError("framework", framework, "left out: the workload has its rules")
        options = {"framework": framework, **options}
    cls = _options_class(words, options)
    names = names_of(cls)
    for name in options.keys() - names.keys():
        workload_flags.refuse_other_framework(name)
    lists = {names[name].name for name, value in options.items() if is_list(value)}
    grid = read_grid(cls, as_typed(cls, words, options), LISTED, lists)
    if grid.axes:
        return Predictions(prediction_grid.predict_grid(grid, in_keywords, workload), workload)
    return Prediction(of_job(grid.options, workload))


# For help and completion.
predict.__signature__ = with_options(predict, PredictOptions)  # type: ignore[attr-defined]


def _options_class(words: Sequence[object], options: Mapping[str, object]) -> type[Job]:
    """Return the options: those of a framework where it, or its file, is named."""
    if "framework" in options:
        return framework_job.options_class(find_rule(text(options["framework"])))
    names = (text(word) for word in (*words, options.get("config")) if word is not None)
    file = next((name for name in names if configuration.is_framework_file(name)), None)
    if file is None:
        return PredictOptions
    return framework_job.options_class(configuration.framework_of(file))
