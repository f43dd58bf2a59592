"""Rates, phases and drift of a training record."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean, median

from stepmark.cases.flops import TokenFlops, per_token
from stepmark.cases.record import Measured, RunInfo
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Fp8, Precision, Training
from stepmark.ground.dtypes import DType
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import TFLOP
from stepmark.model.device import DeviceSpec
from stepmark.tables.columns import Row
from stepmark.tables.outcomes import LIMIT_SLACK, Ceilings, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReference:
    """Limits that a measurement is compared with."""

    run: RunInfo
    device: DeviceSpec | None
    ceilings: Ceilings


def rates(record: Measured, facts: Training, against: PeakReference) -> Row:
    """Return tokens and FLOPs per second over whole cycles, which include the optimizer."""
    case = record.train
    seconds = record.samples.seconds
    slowest = slowest_per_sample(seconds)
    cycles = len(slowest) // facts.cycle
    typical_s = median(slowest)
    row: Row = {"whole_cycles": cycles}
    if typical_s:
        typical = facts.tokens_per_sample / typical_s / case.num_ranks
        row["tokens_per_s_gpu_median"] = typical
    # Ranks may take turns at being the slowest: the sum of the slowest is no rank's time.
    total_s = max(fsum(values[: cycles * facts.cycle]) for values in seconds)
    if not total_s:
        return row
    per_gpu = facts.tokens_per_sample * facts.cycle * cycles / total_s / case.num_ranks
    row |= {"tokens_per_s_gpu": per_gpu, "tokens_per_s": per_gpu * case.num_ranks}
    return row | _flops_rates(case, per_token(case), per_gpu, against)


def _flops_rates(
    case: TrainCase, each: TokenFlops, per_gpu: float, against: PeakReference
) -> Row:
    device = against.device if case.device != "cpu" else None
    base = DType.FP32 if case.precision is Precision.FP32 else DType.BF16
    peak = device.peak(base) if device else None
    peak_fp8 = device.peak(case.dtype) if device and case.fp8 is not Fp8.NONE else None
    ceiling = against.ceilings.flops_per_s.get((case.device, case.dtype))
    palm_all = None if each.palm_all is None else each.palm_all * per_gpu
    causal = each.causal * per_gpu
    titan = each.torchtitan * per_gpu
    hfu = each.hfu * per_gpu
    return {
        "tflops": causal / TFLOP,
        "tflops_torchtitan": titan / TFLOP,
        "tflops_palm_all": None if palm_all is None else palm_all / TFLOP,
        "tflops_hfu": hfu / TFLOP,
        "peak_dtype": base.value if peak else None,
        "peak_tflops": peak / TFLOP if peak else None,
        "mfu_pct": percent(causal, peak),
        "mfu_torchtitan_pct": percent(titan, peak),
        "mfu_palm_all_pct": percent(palm_all, peak),
        "hfu_pct": percent(hfu, peak),
        "mfu_fp8_pct": percent(causal, peak_fp8),
        "ceiling_tflops": ceiling / TFLOP if ceiling else None,
        "pct_ceiling": percent(causal, ceiling),
        "over_limit": _over_limit(case, hfu, device, against.run),
    }


def _over_limit(
    case: TrainCase, executed: float, device: DeviceSpec | None, run: RunInfo
) -> bool | None:
    """Return whether FLOP/s exceed what the hardware can do; None without a known limit."""
    clocks = [info.max_sm_clock_hz for info in run.environment.devices if info.max_sm_clock_hz]
    limit = device.max_flops_per_s(case.dtype, max(clocks)) if device and clocks else None
    return None if limit is None else executed > limit * LIMIT_SLACK


PHASES = ("fwd_s", "bwd_s", "optim_s", "other_s")


def phases(record: Measured, rank: int) -> Row:
    """Return medians over the samples of a rank; the optimizer's over samples that have one.

    `other` is the rest of a sample. `data` is the time that the host waits for a batch; the
    device may have work meanwhile. Phases that cannot be separated are left out.
    """
    facts = record.training
    if facts is None:
        return {}
    row: Row = {}
    if waits := _of_rank(facts.data_s, rank):
        row |= {"data_s": median(waits), "data_max_s": max(waits)}
    if times := [value for value in _of_rank(facts.optim_s, rank) if value > 0]:
        row["optim_s"] = median(times)
    if not (split := _split(record, facts, rank)):
        return row
    fwd, bwd, _, other = split
    return row | {"fwd_s": median(fwd), "bwd_s": median(bwd), "other_s": median(other)}


def mean_phases(record: Measured, rank: int) -> dict[str, float]:
    """Return means over whole cycles, which add up to the mean sample; empty if unknown."""
    facts = record.training
    split = _split(record, facts, rank) if facts else ()
    if not facts or not split:
        return {}
    end = len(split[0]) // facts.cycle * facts.cycle
    return {
        name: fmean(values[:end] or values) for name, values in zip(PHASES, split, strict=True)
    }


def _split(record: Measured, facts: Training, rank: int) -> tuple[Sequence[float], ...]:
    """Return seconds of each sample by phase, in the order of PHASES; empty if unknown."""
    seconds = record.samples.seconds[rank]
    timed = [_of_rank(each, rank) for each in (facts.fwd_s, facts.bwd_s, facts.optim_s)]
    if not seconds or any(len(values) != len(seconds) for values in timed):
        return ()
    other = [sample_s - sum(parts) for sample_s, *parts in zip(seconds, *timed, strict=True)]
    return (*timed, other)


def _of_rank(by_rank: Sequence[Sequence[float]], rank: int) -> Sequence[float]:
    return by_rank[rank] if rank < len(by_rank) else ()


# Fewer values cannot show a trend; more are averaged to limit the number of pairs.
LEAST = 8
MOST = 64
# Standard deviations of the trend statistic, and the smallest change that is reported.
SURE = 3.0
WORTH = 0.01


def drift(seconds: Sequence[float], cycle: int = 1) -> float | None:
    """Return the median of the second half over the first's, minus 1; None without a trend.

    Mann's test (H. B. Mann, "Nonparametric tests against trend", Econometrica 13(3), 1945)
    over means of whole cycles: is a later one above an earlier one more often than by chance?
    """
    means = means_of(seconds, cycle)
    if len(means) > MOST:
        means = means_of(means, math.ceil(len(means) / MOST))
    count = len(means)
    if count < LEAST:
        return None
    score = sum(
        (later > earlier) - (later < earlier)
        for index, earlier in enumerate(means)
        for later in means[index + 1 :]
    )
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    change = median(means[count // 2 :]) / median(means[: count // 2]) - 1
    sure = abs(score) > SURE * deviation and change * score > 0
    return change if sure and abs(change) > WORTH else None


def means_of(values: Sequence[float], size: int) -> list[float]:
    """Return means of whole groups of this size."""
    end = len(values) // size * size
    return [fmean(values[first : first + size]) for first in range(0, end, size)]
