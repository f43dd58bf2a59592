"""Measure what the telemetry of a case costs it: the same calls with and without the sampler.

Both ways take turns in random order on the same operands and with the same clock, after a soak,
so that they see the same state of the device. A turn's mean counts, because a reading every
20 ms delays few samples, which a median leaves out. The cost is the ratio of the two means of a
round: its median over rounds, with the 95 % interval of the median.

    python validation/telemetry_cost.py --out telemetry_cost.json
    python validation/telemetry_cost.py --device cpu --rounds 8
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from stepmark.cases.case import ClockName
from stepmark.ground.dtypes import DType
from stepmark.ground.stats import median_interval
from stepmark.ground.units import format_time
from stepmark.measuring import clock
from stepmark.measuring.clock import Effort
from stepmark.measuring.context import MeasureContext, make_context, no_collection, own_stream
from stepmark.measuring.telemetry import Sampler
from stepmark.model.ops import FAMILY_OF, Copy, Gemm, Op
from stepmark.operators.bench import IMPLS

# By device: a device that is busy, its memory, and kernels for which the host must keep up.
CASES: dict[str, tuple[tuple[Op, ClockName], ...]] = {
    "cuda": (
        (Gemm(m=8192, n=8192, k=8192, dtype=DType.BF16), ClockName.ROTATE),
        (Copy(num_bytes=2**28), ClockName.ROTATE),
        (Gemm(m=512, n=512, k=512, dtype=DType.BF16), ClockName.GRAPH),
        (Gemm(m=512, n=512, k=512, dtype=DType.BF16), ClockName.ROTATE),
    ),
    "cpu": (
        (Gemm(m=512, n=512, k=512, dtype=DType.FP32), ClockName.HOST),
        (Copy(num_bytes=2**26), ClockName.HOST),
    ),
}
NUM_SETS = 16
BATCH_S = 0.1  # as the runner's


def turn(
    timer: clock.Timer, num_samples: int, turn_s: float, sampler: Sampler | None
) -> tuple[float, int]:
    """Return the mean seconds per call of a turn, and the number of telemetry readings."""
    seconds: list[float] = []
    with sampler or contextlib.nullcontext():
        end = time.monotonic() + turn_s
        while time.monotonic() < end:
            seconds += timer.sample(num_samples)
    return statistics.fmean(seconds), sampler.telemetry().num_readings if sampler else 0


def compare(
    op: Op, name: ClockName, context: MeasureContext, rounds: int, turn_s: float
) -> dict[str, object]:
    """Return the ratio of means with and without telemetry over rounds."""
    device = context.ranks.device
    impl = IMPLS[FAMILY_OF[type(op)]]["torch"]
    calls = [impl.make(op, device).run for _ in range(NUM_SETS)]
    call_s, launch_s = clock.estimate(calls, device.type)
    timer = clock.choose(
        name,
        calls,
        call_s=call_s,
        launch_s=launch_s,
        device_type=device.type,
        capturable=impl.capturable,
        l2_bytes=context.cache_bytes,
    )
    num_samples = max(1, round(BATCH_S / (call_s * timer.calls_per_sample)))
    turn(timer, num_samples, Effort().soak_s if device.type == "cuda" else turn_s, None)
    order, ratios, without_s, num_readings = random.Random(1), [], [], 0
    with no_collection():
        for _ in range(rounds):
            means: dict[bool, float] = {}
            for is_sampled in order.sample((False, True), 2):
                sampler = Sampler(context.device_index) if is_sampled else None
                means[is_sampled], count = turn(timer, num_samples, turn_s, sampler)
                num_readings += count
            ratios.append(means[True] / means[False])
            without_s.append(means[False])
    low, high = median_interval(sorted(ratios))
    return {
        "operator": f"{FAMILY_OF[type(op)]} {op.shape_text}",
        "method": timer.method,
        "without_s": statistics.median(without_s),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "rounds": rounds,
        "readings_per_s": num_readings / (rounds * turn_s),
    }


def line(row: dict[str, object]) -> str:
    without_s, ratio, low, high = (
        float(str(row[key])) for key in ("without_s", "ratio", "ratio_low", "ratio_high")
    )
    percents = [f"{100 * (value - 1):+.3f}" for value in (ratio, low, high)]
    return (
        f"{row['operator']:<28}{row['method']:<17}{format_time(without_s):>10}  "
        f"with telemetry {percents[0]} % (95 %: {percents[1]} to {percents[2]}), "
        f"{float(str(row['readings_per_s'])):.0f} readings/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=CASES, default="cuda", help="[cuda]")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way [40]")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a turn [0.3]")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    context = make_context(arguments.device)
    rows = []
    for op, name in CASES[arguments.device]:
        with own_stream(context):
            rows.append(compare(op, name, context, arguments.rounds, arguments.turn))
        sys.stdout.write(line(rows[-1]) + "\n")
        sys.stdout.flush()
    if arguments.out:
        device = arguments.device
        card = torch.cuda.get_device_name() if device == "cuda" else device
        arguments.out.write_text(json.dumps({"device": card, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
