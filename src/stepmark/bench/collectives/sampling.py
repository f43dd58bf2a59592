"""Samples of a collective in batches, on all ranks alike, alone or beside compute."""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepmark.bench.agree import agreed
from stepmark.bench.collectives.timing import Batch, Timer
from stepmark.bench.ranks import Ranks
from stepmark.bench.stopping import Effort, is_enough
from stepmark.core.stats import slowest_per_sample

if TYPE_CHECKING:
    from stepmark.bench.collectives.concurrent_compute import ConcurrentCompute

_BATCH_S = 0.1
_MOST_SAMPLES = 1000  # of a batch
_MOST_TRIES = 12
# Aligning the ranks takes about this long, while the compute runs already.
_START_S = 5e-3


@dataclass(slots=True, kw_only=True)
class CallSamples:
    """What sampling gives this rank. late_s is of all ranks, by batch."""

    seconds: list[float] = field(default_factory=list)
    late_s: list[list[float]] = field(default_factory=list)
    issue_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)


def collect(
    ranks: Ranks,
    timer: Timer,
    compute: "ConcurrentCompute | None",
    sample_s: float,
    effort: Effort,
    wanted: int | None,
) -> CallSamples:
    """Sample until rank 0, seeing all ranks' maxima, says that it is enough.

    sample_s: seconds of one sample, roughly, the same on every rank. wanted: exactly so many
    samples.
    """
    samples, batches = CallSamples(), list[list[float]]()
    longest_s = min(ranks.gather(compute.longest_s if compute else math.inf))
    length_s = min(_BATCH_S, effort.sample_s / effort.min_batches, longest_s / 4)
    most = max(1, min(_MOST_SAMPLES, int(length_s / max(sample_s, 1e-9))))
    stretch, tries, begin = 1.5, 0, time.monotonic()

    def enough() -> bool:
        if wanted is not None:
            return sum(map(len, batches)) >= wanted
        return is_enough(batches, time.monotonic() - begin, effort)

    while True:  # rank 0 ends it, for all
        count = most if wanted is None else min(most, wanted - sum(map(len, batches)))
        cover_s = stretch * count * sample_s + _START_S
        batch, together = agreed(ranks, lambda: _batch(timer, compute, count, cover_s))  # noqa: B023
        found = ranks.gather((batch.seconds, batch.began_s, together is not None))
        if not all(one[2] for one in found):
            # Somewhere the compute ended first, so this batch does not count.
            tries += 1
            agreed(ranks, lambda: _give_up_after(tries))  # noqa: B023  called at once
            stretch, most = _longer(stretch, count, longest_s / sample_s)
            continue
        _keep(samples, batch, together or [], [one[1] for one in found if one[0]], found)
        batches.append(slowest_per_sample([one[0] for one in found if one[0]]))
        if ranks.decide(enough):
            return samples


def _batch(
    timer: Timer, compute: "ConcurrentCompute | None", count: int, cover_s: float
) -> tuple[Batch, list[float] | None]:
    """Samples, and seconds of the calls beside them. The compute ends with the batch."""
    if compute is None:
        return timer.sample(count), []
    compute.start(cover_s)
    try:
        batch = timer.sample(count)
    except BaseException:
        compute.stop(None)
        raise
    return batch, compute.stop(batch.span)


def _keep(
    samples: CallSamples,
    batch: Batch,
    together: list[float],
    starts: list[float],
    found: list[tuple[list[float], float, bool]],
) -> None:
    samples.seconds += batch.seconds
    samples.issue_s.append(batch.issue_s)
    samples.together_s += together
    samples.late_s.append([max(0.0, began_s - min(starts)) for _, began_s, _ in found])


def _longer(stretch: float, count: int, most: float) -> tuple[float, int]:
    """More compute per sample; fewer samples where there cannot be more. most: in samples."""
    if 2 * stretch * count <= most:
        return 2 * stretch, count
    return 2 * stretch, max(1, count // 2)


def _give_up_after(tries: int) -> None:
    if tries > _MOST_TRIES:
        raise RuntimeError("the compute beside ends before the collective; choose a longer one")
