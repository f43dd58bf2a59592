"""Whether times that count as steady still rise or fall."""

import math
from collections.abc import Sequence
from statistics import fmean, median

# Fewer values cannot show a trend; more are averaged, so that the pairs stay few.
LEAST, MOST = 8, 64
# Standard deviations of the trend statistic, and the least change that is worth a word.
SURE, WORTH = 3.0, 0.01


def drift(seconds: Sequence[float], cycle: int = 1) -> float | None:
    """Median of the second half over that of the first, less 1; None without a sure trend.

    Mann's test (H. B. Mann, "Nonparametric tests against trend", Econometrica 13(3), 1945)
    over means of whole cycles: is a later one above an earlier one more often than by chance?
    """
    means = _means(seconds, cycle)
    if len(means) > MOST:
        means = _means(means, math.ceil(len(means) / MOST))
    count = len(means)
    if count < LEAST:
        return None
    score = sum(
        (later > earlier) - (later < earlier)
        for index, earlier in enumerate(means)
        for later in means[index + 1 :]
    )
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    change = median(means[count // 2 :]) / median(means[: count // 2]) - 1
    sure = abs(score) > SURE * deviation and change * score > 0
    return change if sure and abs(change) > WORTH else None


def _means(values: Sequence[float], size: int) -> list[float]:
    """Of whole groups."""
    whole = len(values) // size * size
    return [fmean(values[first : first + size]) for first in range(0, whole, size)]
