"""Compare three ways of timing a GEMM: stepmark's clock, triton's do_bench, the profiler.

All three time the same operands in one process, alternately, in several rounds after a soak, so
that they run at the same clocks and power limit. A GPU and triton are required.

    python validation/clock_agreement.py --out agreement.json
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
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stepmark.cases.case import ClockName
from stepmark.ground.dtypes import DType
from stepmark.measuring import clock
from stepmark.model.ops import Gemm
from stepmark.operators.bench import IMPLS

SIDES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
# The five products of Llama-3.1-70B at sequence length 8192: qkv, out, gate and up, down, head.
LLAMA_70B = (
    (8192, 10240, 8192),
    (8192, 8192, 8192),
    (8192, 57344, 8192),
    (8192, 8192, 28672),
    (8192, 128256, 8192),
)
BLOCK_S = 0.06
WARM_S = 0.15


def profiled(warm: Callable[[], None], timed: Callable[[], float]) -> tuple[float, float]:
    """Return the time that `timed` reports and the profiler's median of the same launches."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        # Few launches: a profiler keeps every kernel, and there are thousands of short ones.
        warm()
        torch.cuda.synchronize()
        marker = torch.empty(1, device="cuda").cos_()
        reported = timed()
        torch.cuda.synchronize()
    del marker
    kernels = [e for e in recorded.events() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    last = max(i for i, event in enumerate(kernels) if "cos" in event.name)
    # The rest is one GEMM kernel per call, and flushes and spins, which do not count.
    times = [e.device_time * 1e-6 for e in kernels[last + 1 :] if is_gemm(e.name)]
    return reported, statistics.median(times)


def is_gemm(name: str) -> bool:
    return any(word in name.lower() for word in ("gemm", "nvjet", "cutlass", "xmma"))


def compare(shape: tuple[int, int, int], rounds: int, soak_s: float) -> dict[str, object]:
    """Return median seconds by each way, and by our clocks with and without a cache flush."""
    from triton.testing import do_bench  # noqa: PLC0415

    m, n, k = shape
    op = Gemm(m=m, n=n, k=k, dtype=DType.BF16)
    impl = IMPLS["gemm"]["torch"]
    device = torch.device("cuda", 0)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    num_sets = max(2, math.ceil(2 * l2 / op.memory_bytes) + 1)
    calls = [impl.make(op, device).run for _ in range(num_sets)]
    call_s, launch_s = clock.estimate(calls, "cuda")
    timers = {
        name: clock.choose(
            name,
            calls,
            call_s=call_s,
            launch_s=launch_s,
            device_type="cuda",
            capturable=True,
            l2_bytes=l2,
        )
        for name in (ClockName.AUTO, ClockName.FLUSH, ClockName.HOT)
    }
    ours = timers[ClockName.AUTO]

    def block(timer: clock.Timer) -> int:
        return max(1, min(200, int(BLOCK_S / (call_s * timer.calls_per_sample))))

    def median_of(timer: clock.Timer) -> float:
        return statistics.median(timer.sample(block(timer)))

    def by_triton() -> float:
        repeat = int(BLOCK_S * 1e3)
        return float(do_bench(calls[0], warmup=1, rep=repeat, return_mode="median")) * 1e-3

    def warm(seconds: float = WARM_S) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ours.sample(block(ours))

    warm(soak_s)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for _ in range(rounds):
        # Before each way the device has been busy for WARM_S, so its state is the same.
        for clock_name, timer in timers.items():
            warm()
            note(clock_name, median_of(timer))
        warm()
        note("do_bench", by_triton())
        for name, timed in (("ours", lambda: median_of(ours)), ("do_bench", by_triton)):
            reported, kernel = profiled(lambda: warm(min(WARM_S, 2000 * call_s)), timed)
            note(f"{name}_kernel", kernel)
            note(f"{name}_over_its_kernel", reported / kernel)
    row: dict[str, object] = {"shape": "x".join(map(str, shape)), "method": ours.method}
    for name, values in times.items():
        value = statistics.median(values)
        row |= {name: value} if "over" in name else {f"{name}_us": value * 1e6}
    pairs = zip(times[ClockName.AUTO], times["ours_kernel"], strict=True)
    row["auto_over_kernel"] = statistics.median(a / b for a, b in pairs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all ways [9]")
    parser.add_argument(
        "--soak", type=float, default=1.0, help="seconds before the first round [1]"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rows = []
    for shape in [(side, side, side) for side in SIDES] + list(LLAMA_70B):
        with torch.cuda.stream(torch.cuda.Stream()):
            rows.append(compare(shape, arguments.rounds, arguments.soak))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
