"""Records to flat rows: the one place where rates, shares of a peak and bounds are derived.

A row is one dict per (record, label); a record without labels gives one. `rank` is None in
the row that stands for all ranks (the slowest of them in each sample). With several ranks,
one row per rank follows it, so that a slow device stands out in `vs_median_rank`.

Over 250 lines: the columns and their derivation are one table's business.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from stepmark.core.case import SOAK_S, Label, OpCase, Rate
from stepmark.core.device import DeviceSpec
from stepmark.core.dtypes import DType
from stepmark.core.ops import Bmm, Copy, EmbeddingBag, Gemm, GroupedGemm, Op, Phase
from stepmark.core.record import Failed, Measured, Record, RunInfo, Skipped
from stepmark.core.stats import slowest_per_sample, summarize
from stepmark.core.units import GB, TFLOP

Row = dict[str, object]

# A figure may exceed a data sheet's rounding, not its hardware.
LIMIT_SLACK = 1.01
MATMULS = (Gemm, Bmm, GroupedGemm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best rates this run itself reached, by device: what stands in for unknown peaks."""

    flops_per_s: Mapping[tuple[str, DType], float] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Yardstick:
    """What a measurement is held against."""

    run: RunInfo
    device: DeviceSpec | None
    ceilings: Ceilings
    reference: Mapping[str, float]


def rows(
    records: Iterable[Record],
    run: RunInfo,
    *,
    device: DeviceSpec | None = None,
    reference: Mapping[str, float] | None = None,
) -> list[Row]:
    """Operators: one flat row per (record, label), and per rank where there are several."""
    held = [record for record in records if isinstance(record.case, OpCase)]
    ceilings = measured_ceilings(held)
    table: list[Row] = []
    for record in held:
        against = _Yardstick(
            run=run,
            device=device if record.operator.device != "cpu" else None,
            ceilings=ceilings,
            reference=reference or {},
        )
        for derived in _per_rank(record, against):
            for label in record.operator.labels or (Label(),):
                table.append(_identity(record.operator, label, run) | derived)
    return table


