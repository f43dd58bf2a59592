"""Records of training to flat rows: rates in named conventions, phases, memory, the slow rank.

One row per record; `per_rank_rows` has one per rank of it. Times are of the slowest rank of
each sample; phases, clock and power of the rank that is slowest over all samples.
"""

from collections.abc import Iterable, Sequence
from math import isfinite, sqrt
from statistics import median

from stepmark.core.case import OpCase
from stepmark.core.device import DeviceSpec
from stepmark.core.flops import per_token
from stepmark.core.record import Failed, Measured, Record, RunInfo, Skipped
from stepmark.core.stats import slowest_per_sample, summarize
from stepmark.core.train_case import TrainCase
from stepmark.core.training import Training
from stepmark.core.units import GIB
from stepmark.report.tables import Row, measured_ceilings
from stepmark.report.training_drift import drift
from stepmark.report.training_phases import phases
from stepmark.report.training_rates import Yardstick, rates
from stepmark.report.training_words import (
    compile_text,
    fp8_text,
    recompute_text,
    shape_text,
    techniques,
)


def rows(
    records: Sequence[Record], run: RunInfo, device: DeviceSpec | None = None
) -> list[Row]:
    """One flat row per record of training. Operators of the run give the measured ceiling."""
    ceilings = measured_ceilings(one for one in records if isinstance(one.case, OpCase))
    against = Yardstick(run=run, device=device, ceilings=ceilings)
    held = [one for one in records if isinstance(one.case, TrainCase)]
    return [_identity(one, run) | _UNMEASURED | _outcome(one, against) for one in held]


def per_rank_rows(records: Iterable[Record], run: RunInfo) -> list[Row]:
    """One row per record and rank, of what ran."""
    return [
        _identity(record, run) | _of_rank(record, rank)
        for record in records
        if isinstance(record.case, TrainCase)
        and isinstance(record, Measured)
        and record.samples.seconds
        for rank in range(len(record.samples.seconds))
    ]


def _identity(record: Record, run: RunInfo) -> Row:
    """What was asked: all that does not depend on the outcome."""
    case = record.train
    found = per_token(case)
    return {
        "family": case.family,
        "model": case.model.name,
        "shape": shape_text(case),
        "strategy": case.strategy,
        "num_ranks": case.num_ranks,
        "mbs": case.mbs,
        "seq_len": case.model.seq_len,
        "schedule": case.schedule.value,
        "grad_accum": case.grad_accum,
        "techniques": techniques(case),
        "precision": case.precision.value,
        "fp8": fp8_text(case),
        "compile": compile_text(case),
        "recompute": recompute_text(case),
        "dtype": case.dtype.value,
        "backend": case.backend,
        "device": case.device,
        "data": case.data,
        "scale": case.scale or None,
        "flops_per_token": found.causal,
        "flops_per_token_torchtitan": found.torchtitan,
        "flops_per_token_palm_all": found.palm_all,
        "flops_per_token_hfu": found.hfu,
        "launch": record.launch,
        "case_id": record.case.case_id,
        "run_id": run.run_id,
        "command": record.case.command(),
    }


# Columns that only a measurement fills; every row has all of them.
_UNMEASURED: Row = dict.fromkeys(
    (
        *("rank", "time_s", "mean_s", "p10_s", "p90_s", "min_s", "max_s", "spread_pct", "n"),
        *("tokens_per_s_gpu", "tokens_per_s", "tokens_per_s_gpu_median", "whole_cycles"),
        *("cycle", "tflops", "tflops_torchtitan", "tflops_palm_all", "tflops_hfu"),
        *("peak_dtype", "peak_tflops", "mfu_pct", "mfu_torchtitan_pct", "mfu_palm_all_pct"),
        *("hfu_pct", "mfu_fp8_pct", "ceiling_tflops", "pct_ceiling"),
        *("fwd_s", "bwd_s", "optim_s", "other_s", "data_s", "data_max_s"),
        *("allocated_gib", "reserved_gib", "memory_gib", "alloc_retries"),
        *("clock_mhz", "power_w", "throttle", "loss_first", "loss_last", "num_wrong"),
        *("loss_falls", "interrupted"),
        *("warmup_samples", "drift_pct", "build_s", "first_s", "recompiles", "graph_breaks"),
        *(
            "slowest_rank",
            "vs_median_rank",
            "is_straggler",
            "slow_fwd_rank",
            "fwd_vs_median_rank",
        ),
        *("num_params", "attention_run", "backend_run", "data_run", "method", "over_limit"),
        *("message",),
    )
)


def _outcome(record: Record, against: Yardstick) -> Row:
    match record:
        case Skipped():
            return {"status": "skipped", "message": record.reason}
        case Failed():
            return {"status": "failed", "message": f"{record.cause}: {record.message}"}
        case Measured():
            return _measured(record, against)


