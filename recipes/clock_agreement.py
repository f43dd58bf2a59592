"""Do three ways of timing a GEMM agree? Ours, triton's do_bench, the profiler's kernels.

All three look at the same operands in one process, in turn, several rounds, after a soak, so
that they meet the same clocks and the same power limit. Needs a GPU and triton.

    python recipes/clock_agreement.py --out agreement.json
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from stepmark.bench import clock
from stepmark.bench.operators.table import IMPLS
from stepmark.core.case import ClockName
from stepmark.core.dtypes import DType
from stepmark.core.ops import Gemm

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
# Llama-3.1-70B's five at sequence length 8192: qkv, out, gate and up, down, head.
LLAMA_70B = (
    (8192, 10240, 8192),
    (8192, 8192, 8192),
    (8192, 57344, 8192),
    (8192, 8192, 28672),
    (8192, 128256, 8192),
)
BLOCK_S = 0.06
WARM_S = 0.15


def kernel_times(
    timer: clock.Timer, samples: int, warm: Callable[[], None]
) -> tuple[float, float]:
    """Median kernel time of each call of `samples`, and the timer's own median of the same."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        warm()
        seconds = timer.sample(samples)
    times = [
        event.device_time * 1e-6
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not any(word in event.name.lower() for word in ("memset", "memcpy", "spin"))
    ]
    # What is left is one kernel a call; those before the last samples kept the device warm.
    calls = samples * timer.calls_per_sample
    times = times[-calls:]
    return statistics.median(times), statistics.median(seconds)


def compare(shape: tuple[int, int, int], rounds: int, soak_s: float) -> dict[str, object]:
    """Median seconds by each way, and by our clocks with and without a cache flush."""
    from triton.testing import do_bench  # noqa: PLC0415

    m, n, k = shape
    op = Gemm(m=m, n=n, k=k, dtype=DType.BF16)
    impl = IMPLS["gemm"]["torch"]
    device = torch.device("cuda", 0)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    num_sets = max(2, math.ceil(2 * l2 / op.memory_bytes) + 1)
    calls = [impl.make(op, device).run for _ in range(num_sets)]
    timers = {}
    for name in (ClockName.AUTO, ClockName.FLUSH, ClockName.HOT):
        timers[name], estimate = clock.choose(
            name, calls, device_type="cuda", capturable=True, l2_bytes=l2
        )
    ours = timers[ClockName.AUTO]

    def block(timer: clock.Timer) -> int:
        return max(1, min(200, int(BLOCK_S / (estimate * timer.calls_per_sample))))

    def warm(seconds: float = WARM_S) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ours.sample(block(ours))

    warm(soak_s)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        # Every way meets the device in the same state: at work for WARM_S.
        warm()
        found.setdefault("ours", []).append(statistics.median(ours.sample(block(ours))))
        warm()
        milliseconds = do_bench(
            calls[0], warmup=1, rep=int(BLOCK_S * 1e3), return_mode="median"
        )
        found.setdefault("do_bench", []).append(milliseconds * 1e-3)
        few = max(1, min(block(ours), 400 // ours.calls_per_sample))
        kernel, same = kernel_times(ours, few, warm)
        found.setdefault("kernel", []).append(kernel)
        found.setdefault("ours_profiled", []).append(same)
        for name in (ClockName.FLUSH, ClockName.HOT):
            warm()
            taken = timers[name].sample(block(timers[name]))
            found.setdefault(name, []).append(statistics.median(taken))
    row: dict[str, object] = {"shape": "x".join(map(str, shape)), "method": ours.method}
    row |= {f"{name}_us": statistics.median(values) * 1e6 for name, values in found.items()}
    row["ours_over_kernel"] = statistics.median(
        a / b for a, b in zip(found["ours"], found["kernel"], strict=True)
    )
    row["ours_over_kernel_same_launches"] = statistics.median(
        a / b for a, b in zip(found["ours_profiled"], found["kernel"], strict=True)
    )
    row["do_bench_over_kernel"] = statistics.median(
        a / b for a, b in zip(found["do_bench"], found["kernel"], strict=True)
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--soak", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for shape in [(side, side, side) for side in SIDES] + list(LLAMA_70B):
        rows.append(compare(shape, arguments.rounds, arguments.soak))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
