"""When a case has been measured enough. Rank 0 decides, for all, from all ranks' maxima."""

from dataclasses import dataclass

from stepmark.core.case import SOAK_S
from stepmark.core.stats import summarize

BURST_IDLE_S = 1.0
MIN_SAMPLES = 5
MAX_SAMPLES = 20_000
# A power-limited device drifts over tenths of a second: samples of one batch look alike, so
# sustained batches are the unit of the interval, and a second of them is the least.
MIN_BATCHES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long a case may take and how exact its median should be."""

    sample_s: float = 3.0  # wall seconds of sampling at most
    soak_s: float = SOAK_S
    target_ci_rel: float = 0.003  # half-width of the median's 95 % interval
    min_batches: int = MIN_BATCHES

    def shortened(self, usable_s: float) -> "Effort":
        """Soak and samples that fit in `usable_s`."""
        return Effort(
            soak_s=min(self.soak_s, usable_s * 0.3),
            sample_s=min(self.sample_s, max(usable_s * 0.7, 0.01)),
            target_ci_rel=self.target_ci_rel,
            min_batches=self.min_batches,
        )


def is_enough(
    batches: list[list[float]], spent_s: float, effort: Effort, *, burst: bool = False
) -> bool:
    """Given the slowest rank's seconds per sample, by batch."""
    # A burst idles a second per 20 ms of work, so its budget is counted in bursts.
    limit = effort.sample_s + 4 * BURST_IDLE_S if burst else effort.sample_s
    count = sum(map(len, batches))
    if spent_s >= limit or count >= MAX_SAMPLES:
        return True
    if burst:
        samples = [value for batch in batches for value in batch]
        return count >= MIN_SAMPLES and summarize(samples).ci_rel < effort.target_ci_rel
    if len(batches) < effort.min_batches:
        return False
    medians = [summarize(batch).median for batch in batches]
    return summarize(medians).ci_rel < effort.target_ci_rel
