"""Records to series, and which series of two sides are of the same thing.

A field that is one value on each side and the same tells nothing apart; one that varies within
a side is part of a line's name; one that differs between sides, constant in each, is what is
compared, or a reason to refuse.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.core.case import OpCase
from stepmark.core.comm_case import CommCase
from stepmark.core.comparison import Fields, Series, Side
from stepmark.core.errors import ConfigError
from stepmark.core.record import Measured, Record, RunInfo
from stepmark.core.stats import slowest_per_sample
from stepmark.core.train_case import TrainCase
from stepmark.core.training import DataParallel, Recompute
from stepmark.core.units import format_bytes

# Fields of a training case that are taken as they are.
_TRAIN_VALUES = (
    *("compile_mode", "grad_sync", "attention", "loss_chunks", "cuda_graph", "clip", "reshard"),
    *("prefetch", "blocks_per_group", "reduce_dtype", "bucket_mb", "async_tp", "pp_schedule"),
    *("pp_microbatches", "data", "workers", "backend", "scale", "lr", "seed"),
)


def context(info: RunInfo) -> dict[str, str]:
    """What a run ran on and under: differences are what a comparison is about."""
    environment = info.environment
    names = dict.fromkeys(device.name for device in environment.devices)
    libraries = {
        name: value
        for name, value in environment.versions.items()
        if name in ("cuda", "hip", "driver", "nccl", "rccl")
    }
    variables = {
        name: value
        for name, value in environment.variables.items()
        if not name.startswith(("TORCHELASTIC", "STEPMARK"))
    }
    return {"device": ", ".join(names), "torch": environment.torch, **libraries, **variables}


def series_of_records(
    info: RunInfo, records: Iterable[Record]
) -> tuple[list[Series], tuple[str, ...]]:
    """The right results of a run, and notes on what is left out."""
    by_case: dict[tuple[str, str], list[Measured]] = {}
    wrong = 0
    for record in records:
        if isinstance(record, Measured) and any(record.samples.seconds):
            wrong += bool(record.num_wrong)
            if not record.num_wrong:
                # The automatic clock may choose another one in another launch.
                ran = record.train if isinstance(record.case, TrainCase) else record.case
                key = (ran.case_id, record.samples.method)
                by_case.setdefault(key, []).append(record)
    notes = (f"{wrong} wrong results are left out",) if wrong else ()
    return [_of_records(info, launches) for launches in by_case.values()], notes


def _of_records(info: RunInfo, records: Sequence[Measured]) -> Series:
    """Seconds of the slowest rank of each sample, by launch; of training, of each cycle."""
    case = records[0].case
    method = records[0].samples.method
    if isinstance(case, TrainCase):
        # A median of single samples would leave out an optimizer that only some of them have.
        launches = {
            f"{info.run_id}/{record.launch}": mean_of_cycles(record.samples.seconds, case.cycle)
            for record in records
        }
        return Series(fields=_train_fields(records[0].train, method), launches=launches)
    launches = {
        f"{info.run_id}/{record.launch}": tuple(slowest_per_sample(record.samples.seconds))
        for record in records
    }
    if isinstance(case, CommCase):
        return Series(
            fields=_comm_fields(case, method),
            size_bytes=case.message_bytes,
            launches=launches,
            busbw_factor=case.busbw_factor or None,
        )
    return Series(fields=_op_fields(case, method), launches=launches)


def mean_of_cycles(seconds: Sequence[Sequence[float]], cycle: int) -> tuple[float, ...]:
    """A sample's mean time in each whole cycle, of the rank that took longest for it.

    The slowest of each sample without a whole cycle.
    """
    whole = len(seconds[0]) // cycle * cycle
    return tuple(
        max(math.fsum(values[first : first + cycle]) for values in seconds) / cycle
        for first in range(0, whole, cycle)
    ) or tuple(slowest_per_sample(seconds))


def _train_fields(case: TrainCase, method: str) -> Fields:
    """No dtype: a difference of precision is one of technique, which may be compared."""
    some, every = case.recompute_blocks
    blocks = f" {some}/{every}" if case.recompute is Recompute.BLOCKS else ""
    sharded = case.data_parallel is DataParallel.FSDP
    return {
        "family": case.family,
        "model": case.model.name,
        "num_ranks": case.num_ranks,
        "mbs": case.mbs,
        "seq_len": case.model.seq_len,
        "schedule": case.schedule.value,
        "grad_accum": case.grad_accum,
        "method": method,
        "strategy": case.strategy,
        # The strategy names all other axes.
        "dp_replicate": case.parallel.dp_replicate if sharded else None,
        "precision": case.precision.value,
        "fp8": case.fp8.value,
        "fp8_head": case.fp8_head,
        "fp8_all_gather": case.fp8_all_gather,
        "compile": case.compile.value,
        "recompute": case.recompute.value + blocks,
        **{name: getattr(case, name) for name in _TRAIN_VALUES},
        "device_type": case.device,
    }


def _comm_fields(case: CommCase, method: str) -> Fields:
    return {
        "family": case.collective.value,
        "dtype": case.dtype.value,
        "redop": case.redop.value,
        "root": case.root,
        "placement": "in-place" if case.in_place else "out-of-place",
        "num_ranks": case.num_ranks,
        "world_size": case.world_size,
        "method": method,
        "api": case.api.value,
        "backend": case.backend,
        "calls_per_group": case.calls_per_group,
        "split": case.split,
        "pair": f"{case.pair[0]}-{case.pair[1]}" if case.pair else "",
        "spread": case.spread,
        "skew_s": case.skew_s,
        "max_ctas": case.max_ctas,
        "beside": case.beside,
        "matrix": None if case.matrix is None else str(hash(case.matrix)),
        "device_type": case.device,
    }


def _op_fields(case: OpCase, method: str) -> Fields:
    op = dataclasses.asdict(case.op)
    plain = {
        name: value if isinstance(value, str | int | float | bool | None) else str(value)
        for name, value in op.items()
    }
    return {
        "family": case.family,
        "shape": case.op.shape_text,
        **plain,
        "dtype": case.dtype.value,
        "phase": str(plain.get("phase", "")),
        "backend": case.backend,
        "rate_kind": case.rate.value,
        "num_ranks": case.num_ranks,
        "scale": case.scale,
        "method": method,
        "clock": case.clock.value,
        "device_type": case.device,
    }


# Of these a difference makes figures incomparable; --allow and --force compare all the same.
STRICT = (
    *("method", "rate_kind", "num_ranks", "world_size", "dtype", "skew_s", "beside"),
    # Of a training step: what its tokens are.
    *("mbs", "seq_len", "schedule", "grad_accum"),
)
# These always name a line: their difference is no difference of settings.
NAMING = ("family", "shape", "label", "model", "phase", "placement", "pair")
# What else is worth saying that a side leaves open.
_TELLING = (*STRICT, *NAMING, "redop", "root", "api")
# Sizes of other numbers of ranks, rounded to whole parts, are still the same size.
SAME_SIZE = 0.01

Value = str | int | float | bool | None
Key = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Pairs of series, and what is to be known of those that found none."""

    pairs: list[tuple[int, Series, Series]]  # the place among the base's series
    notes: list[str]


