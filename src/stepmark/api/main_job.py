"""The main job: calibrate, predict a step, measure it."""

import os

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.model import Model
from stepmark.api.run import Run, measure_plan
from stepmark.runs.run import plan
from stepmark.runs.run_options import RunOptions


@spells_keywords
def run(model: str | os.PathLike[str] | Model | None = None, **options: object) -> Run:
    """Calibrate, predict a training step and measure it, as `stepmark run` does.

    model: a name, a file such as config.json, or a Model; None: the largest built-in one that
    fits. options: those of `stepmark run`, e.g. nproc=8, budget="10m"; `options("run")` lists
    them. `steps` of the run has the ledgers, predicted and measured; `stepmark report` writes
    its page. Raises ConfigError for bad options, StepmarkError where nothing was measured.
    """
    given = read(RunOptions, [] if model is None else [model], options)
    return measure_plan("run", given, plan)
