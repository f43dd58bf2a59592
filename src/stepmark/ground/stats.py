"""Order statistics of samples, and the first steady one. No sample is dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics in seconds. `ci_rel`: half-width of the median's 95 % interval / median."""

    n: int
    median: float
    mean: float
    p10: float
    p90: float
    min: float
    max: float
    ci_rel: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Interpolate linearly between the two nearest sorted values (numpy's default)."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the distribution-free 95 % interval of the median, from order statistics.

    The ranks are n/2 -+ 1.96 sqrt(n)/2, by the normal limit of the binomial. Under 6 samples
    no pair of order statistics covers 95 %, so the interval is the whole range.
    """
    n = len(ordered)
    if n < 6:
        return ordered[0], ordered[-1]
    half = Z_95 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half) - 1)
    high = min(n - 1, math.ceil(n / 2 + half))
    return ordered[low], ordered[high]


def summarize(values: Sequence[float]) -> Summary:
    """Summarize the values. Raise ValueError if there is none or one is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("a summary needs at least one sample, all finite")
    ordered = sorted(values)
    low, high = median_interval(ordered)
    median = quantile(ordered, 0.5)
    return Summary(
        n=len(ordered),
        median=median,
        mean=math.fsum(ordered) / len(ordered),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        min=ordered[0],
        max=ordered[-1],
        ci_rel=(high - low) / 2 / median if median > 0 else math.inf,
    )


def slowest_per_sample(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return the maximum over ranks of each sample, as a job that waits for all ranks sees."""
    return [max(column) for column in zip(*seconds, strict=True)]


def steady_from(seconds: Sequence[float], cycle: int = 1) -> int | None:
    """Return the index of the first steady sample; None if fewer than half are steady.

    MSER (K. P. White, "An effective truncation heuristic for bias reduction in simulation
    output", Simulation 69(6), 1997): leave out as many from the start as make the standard
    error of the mean of the rest smallest. A quarter is always kept: two or three last values
    that happen to be alike would else win over a whole series without a trend. Whole cycles
    are left out, so that samples with and without an optimizer do not pass for a drift; an
    incomplete last cycle counts with what is left.
    """
    num_cycles = len(seconds) // cycle
    if num_cycles < 2:
        return None
    sums = [math.fsum(seconds[i * cycle : (i + 1) * cycle]) for i in range(num_cycles)]
    # From the end, so that each truncation costs one addition (Welford's recurrence).
    mean = 0.0
    squares = 0.0
    error = [math.inf] * num_cycles
    for count, total in enumerate(reversed(sums), 1):
        delta = total - mean
        mean += delta / count
        squares += delta * (total - mean)
        error[num_cycles - count] = squares / count**2
    # At least two must remain, or their error would be 0 for want of a second.
    fewest = max(2, num_cycles // 4)
    num_dropped = min(range(num_cycles - fewest + 1), key=error.__getitem__)
    return num_dropped * cycle if num_dropped <= num_cycles // 2 else None
