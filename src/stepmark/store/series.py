"""Records of a run to series: what was measured, how, and the times of each launch."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from stepmark.core.case import OpCase
from stepmark.core.comm_case import CommCase
from stepmark.core.comparison import Fields, Series
from stepmark.core.record import Measured, Record, RunInfo
from stepmark.core.stats import slowest_per_sample
from stepmark.core.train_case import TrainCase
from stepmark.core.training import DataParallel, Recompute

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