def _measured(record: Measured, against: Yardstick) -> Row:
    num_wrong = record.num_wrong if record.checks else None
    row: Row = {"status": "wrong" if num_wrong else "measured", "num_wrong": num_wrong}
    row |= {"method": record.samples.method, "backend_run": record.backend_run or None}
    seconds = record.samples.seconds
    if not seconds or not seconds[0]:
        return row | {"message": f"samples in {record.samples.file or 'no file'}"}
    medians = [summarize(values).median for values in seconds]
    slowest = medians.index(max(medians))
    row |= _times(slowest_per_sample(seconds)) | _device_state(record, slowest)
    if len(seconds) > 1:
        row |= {
            "slowest_rank": slowest,
            "vs_median_rank": _ratio(medians, slowest),
            "is_straggler": _is_often_last(seconds, slowest),
        }
    if record.training:
        row |= _told(
            record.training,
            against.run,
            wrong=bool(num_wrong) and record.train.data != "random",
        ) | phases(record, slowest)
        row |= _slow_forward(record.training) | _drift(record, record.training)
        row |= rates(record, record.training, against)
    return row


def _times(slowest: Sequence[float]) -> Row:
    found = summarize(slowest)
    spread = (found.p90 - found.p10) / 2 / found.median * 100 if found.n > 1 else None
    return {
        "time_s": found.median,
        "mean_s": found.mean,
        "p10_s": found.p10,
        "p90_s": found.p90,
        "min_s": found.min,
        "max_s": found.max,
        "spread_pct": spread,
        "n": found.n,
    }


def _ratio(values: Sequence[float], index: int) -> float | None:
    middle = median(values)
    return values[index] / middle if middle else None


def _device_state(record: Measured, shown: int, rank: int | None = None) -> Row:
    """Clock and power of one rank; throttling of any, or of `rank` alone."""
    if shown >= len(record.telemetry):
        return {}
    state = record.telemetry[shown]
    seen = record.telemetry if rank is None else (state,)
    reasons = sorted({reason for one in seen for reason in one.throttle})
    return {
        "clock_mhz": None if state.sm_clock_hz is None else state.sm_clock_hz / 1e6,
        "power_w": state.power_w,
        "throttle": ", ".join(reasons) or None,
    }


def _told(told: Training, run: RunInfo, *, wrong: bool) -> Row:
    """What needs no arithmetic; memory of the rank with most of it."""
    sizes = [one.memory_bytes for one in run.environment.devices if one.memory_bytes]
    return {
        "allocated_gib": _gib(told.allocated_bytes),
        "reserved_gib": _gib(told.reserved_bytes),
        "memory_gib": min(sizes) / GIB if sizes and told.reserved_bytes else None,
        "alloc_retries": sum(told.alloc_retries) if told.alloc_retries else None,
        "loss_falls": False if wrong and all(map(isfinite, told.loss)) else None,
        "interrupted": told.interrupted or None,
        "loss_first": told.loss[0] if told.loss else None,
        "loss_last": told.loss[-1] if told.loss else None,
        "warmup_samples": len(told.warmup_s[0]) if told.warmup_s else 0,
        "cycle": told.cycle,
        "build_s": told.build_s or None,
        "first_s": told.first_s or None,
        "recompiles": told.recompiles,
        "graph_breaks": told.graph_breaks,
        "num_params": told.num_params,
        "attention_run": told.attention_run or None,
        "data_run": told.data or None,
        **({"compile_failed": told.compile_failed} if told.compile_failed else {}),
    }


def _gib(by_rank: Sequence[int | None]) -> float | None:
    known = [value for value in by_rank if value is not None]
    return max(known) / GIB if known else None


def _drift(record: Measured, told: Training) -> Row:
    found = drift(slowest_per_sample(record.samples.seconds), told.cycle)
    return {"drift_pct": None if found is None else 100 * found}


def _slow_forward(told: Training) -> Row:
    """The rank with the longest forward pass: where gradients are reduced, others then wait.

    None where it is not the slowest of a sample more often than by chance: three standard
    deviations of a binomial.
    """
    if len(told.fwd_s) < 2 or not all(told.fwd_s):
        return {}
    medians = [median(values) for values in told.fwd_s]
    slow = medians.index(max(medians))
    if not _is_often_last(told.fwd_s, slow):
        return {}
    return {"slow_fwd_rank": slow, "fwd_vs_median_rank": _ratio(medians, slow)}


def _is_often_last(seconds: Sequence[Sequence[float]], rank: int) -> bool:
    """Whether this rank takes longest more often than by chance."""
    columns = list(zip(*seconds, strict=True))
    count = sum(column[rank] == max(column) for column in columns)
    n, p = len(columns), 1 / len(seconds)
    return bool(count > n * p + 3 * sqrt(n * p * (1 - p)))


def _of_rank(record: Measured, rank: int) -> Row:
    """One rank's share of the outcome."""
    seconds, told = record.samples.seconds, record.training
    medians = [summarize(values).median if values else 0.0 for values in seconds]
    checks = record.checks[rank : rank + 1]
    row = _times(seconds[rank]) if seconds[rank] else {"time_s": None, "n": 0}
    row |= {
        "rank": rank,
        "status": "wrong" if record.num_wrong else "measured",
        "vs_median_rank": _ratio(medians, rank),
        "num_wrong": sum(check.num_wrong for check in checks) if checks else None,
        "over_limit": None,
        **_device_state(record, rank, rank),
    }
    if told is None:
        return row
    return (
        row
        | phases(record, rank)
        | {
            "allocated_gib": _gib(told.allocated_bytes[rank : rank + 1]),
            "reserved_gib": _gib(told.reserved_bytes[rank : rank + 1]),
            "alloc_retries": next(iter(told.alloc_retries[rank : rank + 1]), None),
        }
    )
