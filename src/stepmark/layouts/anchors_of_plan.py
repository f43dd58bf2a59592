"""Measured steps of a table as anchors of a plan, predicted as its own layouts are."""

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.layouts.cluster import inputs_of_cluster
from stepmark.layouts.layout_space import megatron_settings, model_of
from stepmark.layouts.plan_options import (
    ALL_TO_ALL,
    BOTH,
    EXCHANGES,
    MEGATRON,
    SCHEDULES,
    PlanOptions,
)
from stepmark.predictions.factors import Anchored
from stepmark.predictions.framework_job import FrameworkJob, described, options_class
from stepmark.predictions.plan_columns import DP
from stepmark.predictions.predict import Job, anchored_by
from stepmark.workloads import workload_flags
from stepmark.workloads.workload import job_of

_SHARED = ("models", "gbs", "seq_len", "packing", "precision", "imbalance")
_DEFAULTS = {
    "recompute": ("none",),
    "pp_schedule": SCHEDULES[:1],
    "cp_comm_type": EXCHANGES[:1],
    "dispatch": (ALL_TO_ALL,),
}
_COLUMNS = {  # that state what layouts differ in
    "pp": {"pp"},
    "mbs": {"mbs"},
    "nproc": {"nproc", "world_size", "g", DP},
    "recompute": {"recompute", "recompute_granularity", "ac"},
    "pp_schedule": {"pp_schedule"},
    "cp_comm_type": {"cp_comm_type"},
    "dispatch": {"moe_token_dispatcher_type"},
}


def anchored_by_plan(options: PlanOptions) -> Anchored | None:
    """Return the factors by --anchor, fitted once for all layouts. Raises ConfigError.

    A row of a table has what all layouts of the plan have in common, as the command has that
    predicts the best one; it must state what they differ in.
    """
    if options.anchor is None:
        return None
    framework = options.framework
    is_unknown = framework == BOTH and Path(options.anchor).is_file()
    if framework == BOTH:
        framework = MEGATRON  # steps of a run have their own
    values = {name: getattr(options, name) for name in _SHARED} | inputs_of_cluster(options)
    if framework == MEGATRON:
        values |= megatron_settings(options, model_of(options))
    degrees = {"pp": options.pp, "mbs": options.mbs, "nproc": options.gpus}
    single = {name: own[0] for name, own in degrees.items() if own and len(own) == 1}
    varied = {"tp": {"tp"}}  # so that each row has a layout of its own
    varied |= {name: _COLUMNS[name] for name in degrees if name not in single}
    for name, default in _DEFAULTS.items():
        if getattr(options, name) != default:
            varied[name] = _COLUMNS[name]
    own = {name: value for name, value in (values | single).items() if value is not None}
    if is_unknown:
        allowed = "megatron or pytorch, since rows of --anchor are steps of one framework"
        raise ConfigError("framework", BOTH, f"{allowed}; they must state {', '.join(varied)}")
    job = options_class(framework)(framework=framework, **own)
    anchored = anchored_by(job, varied, _step_of)
    return replace(anchored, model_name=model_of(options).name)


def _step_of(job: Job) -> Hashable:
    """Return what Candidate.step has of the step of a row."""
    assert isinstance(job, FrameworkJob)
    framework, values = described(job)
    cls = workload_flags.options_class(framework, has_ignored=False)
    return job_of(cls(**{**dict(values), "model": job.models[0], "config": None}))[:2]