def measured_ceilings(records: Iterable[Record]) -> Ceilings:
    """Best matmul rate by dtype and best copy bandwidth; wrong results do not count."""
    flops_per_s: dict[tuple[str, DType], float] = {}
    bytes_per_s: dict[str, float] = {}
    for record in records:
        if not isinstance(record, Measured) or record.num_wrong or not record.samples.seconds:
            continue
        op, place = record.operator.op, record.operator.device
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        if isinstance(op, MATMULS):
            key = (place, op.dtype)
            flops_per_s[key] = max(flops_per_s.get(key, 0.0), op.flops / time_s)
        elif isinstance(op, Copy):
            rate = op.bytes_moved / time_s
            bytes_per_s[place] = max(bytes_per_s.get(place, 0.0), rate)
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def number(row: Row, key: str) -> float | None:
    """A numeric cell, or None where it is unknown."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def text(row: Row, key: str) -> str:
    """A cell as text; empty where it is unknown."""
    value = row.get(key)
    return "" if value is None else str(value)


def shape_text(op: Op) -> str:
    """The cell of the column `shape`."""
    return op.shape_text


def _identity(case: OpCase, label: Label, run: RunInfo) -> Row:
    """What was asked: all that does not depend on the outcome."""
    phase: Phase | None = getattr(case.op, "phase", None) or label.phase
    layout = getattr(case.op, "layout", None)
    return {
        "family": case.family,
        "model": label.model or None,
        "role": label.role or None,
        "pass": phase.value if phase else None,
        "shape": shape_text(case.op),
        "layout": layout.value if layout else None,
        "dtype": case.dtype.value,
        "backend": case.backend,
        "device": case.device,
        "num_ranks": case.num_ranks,
        "count": label.count,
        "mbs": label.mbs,
        "scale": case.scale or None,
        "flops": case.op.flops,
        "bytes_moved": case.op.bytes_moved,
        "arithmetic_intensity": _ratio(case.op.flops, case.op.bytes_moved) or None,
        "case_id": case.case_id,
        "run_id": run.run_id,
        "command": case.command(),
    }


# Columns that only a measurement fills; every row has all of them.
_UNMEASURED: Row = dict.fromkeys(
    (
        *(
            "backend_run",
            "rank",
            "time_s",
            "mean_s",
            "p10_s",
            "p90_s",
            "spread_pct",
            "n",
            "vs_median_rank",
            "tflops",
        ),
        *("gb_per_s", "pct_peak", "pct_hbm", "ceiling", "ceiling_unit", "pct_ceiling", "bound"),
        *("max_rel_err", "num_wrong", "clock_mhz", "power_w", "throttle", "method"),
        *("pct_reference", "over_limit", "message"),
    )
)


def _per_rank(record: Record, against: _Yardstick) -> Iterator[Row]:
    """The outcome of a record: of all ranks together, then of each."""
    rate = record.operator.rate.value
    match record:
        case Skipped():
            message = record.reason
            yield _UNMEASURED | {"status": "skipped", "rate": rate, "message": message}
        case Failed():
            message = f"{record.cause}: {record.message}"
            yield _UNMEASURED | {"status": "failed", "rate": rate, "message": message}
        case Measured():
            seconds = record.samples.seconds
            if not seconds:
                message = f"samples in {record.samples.file or 'no file'}"
                yield _UNMEASURED | {"status": "measured", "rate": rate, "message": message}
                return
            several = len(seconds) > 1
            for rank in (None, *range(len(seconds))) if several else (None,):
                row = _UNMEASURED | _outcome(record, rank, against.reference)
                yield row | _derived(record, number(row, "time_s"), rank, against)


def _outcome(record: Measured, rank: int | None, reference: Mapping[str, float]) -> Row:
    """Times, correctness and device state; no rates yet."""
    samples, case = record.samples, record.operator
    medians = [summarize(values).median for values in samples.seconds]
    own = slowest_per_sample(samples.seconds) if rank is None else samples.seconds[rank]
    times = summarize(own)
    checks = record.checks if rank is None else record.checks[rank : rank + 1]
    num_wrong = sum(check.num_wrong for check in checks) if checks else None
    known_s = reference.get(case.case_id)
    return {
        "rank": rank,
        "status": "wrong" if num_wrong else "measured",
        "backend_run": record.backend_run or None,
        "time_s": times.median,
        "mean_s": times.mean,
        "p10_s": times.p10,
        "p90_s": times.p90,
        "spread_pct": (times.p90 - times.p10) / 2 / times.median * 100 if times.n > 1 else None,
        "n": times.n,
        "vs_median_rank": None if rank is None else _ratio(medians[rank], median(medians)),
        "max_rel_err": max((check.max_rel_err for check in checks), default=None),
        "num_wrong": num_wrong,
        "rate": _rate_text(case.rate, samples.soak_s),
        "method": samples.method,
        "pct_reference": None if known_s is None else _percent(known_s, times.median),
        **_device_state(record, medians.index(max(medians)) if rank is None else rank, rank),
    }


def _device_state(record: Measured, shown: int, rank: int | None) -> Row:
    """Clock and power of the shown (for all ranks: the slowest) rank; throttling of any."""
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


def _rate_text(rate: Rate, soak_s: float) -> str:
    if rate is Rate.SUSTAINED and soak_s < SOAK_S:
        # Not called sustained: the device may still be cooler than a long job would have it.
        return f"short soak {soak_s:.1f} s"
    return rate.value


def _derived(
    record: Measured, time_s: float | None, rank: int | None, against: _Yardstick
) -> Row:
    """Rates, their share of a peak or ceiling, and what bounds them."""
    op, place = record.operator.op, record.operator.device
    device, ceilings = against.device, against.ceilings
    if not time_s:
        return {}
    flops_per_s, bytes_per_s = op.flops / time_s, op.bytes_moved / time_s
    peak = device.peak(op.dtype) if device else None
    hbm = device.hbm_bytes_per_s if device else None
    best_flops = ceilings.flops_per_s.get((place, op.dtype))
    best_bytes = ceilings.bytes_per_s.get(place)
    bound = _bound(op, peak or best_flops, hbm or best_bytes)
    by_memory = bound == "memory" or not op.flops
    ceiling = best_bytes if by_memory else best_flops
    reached, unit = (bytes_per_s, GB) if by_memory else (flops_per_s, TFLOP)
    return {
        "tflops": flops_per_s / TFLOP if op.flops else None,
        "gb_per_s": bytes_per_s / GB,
        "pct_peak": _percent(flops_per_s, peak) if op.flops else None,
        "pct_hbm": _percent(bytes_per_s, hbm),
        "ceiling": ceiling / unit if ceiling else None,
        "ceiling_unit": ("GB/s" if by_memory else "TFLOP/s") if ceiling else None,
        "pct_ceiling": _percent(reached, ceiling),
        "bound": bound,
        "over_limit": _over_limit(record, time_s, rank, against),
    }


def _bound(op: Op, peak: float | None, hbm: float | None) -> str | None:
    if not op.flops:
        return "memory"
    if not peak or not hbm:
        return None
    return "compute" if op.flops / peak >= op.bytes_moved / hbm else "memory"


def _over_limit(
    record: Measured, time_s: float, rank: int | None, against: _Yardstick
) -> bool | None:
    """Whether a rate is above what the hardware can do; None where no limit is known.

    Indices from a Zipf distribution are served by caches, so HBM does not bind them.
    """
    device = against.device
    if device is None:
        return None
    op = record.operator.op
    verdicts: list[bool] = []
    clocks = [
        found.max_sm_clock_hz
        for found in against.run.environment.devices
        if found.max_sm_clock_hz and rank in (None, found.rank)
    ]
    limit = device.max_flops_per_s(op.dtype, max(clocks)) if clocks else None
    if limit:
        verdicts.append(op.flops / time_s > limit * LIMIT_SLACK)
    touched = min(op.memory_bytes, op.bytes_moved) * record.samples.num_sets
    cached = isinstance(op, EmbeddingBag) and op.alpha > 0
    cache_bytes, hbm = device.last_level_cache_bytes, device.hbm_bytes_per_s
    if hbm and cache_bytes and not cached:
        above = op.bytes_moved / time_s > hbm * LIMIT_SLACK
        verdicts.append(above and touched > 4 * cache_bytes)
    return any(verdicts) if verdicts else None


def _ratio(value: float, base: float | None) -> float | None:
    return value / base if base else None


def _percent(value: float, base: float | None) -> float | None:
    return 100 * value / base if base else None
