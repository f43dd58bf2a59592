"""Where the time of a training sample goes on one rank."""

from collections.abc import Sequence
from statistics import fmean, median

from stepmark.core.columns import Row
from stepmark.core.record import Measured
from stepmark.core.training import Training

PHASES = ("fwd_s", "bwd_s", "optim_s", "other_s")


def phases(record: Measured, rank: int) -> Row:
    """Medians over the samples of a rank; of the optimizer over the samples that have one.

    `other` is what of a sample is in no phase. `data` is the host's wait for a batch; the
    device may have had work meanwhile. Phases that cannot be told apart are left out.
    """
    told = record.training
    if told is None:
        return {}
    row: Row = {}
    if waits := _of(told.data_s, rank):
        row |= {"data_s": median(waits), "data_max_s": max(waits)}
    if taken := [value for value in _of(told.optim_s, rank) if value > 0]:
        row["optim_s"] = median(taken)
    if not (split := _split(record, told, rank)):
        return row
    fwd, bwd, _, other = split
    return row | {"fwd_s": median(fwd), "bwd_s": median(bwd), "other_s": median(other)}


def mean_phases(record: Measured, rank: int) -> dict[str, float]:
    """Means over whole cycles: they add up to the mean sample. Empty where unknown."""
    told = record.training
    split = _split(record, told, rank) if told else ()
    if not told or not split:
        return {}
    whole = len(split[0]) // told.cycle * told.cycle
    return {
        name: fmean(values[:whole] or values)
        for name, values in zip(PHASES, split, strict=True)
    }


def _split(record: Measured, told: Training, rank: int) -> tuple[Sequence[float], ...]:
    """Seconds of each sample by phase, in the order of PHASES; empty where unknown."""
    seconds = record.samples.seconds[rank]
    known = [_of(each, rank) for each in (told.fwd_s, told.bwd_s, told.optim_s)]
    if not seconds or any(len(values) != len(seconds) for values in known):
        return ()
    other = [whole - sum(parts) for whole, *parts in zip(seconds, *known, strict=True)]
    return (*known, other)


def _of(by_rank: Sequence[Sequence[float]], rank: int) -> Sequence[float]:
    return by_rank[rank] if rank < len(by_rank) else ()
