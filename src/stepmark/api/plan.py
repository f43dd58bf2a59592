"""Search the layouts of a model on a number of GPUs."""

import os
from typing import Any

from stepmark.api.keywords import read, spells_keywords, with_options
from stepmark.api.ledger import to_plotly
from stepmark.api.model import Model
from stepmark.api.prediction import Prediction
from stepmark.layouts import plan as core
from stepmark.layouts import plan_page, plan_text
from stepmark.layouts.layout_search import LayoutSearch
from stepmark.layouts.plan_options import PlanOptions
from stepmark.predictions.predict import of_job
from stepmark.predictions.prediction import StepMemory
from stepmark.tables.table import Table


class Plan(Table):
    """Simulated layouts, of each number of GPUs the fastest first. Its rows are these layouts.

    best: the first row of each number of GPUs. commands: `stepmark predict` of these. left_out:
    numbers of GPUs without a layout, and why. document: everything, as `stepmark plan --json`
    writes it.

    Figures of the best layout, None where several numbers of GPUs were searched: step_s:
    seconds of an optimizer step; tokens_per_s, tokens_per_s_gpu: tokens per second of all GPUs
    and of one; mfu_pct: model FLOPs utilization (causal) in percent; memory: of a rank, as a
    prediction has it.
    """

    def __init__(
        self, options: PlanOptions, searches: list[LayoutSearch], left_out: core.LeftOut
    ) -> None:
        """Keep the layouts of a search."""
        rows = [row for each in searches for row in each.rows]
        super().__init__(rows, plan_text.columns(rows))
        self.best = [each.rows[0] for each in searches]
        self.commands = [each.command for each in searches]
        self.left_out = left_out
        self.document = core.document(searches, left_out)
        first = self.best[0] if len(self.best) == 1 else {}
        self.step_s: float | None = first.get("step_s")
        self.tokens_per_s: float | None = first.get("tokens_per_s")
        self.tokens_per_s_gpu: float | None = first.get("tokens_per_s_gpu")
        self.mfu_pct: float | None = first.get("mfu_pct")
        names = ("allocated_bytes", "reserved_bytes", "device_bytes", "verdict")
        memory = {name: first[name] for name in names} if first else None
        self.memory = memory and StepMemory(**memory)
        self._searches = searches
        self._places = [(each, number) for each in searches for number in range(len(each.rows))]
        self._text = [*core.lines(options, searches, left_out)]

    @spells_keywords
    def predict(self, number: int = 0) -> Prediction:
        """Predict the layout of a row. Raises IndexError where there is no such row."""
        self[number]  # an IndexError with the number of rows
        search, place = self._places[number]
        return Prediction(of_job(search.job(place)))

    def plot(self, number: int = 0) -> Any:
        """Return a plotly figure: time and memory of layouts; number: place of `best`."""
        Table(self.best)[number]
        return to_plotly(plan_page.scatter(self._searches[number]))

    def show(self) -> None:
        """Print what `stepmark plan` prints."""
        print("\n".join(self._text))  # noqa: T201


@spells_keywords
def plan(model: str | os.PathLike[str] | Model, **options: object) -> Plan:
    """Search the layouts of a model: the fastest that fits on so many GPUs.

    model: a name, a file such as config.json, or a Model. options: those of `stepmark plan`,
    e.g. gpus=256, gbs=1024, device="h100-sxm"; `options("plan")` lists them. Raises ConfigError
    where no layout fits.
    """
    own = read(PlanOptions, [model], options)
    return Plan(own, *core.plan(own))


# For help and completion.
plan.__signature__ = with_options(plan, PlanOptions)  # type: ignore[attr-defined]
