"""Options with which a step fits that runs out of memory, and trains on the same tokens."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stepmark.cases.fields import given_values
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Fp8, Precision, Recompute
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import argv
from stepmark.ground.units import format_bytes
from stepmark.step_memory import memory
from stepmark.training import train_plan, train_refusals
from stepmark.training.train_options import TrainOptions, options_of

_MOST_RANKS = 1024  # that are suggested
_MOST_TP = 8  # ranks, inside a host
_STRONGER = {
    Recompute.NONE: (Recompute.OPS, Recompute.FULL),
    Recompute.BLOCKS: (Recompute.FULL,),
    Recompute.OPS: (Recompute.FULL,),
    Recompute.FULL: (),
}
Changes = dict[str, Any]  # of TrainOptions, by name


def what_fits(
    case: TrainCase, device_bytes: int, measured: Sequence[tuple[TrainCase, int, int]] = ()
) -> str:
    """Return the smallest change of options with which the step fits, by estimate; "": none.

    In order of cost: activation checkpointing, smaller micro-batches, sharding, more GPUs.
    measured: as in memory.calibrated.
    """

    def fits(other: TrainCase) -> bool:
        is_like = (other.parallel, other.recompute) == (case.parallel, case.recompute)
        sizes = memory.calibrated(other, measured if is_like else ())
        return memory.verdict(other, *sizes, device_bytes) == memory.FITS

    for layout in _layouts(case):
        possible = [
            (changes, other)
            for changes in _within(case, layout)
            if (other := _changed(case, changes)) is not None
        ]
        # The last needs the least: where it is too large, all are.
        for changes, other in possible if possible and fits(possible[-1][1]) else ():
            if fits(other):
                return shlex.join(argv(TrainOptions(**changes)))
    return ""


def check_memory(case: TrainCase, device_bytes: int) -> None:
    """Raise ConfigError for a step that surely runs out of memory, by estimate.

    device_bytes: of a GPU, or on a CPU the share of the host's memory that a rank has.
    """
    sizes = memory.calibrated(case)
    if memory.verdict(case, *sizes, device_bytes) == memory.NO_FIT:
        needed = format_bytes(sizes[0])
        there = format_bytes(device_bytes)
        fitting = what_fits(case, device_bytes) if case.device == "cuda" else "--scale tiny"
        allowed = f"one that fits into {there} (it needs {needed})"
        allowed += f"; the step would fit with {fitting}" if fitting else ""
        raise ConfigError("mbs", case.mbs, allowed)


def _layouts(case: TrainCase) -> Iterator[Changes]:
    """Yield the layout as it is, then sharded on the same GPUs, then over ever more."""
    axes = case.parallel
    is_sharded = case.data_parallel is DataParallel.FSDP and axes.dp_replicate == 1
    yield {}
    if axes.gradient_ranks > 1 and not is_sharded:
        yield _sharded(case, case.num_ranks)
    factor = 2
    while case.num_ranks * factor <= _MOST_RANKS:
        yield _sharded(case, case.num_ranks * factor)
        if axes.tp * factor <= _MOST_TP:
            yield _divided(case, factor)
        factor *= 2


def _sharded(case: TrainCase, num_ranks: int) -> Changes:
    """Return FSDP over all data ranks, with one copy of the model."""
    axes = case.parallel
    changes: Changes = {"strategy": ("fsdp",), "nproc": str(num_ranks)}
    if case.data_parallel is DataParallel.FSDP:
        return changes | ({"dp_replicate": 1} if axes.dp_replicate > 1 else {})
    # Options that another strategy implied, or that have another default with this one.
    degrees = {axis: getattr(axes, axis) for axis in ("tp", "pp", "cp")}
    changes |= {axis: degree for axis, degree in degrees.items() if degree > 1}
    precision = case.precision
    if precision is Precision.MASTER:
        precision = changes["precision"] = Precision.AMP
    defaults = train_plan.strategy_defaults("fsdp", precision, axes)
    if case.reduce_dtype != defaults["reduce_dtype"]:
        changes["reduce_dtype"] = case.reduce_dtype
    if case.fp8 is not Fp8.NONE:
        changes["fp8_all_gather"] = case.fp8_all_gather
    return changes


def _divided(case: TrainCase, factor: int) -> Changes:
    """Return tensor parallelism over so many times the ranks, with as many data ranks."""
    axes = case.parallel
    is_sharded = case.data_parallel is DataParallel.FSDP
    changes: Changes = {
        "tp": axes.tp * factor,
        "strategy": ("fsdp",) if is_sharded else ("tp",),
        "nproc": str(case.num_ranks * factor),
    }
    return changes | ({"pp": axes.pp} if axes.pp > 1 else {})


def _within(case: TrainCase, layout: Changes) -> Iterator[Changes]:
    """Yield a layout with checkpointing, then with smaller micro-batches, then with both."""
    splits = _splits(case, layout)
    if not splits:
        return
    first, *smaller = splits
    stronger = [{"ac": (kind, (1, 1))} for kind in _STRONGER[case.recompute]]
    if layout:
        yield layout | first
    yield from (layout | first | ac for ac in stronger)
    yield from (layout | split for split in smaller)
    yield from (layout | split | ac for ac in stronger[-1:] for split in smaller)


def _splits(case: TrainCase, layout: Changes) -> list[Changes]:
    """Return micro-batches with which the step has the same tokens, the largest first.

    A pipeline divides --mbs into more of them; others accumulate more of them.
    """
    try:
        _, axes = _layout_of(replace(options_of(case), **layout))
    except ConfigError:
        return []
    sequences, rest = divmod(
        case.mbs * case.grad_accum * case.parallel.data_ranks, axes.data_ranks
    )
    if rest or (axes.pp > 1 and sequences % case.grad_accum):
        return []
    parts = case.num_microbatches
    if axes.pp > 1:
        mbs = sequences // case.grad_accum
        sizes = [
            {"mbs": (mbs,), "pp_microbatches": count}
            for count in range(parts, mbs + 1, parts)
            if mbs % count == 0
        ]
    else:
        sizes = [
            {"mbs": (mbs,), "grad_accum": sequences // mbs}
            for mbs in range(min(case.mbs, sequences), 0, -1)
            if sequences % mbs == 0
        ]
    own = {"mbs": (case.mbs,), "grad_accum": case.grad_accum, "pp_microbatches": parts}
    return [{n: value for n, value in size.items() if value != own[n]} for size in sizes]


def _layout_of(options: TrainOptions) -> tuple[str, Any]:
    (strategy,) = options.strategy or ("",)
    return train_plan.layout(options, strategy, int(options.nproc or 1))


def _changed(case: TrainCase, changes: Changes) -> TrainCase | None:
    """Return the case with these options; None where it cannot run."""
    options = replace(options_of(case), **changes)
    recompute, blocks = options.ac or (Recompute.NONE, (1, 1))
    (values,) = given_values(TrainCase, options)
    try:
        strategy, axes = _layout_of(options)
        other = replace(
            case,
            **values,
            parallel=axes,
            data_parallel=train_plan.data_parallel(strategy),
            mbs=(options.mbs or (1,))[0],
            recompute=recompute,
            recompute_blocks=blocks,
            fp8_all_gather=bool(options.fp8_all_gather),
        )
        if other.data_parallel is not case.data_parallel:
            defaults = train_plan.strategy_defaults(strategy, other.precision, axes)
            defaults = {n: value for n, value in defaults.items() if n not in changes}
            other = replace(other, **defaults)
        train_refusals.check(other, options_of(other))
    except ConfigError:
        return None
    return other
