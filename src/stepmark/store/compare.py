"""Is a machine slower than a reference run? A verdict per case, never from one launch alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from stepmark.core.record import Measured
from stepmark.core.stats import slowest_per_sample, summarize

# A change smaller than this is not reported, however certain.
EFFECT_FLOOR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`ratio` = mean time now / then; above 1 is slower. low and high span the launches."""

    case_id: str
    ratio: float
    low: float
    high: float
    noise: float  # relative; of the reference run's own samples
    verdict: str  # "slower", "faster", "same", "cannot tell", "other method"


def judge(then: Measured, launches: Sequence[Measured], floor: float) -> Verdict:
    """Slower only if every launch is, by more than the floor and the launches' own spread.

    A launch (fresh operands, a fresh soak) is the unit: samples of one launch are not
    independent. Means are compared: under a power cap the clock hops between a few states, and
    a median hops with it (docs/LOG.md) while work over time does not. Noise is the half-width
    of the reference's mean over its batches of samples, 2 standard errors of ten blocks.
    """
    base = summarize(slowest_per_sample(then.samples.seconds)).mean
    means = [summarize(slowest_per_sample(one.samples.seconds)).mean for one in launches]
    ratios = sorted(mean / base for mean in means)
    ratio = summarize(ratios).median
    noise = _block_noise(slowest_per_sample(then.samples.seconds))
    limit = max(EFFECT_FLOOR, floor, noise)
    if any(one.samples.method != then.samples.method for one in launches):
        word = "other method"
    elif ratios[0] > 1 + limit:
        word = "slower"
    elif ratios[-1] < 1 - limit:
        word = "faster"
    elif 1 - limit <= ratios[0] and ratios[-1] <= 1 + limit:
        word = "same"
    else:
        word = "cannot tell"
    return Verdict(
        case_id=then.case.case_id,
        ratio=ratio,
        low=ratios[0],
        high=ratios[-1],
        noise=noise,
        verdict=word,
    )


def _block_noise(seconds: Sequence[float], blocks: int = 10) -> float:
    """Two standard errors of the mean, relative, from consecutive blocks of samples."""
    size = max(1, len(seconds) // blocks)
    means = [
        fmean(seconds[i : i + size]) for i in range(0, size * (len(seconds) // size), size)
    ]
    if len(means) < 2:
        return 0.0
    return 2 * stdev(means) / math.sqrt(len(means)) / fmean(means)
