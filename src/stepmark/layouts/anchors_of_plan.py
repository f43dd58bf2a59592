"""Measured steps of a table as anchors of a plan, predicted as its own layouts are."""

from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.layouts.cluster import inputs_of_cluster
from stepmark.layouts.layout_space import megatron_settings, model_of
from stepmark.layouts.plan_options import BOTH, MEGATRON, PlanOptions
from stepmark.predictions.factors import Anchored
from stepmark.predictions.framework_job import options_class
from stepmark.predictions.plan_columns import DP
from stepmark.predictions.predict import anchored_by

_SHARED = ("models", "gbs", "seq_len", "packing", "precision")
_COLUMNS = {  # that state what layouts differ in
    "pp": {"pp"},
    "mbs": {"mbs"},
    "nproc": {"nproc", "world_size", "g", DP},
    "recompute": {"recompute", "recompute_granularity", "ac"},
}


def anchored_by_plan(options: PlanOptions) -> Anchored | None:
    """Return the factors by --anchor, fitted once for all layouts. Raises ConfigError.

    A row of a table has what all layouts of the plan have in common, as the command has that
    predicts the best one; it must state what they differ in.
    """
    if options.anchor is None:
        return None
    framework = options.framework
    if framework == BOTH:
        if Path(options.anchor).is_file():
            allowed = "megatron or pytorch, since rows of --anchor are steps of one framework"
            raise ConfigError("framework", framework, allowed)
        framework = MEGATRON  # steps of a run have their own
    values = {name: getattr(options, name) for name in _SHARED} | inputs_of_cluster(options)
    if framework == MEGATRON:
        values |= megatron_settings(options, model_of(options))
    degrees = {"pp": options.pp, "mbs": options.mbs, "nproc": options.gpus}
    single = {name: own[0] for name, own in degrees.items() if own and len(own) == 1}
    varied = {"tp": {"tp"}}  # so that each row has a layout of its own
    varied |= {name: own for name, own in _COLUMNS.items() if name not in single}
    if options.recompute == ("none",):
        del varied["recompute"]
    own = {name: value for name, value in (values | single).items() if value is not None}
    return anchored_by(options_class(framework)(framework=framework, **own), varied)
