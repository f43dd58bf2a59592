"""Which measured training steps are like a case, so that their costs are those of the case."""

import dataclasses
from collections.abc import Iterable

from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase

_MOST_SHOWN = 4  # options in which a profile differs
# Fields in which a calibration may differ from the case: costs are scaled. Those of the model
# are in _MODEL_SCALED.
_SCALED: tuple[str, ...] = (
    "mbs",
    "grad_accum",
    "model",
    "parallel",
    "scale",
    "labels",
    "model_file",
    "seed",
)
_SCALED += ("num_layers", "workers", "data", "lr")
_OPTIONS = {"data_parallel": "strategy", "recompute": "ac", "recompute_blocks": "ac"}
_MODEL_SCALED = {"num_layers", "seq_len", "name", "source", "aliases"}
_MODEL_SCALED |= {"published_params", "published_active_params"}


def is_like(measured: TrainCase, case: TrainCase) -> bool:
    """Return whether costs of the measured case are those of this case, or scale to them."""
    return not _differences(measured, case)


def _differences(measured: TrainCase, case: TrainCase) -> list[str]:
    """Return the options in which costs of the measured case are not those of this case."""
    model = case.model.with_layers(measured.model.num_layers)
    pairs = (
        (case, measured, {f.name for f in dataclasses.fields(case)}.difference(_SCALED)),
        (case.parallel, measured.parallel, ("tp", "cp", "ep")),
        (model, measured.model, {f.name for f in dataclasses.fields(model)} - _MODEL_SCALED),
    )
    different = [
        "model" if own is model else _OPTIONS.get(name, name)
        for own, other, names in pairs
        for name in sorted(names)
        if getattr(own, name) != getattr(other, name)
    ]
    return list(dict.fromkeys(different))


def _distance(measured: TrainCase, case: TrainCase) -> tuple[bool, bool, bool, int]:
    """Return how far the measured case is from the case; the smallest is the best."""
    return (
        measured.model.seq_len != case.model.seq_len,
        measured.mbs != case.mbs,
        measured.parallel != case.parallel,
        measured.model.num_layers,
    )


def missing_profile(steps: Iterable[Measured], case: TrainCase) -> str:
    """Return the rule that a run breaks in which no profiled step is like the case."""
    allowed = f"a run with a profile of {case.model.name} {case.strategy}"
    profiled = [record.train for record in steps if record.training and record.training.traces]
    if profiled:
        best = min((_differences(other, case) for other in profiled), key=len)
        shown = ", ".join(best[:_MOST_SHOWN]) + ", ..." * (len(best) > _MOST_SHOWN)
        allowed += f" (its profile differs in {shown})"
    return f"{allowed}; stepmark calibrate measures one"


def nearest_profile(steps: Iterable[Measured], case: TrainCase) -> Measured | None:
    """Return the profiled step whose costs are used for the case; None: there is none."""
    candidates = [
        record
        for record in steps
        if record.training and record.training.traces and is_like(record.train, case)
    ]
    return min(candidates, key=lambda record: _distance(record.train, case), default=None)