def join(base: Side, other: Side, allowed: Sequence[str]) -> Joined:
    """Raises ConfigError where nothing fits, or what fits may not be compared."""
    notes, key_names = _key_names(base, other, allowed)
    pairs = _pairs(base, other, key_names)
    matched = {id(theirs) for _, _, theirs in pairs}
    if not pairs:
        raise ConfigError(
            "compare",
            f"{base.name} with {other.name}",
            f"there must be something in common: {_about(base)}; {_about(other)}",
        )
    for side, left in (
        (base, len(base.series) - len(pairs)),
        (other, len(other.series) - len(matched)),
    ):
        if left:
            against = other.name if side is base else base.name
            notes.append(f"{left} of {len(side.series)} of {side.name} are not in {against}")
    return Joined(pairs=pairs, notes=notes)


def _key_names(base: Side, other: Side, allowed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Notes on what differs, and the fields that name a line."""
    notes, names = [], []
    for name in dict.fromkeys(key for s in (*base.series, *other.series) for key in s.fields):
        mine, theirs = _values(base, name), _values(other, name)
        if mine == theirs:
            names.append(name)
        elif not _stated(mine) or not _stated(theirs):
            if name in _TELLING and (_stated(mine) or _stated(theirs)):
                silent = other if _stated(mine) else base
                notes.append(f"{silent.name} does not state {name}: taken as the same")
        elif len(mine) == len(theirs) == 1 and name not in NAMING:
            (a,), (b,) = mine, theirs
            if name in STRICT and name not in allowed:
                sides = f"the same in {base.name} and {other.name}"
                raise ConfigError(name, f"{a} and {b}", f"{sides}; or --allow {name}, --force")
            notes.append(f"{name} differs: {base.name} {a}, {other.name} {b}")
        else:
            names.append(name)
    return notes, names


def _values(side: Side, name: str) -> set[Value]:
    return {series.fields.get(name) for series in side.series}


def _stated(values: set[Value]) -> bool:
    return bool(values - {None, ""})


def _key(series: Series, names: Iterable[str]) -> Key:
    return (("unit", series.unit), *((name, series.fields.get(name)) for name in names))


def _pairs(base: Side, other: Side, names: Sequence[str]) -> list[tuple[int, Series, Series]]:
    """By key and size; what finds no partner of its size, by the nearest that is left."""
    mine, theirs = _by_key(base, names), _by_key(other, names)
    place = {id(series): number for number, series in enumerate(base.series)}
    found: list[tuple[int, Series, Series]] = []
    for key in mine.keys() & theirs.keys():
        ours, others = _by_size(mine[key]), _by_size(theirs[key])
        same: list[tuple[int | None, int | None]] = [
            (size, size) for size in ours.keys() & others.keys()
        ]
        left = {size for size in others.keys() - ours.keys() if size is not None}
        for size in sorted(size for size in ours.keys() - others.keys() if size is not None):
            near = min(left, key=lambda one: abs(one - size), default=None)
            if near is not None and abs(near - size) <= SAME_SIZE * size:
                left.remove(near)
                same.append((size, near))
        for our_size, their_size in same:
            one, other_one = _only(base, ours[our_size]), _only(other, others[their_size])
            found.append((place[id(one)], one, other_one))
    return sorted(found, key=lambda pair: pair[0])


def _by_key(side: Side, names: Sequence[str]) -> dict[Key, list[Series]]:
    table: dict[Key, list[Series]] = {}
    for series in side.series:
        table.setdefault(_key(series, names), []).append(series)
    return table


def _by_size(held: Sequence[Series]) -> dict[int | None, list[Series]]:
    found: dict[int | None, list[Series]] = {}
    for series in held:
        found.setdefault(series.size_bytes, []).append(series)
    return found


def _only(side: Side, held: Sequence[Series]) -> Series:
    """Raises ConfigError where several series of a side fit the same one of the other."""
    if len(held) > 1:
        one, twin, *_ = held
        differing = (n for n in one.fields if one.fields.get(n) != twin.fields.get(n))
        name = next(differing, "compare")
        values = f"{one.fields.get(name)} and {twin.fields.get(name)}"
        allowed = "one of them: the other side does not say which"
        raise ConfigError(name, f"{side.name} has {values}", allowed)
    return held[0]


def _about(side: Side) -> str:
    kinds = dict.fromkeys(
        " ".join(
            str(s.fields[name])
            for name in ("family", "dtype", "placement")
            if s.fields.get(name)
        )
        or ("times" if s.is_time else s.unit)
        for s in side.series
    )
    sizes = [s.size_bytes for s in side.series if s.size_bytes is not None]
    text = f"{side.name} has {', '.join(list(kinds)[:4])}"
    if sizes:
        text += f" from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    return text
