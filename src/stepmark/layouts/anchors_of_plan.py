"""Measured steps of a table as anchors of a plan, predicted as its own layouts are."""

from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.cluster import inputs_of_cluster
from stepmark.layouts.layout_space import megatron_settings, model_of
from stepmark.layouts.plan_options import BOTH, PlanOptions
from stepmark.predictions import framework_job
from stepmark.predictions.factors import Anchored
from stepmark.predictions.plan_columns import DP
from stepmark.predictions.predict import anchored_by
from stepmark.predictions.predict_options import PredictOptions

_RECOMPUTE = ("recompute", "recompute_granularity", "ac")  # columns


def anchored_by_plan(options: PlanOptions) -> Anchored | None:
    """Return the factors by --anchor, fitted once for all layouts. Raises ConfigError.

    A row of a table has what all layouts of the plan have in common, as the command has that
    predicts the best one; it must state what they differ in.
    """
    if options.anchor is None:
        return None
    values = {"models": options.models, "seq_len": options.seq_len}
    values |= inputs_of_cluster(options)
    if options.framework == BOTH:
        if Path(options.anchor).is_file():
            allowed = "megatron or pytorch, since rows of --anchor are steps of one framework"
            raise ConfigError("framework", options.framework, allowed)
        return anchored_by(PredictOptions(**values))
    for name in ("framework", "gbs", "packing", "precision"):
        values[name] = getattr(options, name)
    if options.framework == "megatron":
        values |= megatron_settings(options, model_of(options))
    varied = {"tp": {"tp"}}  # so that a row has a layout of its own
    for name, columns in {"pp": {"pp"}, "mbs": {"mbs"}}.items():
        degrees = getattr(options, name)
        if degrees and len(degrees) == 1:
            (values[name],) = degrees
        else:
            varied[name] = columns
    if options.recompute != ("none",):
        varied["recompute"] = {*_RECOMPUTE}
    if len(options.gpus) == 1:
        (values["nproc"],) = options.gpus
    else:
        varied["nproc"] = {"nproc", "world_size", "g", DP}
    own: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return anchored_by(framework_job.options_class(options.framework)(**own), varied)
