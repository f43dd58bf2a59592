"""Measure the host overhead of `stepmark comm` per call, with gloo all-reduces on two ranks.

A bare loop, `for _ in range(k): dist.all_reduce(t)`, alternates in random order with the
runner's sampling of the same calls on the same tensor and group, so that both see the same
noise. The median of the slower rank counts. `wall` is the wall time of the runner's turn,
including its decisions and gathers between batches, over that of the bare loop.

    torchrun --standalone --nproc-per-node 2 validation/comm_overhead.py --rounds 200
"""

import argparse
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from stepmark.collectives.bench import timing
from stepmark.collectives.bench.bench import DEFAULT, collect
from stepmark.ground.units import KIB, MIB, format_bytes
from stepmark.measuring.ranks import Ranks, join

SIZES = (KIB, MIB)
SAMPLE_S = 1e-3  # k calls
TURN_S = 0.1  # one batch of the runner

# A way of timing, which returns samples in seconds per call.
Way = Callable[[], list[float]]


def bare(t: torch.Tensor, k: int, num_samples: int) -> list[float]:
    seconds = []
    for _ in range(num_samples):
        start = time.perf_counter()
        for _ in range(k):
            dist.all_reduce(t)
        seconds.append((time.perf_counter() - start) / k)
    return seconds


def ours(ranks: Ranks, t: torch.Tensor, k: int, num_samples: int) -> list[float]:
    call = functools.partial(dist.all_reduce, t)
    timer = timing.HostTimer([call], ranks, k, name="queued", wait_s=0.0)
    return collect(ranks, timer, None, SAMPLE_S, DEFAULT, num_samples, num_samples).seconds


def turn(ranks: Ranks, way: Way) -> tuple[float, float]:
    """Return the slower rank's median per call, and its wall time."""
    ranks.align()
    begin = time.perf_counter()
    seconds = way()
    wall_s = time.perf_counter() - begin
    by_rank: list[tuple[float, float]] = ranks.gather((statistics.median(seconds), wall_s))
    return max(median for median, _ in by_rank), max(wall for _, wall in by_rank)


def compare(ranks: Ranks, size: int, rounds: int) -> str:
    """Return a line of medians over rounds and quartiles of the ratio within a round."""
    t = torch.zeros(size // 4)  # sums of zeros stay zero
    call_s = max(ranks.gather(statistics.median(bare(t, 1, 200))))
    k, num_samples = max(1, round(SAMPLE_S / call_s)), max(1, round(TURN_S / SAMPLE_S))
    ways: dict[str, Way] = {
        "bare": lambda: bare(t, k, num_samples),
        "ours": lambda: ours(ranks, t, k, num_samples),
    }
    order = random.Random(1)
    turns: list[dict[str, tuple[float, float]]] = []
    for _ in range(rounds + 1):
        names = order.sample(sorted(ways), 2)
        turns.append({name: turn(ranks, ways[name]) for name in names})
    del turns[0]  # warm-up
    ratios = [times["ours"][0] / times["bare"][0] for times in turns]
    low, middle, high = statistics.quantiles(ratios, n=4)
    walls = statistics.median(times["ours"][1] / times["bare"][1] for times in turns)
    medians = {name: statistics.median(times[name][0] for times in turns) for name in ways}
    return (
        f"{format_bytes(size):>8}  k {k:3}  bare {medians['bare'] * 1e6:8.2f} us"
        f"  runner {medians['ours'] * 1e6:8.2f} us"
        f"  ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})  wall {walls:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds [200]")
    arguments = parser.parse_args()
    ranks = join("cpu")
    for size in SIZES:
        line = compare(ranks, size, arguments.rounds)
        if ranks.rank == 0:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    ranks.close()


if __name__ == "__main__":
    main()
