"""Count wrong verdicts of `stepmark compare` on simulated pairs and on resampled launches.

    python recipes/verdicts.py                      # simulation, fixed seeds
    python recipes/verdicts.py RUN [RUN ...]        # runs with many launches of the same cases

Two equal sides must almost never be called different, and a difference of 3 % must be
detected. Real launches are shuffled and assigned to two sides of eight, so both sides are the
same machine; for the second column the times of one side are divided by 1.03. The last columns
use percentiles of a bootstrap over launches instead of Student's t.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from stepmark.core.ratio import CONFIDENCE, EFFECT_FLOOR, Verdict, ratio
from stepmark.core.record import Measured
from stepmark.core.stats import slowest_per_sample
from stepmark.store.reader import latest, read_records

PAIRS = 5000
CHANGE = 1.03
Draw = Callable[[random.Random], tuple[list[float], list[float]]]


def simulated(launches: int, sd: float, samples: int) -> Draw:
    """Draw medians of lognormal samples with cv 2 %, for launches with this sd."""

    def centre(draw: random.Random) -> float:
        launch = math.exp(draw.gauss(0, sd))
        return launch * median(math.exp(draw.gauss(0, 0.02)) for _ in range(samples))

    def deal(draw: random.Random) -> tuple[list[float], list[float]]:
        return [centre(draw) for _ in range(launches)], [centre(draw) for _ in range(launches)]

    return deal


def dealt(centres: Sequence[float], launches: int) -> Draw:
    """Draw two sides from real launches without replacement."""

    def deal(draw: random.Random) -> tuple[list[float], list[float]]:
        chosen = draw.sample(list(centres), 2 * launches)
        return chosen[:launches], chosen[launches:]

    return deal


def by_t(a: Sequence[float], b: Sequence[float]) -> bool:
    return ratio(a, b).verdict in (Verdict.FASTER, Verdict.SLOWER)


def by_bootstrap(a: Sequence[float], b: Sequence[float], draw: np.random.Generator) -> bool:
    """Decide by percentiles of 1,000 resampled ratios and the same floor."""
    logs = [np.log(np.asarray(side)) for side in (a, b)]
    means = [side[draw.integers(0, len(side), (1000, len(side)))].mean(axis=1) for side in logs]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means[0] - means[1], [tail, 100 - tail])
    speed = logs[0].mean() - logs[1].mean()
    return bool((low > 0 or high < 0) and abs(speed) >= math.log1p(EFFECT_FLOOR))


def report(name: str, deal: Draw, pairs: int) -> None:
    shares = []
    for change, seed in ((1.0, 1), (CHANGE, 2)):
        draw, generator = random.Random(seed), np.random.default_rng(seed)
        called, resampled = 0, 0
        for _ in range(pairs):
            a, b = deal(draw)
            b = [time / change for time in b]
            called += by_t(a, b)
            resampled += by_bootstrap(a, b, generator)
        shares += [called / pairs, resampled / pairs]
    same_t, same_b, seen_t, seen_b = (f"{100 * share:6.2f} %" for share in shares)
    print(f"{name:<58}{same_t}  {seen_t}      {same_b}  {seen_b}")  # noqa: T201


def real(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Return the launch medians of the slowest rank, by case."""
    centres: dict[str, list[float]] = {}
    for path in paths:
        for record in latest(read_records(path)):
            if isinstance(record, Measured):
                centre = median(slowest_per_sample(record.samples.seconds))
                centres.setdefault(record.case.command(), []).append(centre)
    return centres


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="runs with many launches")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs per line")
    asked = parser.parse_args()
    print(f"{'':<58}same       3 %           bootstrap: same  3 %")  # noqa: T201
    if not asked.runs:
        report("30 values, cv 2 %", simulated(30, 0.0, 1), asked.pairs)
        report("8 launches, sd 1 %, 30 samples", simulated(8, 0.01, 30), asked.pairs)
        report("3 launches, sd 1 %, 30 samples", simulated(3, 0.01, 30), asked.pairs)
    for name, centres in real(asked.runs).items():
        if len(centres) < 16:
            continue
        spread = stdev(centres) / fmean(centres)
        words = name.removeprefix("stepmark ").split(" --device")[0]
        report(
            f"{words[:40]} ({len(centres)}, sd {spread:.1%})", dealt(centres, 8), asked.pairs
        )


if __name__ == "__main__":
    main()
