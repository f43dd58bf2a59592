"""Tokens and FLOPs per second of a training record, and their share of a peak."""

from dataclasses import dataclass
from math import fsum
from statistics import median

from stepmark.core.columns import Row
from stepmark.core.device import DeviceSpec
from stepmark.core.dtypes import DType
from stepmark.core.flops import TokenFlops, per_token
from stepmark.core.record import Measured, RunInfo
from stepmark.core.stats import slowest_per_sample
from stepmark.core.train_case import TrainCase
from stepmark.core.training import Fp8, Precision, Training
from stepmark.core.units import TFLOP
from stepmark.report.outcomes import LIMIT_SLACK, Ceilings


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a measurement is held against."""

    run: RunInfo
    device: DeviceSpec | None
    ceilings: Ceilings


def rates(record: Measured, told: Training, against: Yardstick) -> Row:
    """Tokens and FLOPs per second, over whole cycles, so that the optimizer has its share."""
    case, seconds = record.train, record.samples.seconds
    slowest = slowest_per_sample(seconds)
    cycles = len(slowest) // told.cycle
    typical_s = median(slowest)
    row: Row = {"whole_cycles": cycles}
    if typical_s:
        typical = told.tokens_per_sample / typical_s / case.num_ranks
        row["tokens_per_s_gpu_median"] = typical
    # Ranks may take turns at being the slowest: a sum over these would be nobody's time.
    total_s = max(fsum(values[: cycles * told.cycle]) for values in seconds)
    if not total_s:
        return row
    per_gpu = told.tokens_per_sample * told.cycle * cycles / total_s / case.num_ranks
    row |= {"tokens_per_s_gpu": per_gpu, "tokens_per_s": per_gpu * case.num_ranks}
    return row | _flops_rates(case, per_token(case), per_gpu, against)


def _flops_rates(case: TrainCase, each: TokenFlops, per_gpu: float, against: Yardstick) -> Row:
    device = against.device if case.device != "cpu" else None
    base = DType.FP32 if case.precision is Precision.FP32 else DType.BF16
    peak = device.peak(base) if device else None
    peak_fp8 = device.peak(case.dtype) if device and case.fp8 is not Fp8.NONE else None
    ceiling = against.ceilings.flops_per_s.get((case.device, case.dtype))
    palm_all = None if each.palm_all is None else each.palm_all * per_gpu
    causal, titan, hfu = (each.causal * per_gpu, each.torchtitan * per_gpu, each.hfu * per_gpu)
    return {
        "tflops": causal / TFLOP,
        "tflops_torchtitan": titan / TFLOP,
        "tflops_palm_all": None if palm_all is None else palm_all / TFLOP,
        "tflops_hfu": hfu / TFLOP,
        "peak_dtype": base.value if peak else None,
        "peak_tflops": peak / TFLOP if peak else None,
        "mfu_pct": _percent(causal, peak),
        "mfu_torchtitan_pct": _percent(titan, peak),
        "mfu_palm_all_pct": _percent(palm_all, peak),
        "hfu_pct": _percent(hfu, peak),
        "mfu_fp8_pct": _percent(causal, peak_fp8),
        "ceiling_tflops": ceiling / TFLOP if ceiling else None,
        "pct_ceiling": _percent(causal, ceiling),
        "over_limit": _over_limit(case, hfu, device, against.run),
    }


def _over_limit(
    case: TrainCase, executed: float, device: DeviceSpec | None, run: RunInfo
) -> bool | None:
    """Whether more is executed than the hardware can; None where no limit is known."""
    clocks = [one.max_sm_clock_hz for one in run.environment.devices if one.max_sm_clock_hz]
    limit = device.max_flops_per_s(case.dtype, max(clocks)) if device and clocks else None
    return None if limit is None else executed > limit * LIMIT_SLACK


def _percent(value: float | None, base: float | None) -> float | None:
    return 100 * value / base if value is not None and base else None
