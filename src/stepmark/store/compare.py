"""Is a machine slower than a reference run? A verdict per case, never from one launch alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.core.record import Measured
from stepmark.core.stats import slowest_per_sample, summarize

# A change smaller than this is not reported, however certain.
EFFECT_FLOOR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`ratio` = median time now / then; above 1 is slower. low and high span the launches."""

    case_id: str
    ratio: float
    low: float
    high: float
    noise: float  # relative; of the reference run's own samples
    verdict: str  # "slower", "faster", "same", "cannot tell", "other method"


def judge(then: Measured, launches: Sequence[Measured], floor: float) -> Verdict:
    """Slower only if every launch is, by more than the floor and the reference's own noise.

    A launch (fresh operands, a fresh soak) is the unit: samples of one launch are not
    independent. Noise is half the p10-p90 range of the reference over its median.
    """
    base = summarize(slowest_per_sample(then.samples.seconds))
    medians = [summarize(slowest_per_sample(one.samples.seconds)).median for one in launches]
    ratios = sorted(median / base.median for median in medians)
    ratio = summarize(ratios).median
    noise = (base.p90 - base.p10) / 2 / base.median
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
