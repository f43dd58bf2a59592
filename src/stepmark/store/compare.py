"""Is a machine slower than a reference run? A verdict per case, never from one launch alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from stepmark.core.record import Measured
from stepmark.core.stats import slowest_per_sample, summarize

# A change smaller than this is not reported, however certain.
EFFECT_FLOOR = 0.01
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`ratio` = mean time now / then; above 1 is slower. low and high span the launches."""

    case_id: str
    ratio: float
    low: float
    high: float
    noise: float  # relative; the larger of that of the samples and of the launches
    verdict: str  # "slower", "faster", "same", "cannot tell", "other method"


def judge(then: Measured, launches: Sequence[Measured], floor: float) -> Verdict:
    """Slower only if every launch is, by more than floor, noise and the launches' spread.

    A launch (fresh operands, a fresh soak) is the unit: samples of one launch are not
    independent. Means are compared: under a power cap the clock hops between a few states, and
    a median hops with it (docs/LOG.md) while work over time does not. Noise is two standard
    errors of the noisiest mean, over ten blocks of its samples. How much launches of the
    reference differ is not known; the spread of ours stands for it. Of fewer than five samples
    nothing is concluded.
    """
    times = [slowest_per_sample(one.samples.seconds) for one in (then, *launches)]
    base, *means = [summarize(seconds).mean for seconds in times]
    ratios = sorted(mean / base for mean in means)
    ratio = summarize(ratios).median
    noise = max(*map(_block_noise, times), (ratios[-1] - ratios[0]) / ratio)
    limit = max(EFFECT_FLOOR, floor, noise)
    if any(one.samples.method != then.samples.method for one in launches):
        word = "other method"
    elif min(map(len, times)) < MIN_SAMPLES or len(launches) < 2:
        word = "cannot tell"
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
