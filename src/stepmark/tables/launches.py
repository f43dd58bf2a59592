"""Launches of a case, pooled."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import median
from typing import TypeGuard, TypeVar

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import AnyCase, CommMemory, Failed, Measured, Record, Skipped
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.collectives import FACTS

OfCase = TypeVar("OfCase", bound="Launches")


def message_of(record: Record) -> str:
    """Return why a record has no figures."""
    match record:
        case Skipped():
            return record.reason
        case Failed():
            return f"{record.cause}: {record.message}"
        case Measured() if record.differs:
            return f"in another environment: {'; '.join(record.differs)}"
        case Measured():
            return f"samples in {record.samples.file or 'no file'}"


def is_often(
    extreme: Callable[[Iterable[float]], float], place: int, columns: Sequence[Sequence[float]]
) -> bool:
    """Return whether this place has the extreme value of a column more often than by chance.

    That is three standard deviations above the mean of a binomial.
    """
    count = sum(column[place] == extreme(column) for column in columns)
    p = 1 / len(columns[0])
    return count > len(columns) * p + 3 * math.sqrt(len(columns) * p * (1 - p))


def launch_spread_pct(medians: Sequence[float]) -> float | None:
    """Return (max - min) / median of the launches' medians, in percent; None of one launch."""
    if len(medians) < 2:
        return None
    return 100 * (max(medians) - min(medians)) / median(medians)


def rank_medians_s(records: Iterable[Measured]) -> list[float]:
    """Return the median over launches of each rank's median."""
    by_launch = [
        [summarize(values).median for values in record.samples.seconds] for record in records
    ]
    return [median(values) for values in zip(*by_launch, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Launches:
    """One case, measured in several launches.

    Samples of one launch are not independent: the time is the median of launches' medians.
    """

    case: AnyCase
    measured: tuple[Measured, ...]  # launches with samples
    others: tuple[Record, ...]

    @property
    def num_wrong(self) -> int | None:
        """Return wrong elements over ranks and launches; None where no launch was checked."""
        checks = [check for record in self.measured for check in record.checks]
        return sum(check.num_wrong for check in checks) if checks else None

    @property
    def differs(self) -> tuple[str, ...]:
        """Return how the environment of all launches differs from the run's."""
        return self.measured[0].differs if self.measured else ()

    @property
    def status(self) -> str:
        if self.measured:
            return "wrong" if self.num_wrong else "measured"
        failed = any(isinstance(record, Failed) for record in self.others)
        return "failed" if failed else self.others[0].kind

    @property
    def message(self) -> str | None:
        """Return why the case, or one launch of it, has no samples, or how it was measured."""
        if self.differs:
            return message_of(self.measured[0])  # what failed has a row of its own
        text = "; ".join(dict.fromkeys(map(message_of, self.others))) or None
        if text and self.measured:
            numbers = ", ".join(str(record.launch) for record in self.others)
            return f"launch {numbers}: {text}"
        return text

    @cached_property
    def slowest_s(self) -> list[list[float]]:
        """Return by launch the slowest rank's time of each sample."""
        return [slowest_per_sample(record.samples.seconds) for record in self.measured]

    @cached_property
    def launch_medians_s(self) -> list[float]:
        return [summarize(values).median for values in self.slowest_s]

    @property
    def time_s(self) -> float:
        return median(self.launch_medians_s)

    @property
    def launch_spread_pct(self) -> float | None:
        return launch_spread_pct(self.launch_medians_s)


@dataclass(frozen=True, kw_only=True)
class OpLaunches(Launches):
    """An operator with its launches."""

    case: OpCase


@dataclass(frozen=True, kw_only=True)
class CommLaunches(Launches):
    """A collective with its launches."""

    case: CommCase

    @cached_property
    def rank_medians_s(self) -> list[float]:
        """Return medians by rank, in the order of case.members."""
        return rank_medians_s(self.measured)

    @property
    def time_min_s(self) -> float | None:
        """Return the time of the fastest rank, which waits least for others."""
        if not FACTS[self.case.collective].synchronizing or not self.measured:
            return None
        return self.time_over_ranks_s(min)

    def time_over_ranks_s(self, statistic: Callable[[Sequence[float]], float]) -> float:
        """Return the median over samples of a statistic over the ranks' times of each."""
        by_launch: list[float] = [
            median(map(statistic, zip(*record.samples.seconds, strict=True)))
            for record in self.measured
        ]
        return median(by_launch)

    def memory(self) -> CommMemory | None:
        """Return the memory of the launch that used most."""
        memories = [record.comm_memory for record in self.measured if record.comm_memory]
        return max(memories, key=attrgetter("total_bytes"), default=None)

    def waited_for(self) -> tuple[int, float] | None:
        """Return the world rank that delays the others of its communicator, and how long.

        Where no rank can finish before all have started, the last one has the shortest time;
        the median of the others exceeds it by the delay. None where ranks do not wait, and
        where it is not the fastest more often than by chance.
        """
        if not FACTS[self.case.collective].synchronizing or len(self.rank_medians_s) < 2:
            return None
        of_rank = dict(zip(self.case.members, self.rank_medians_s, strict=True))
        delays = []
        for ranks in self.case.communicators:
            last = min(ranks, key=of_rank.__getitem__)
            others = [of_rank[rank] for rank in ranks if rank != last]
            if self._is_often_fastest(last, ranks):
                delays.append((median(others) - of_rank[last], last))
        return max(delays)[::-1] if delays else None

    def _is_often_fastest(self, rank: int, among: tuple[int, ...]) -> bool:
        """Return whether this rank has the shortest time more often than by chance."""
        places = [self.case.members.index(member) for member in among]
        columns = [
            [column[place] for place in places]
            for record in self.measured
            for column in zip(*record.samples.seconds, strict=True)
        ]
        return is_often(min, among.index(rank), columns)

    def late_s(self) -> float | None:
        """Return how long after the first rank the last one began a batch: a median.

        None where the clocks of the hosts are not known to agree better than that.
        """
        late: list[float] = []
        error = 0.0
        for record in self.measured:
            arrivals = record.arrivals
            if arrivals is None or not arrivals.late_s:
                continue
            if arrivals.error_s is None:
                return None
            error = max(error, arrivals.error_s)
            late += slowest_per_sample(arrivals.late_s)
        if not late:
            return None
        middle = median(late)
        return None if middle < error else middle

    def issue_s(self) -> float | None:
        """Return host seconds to issue one call, of the slowest rank."""
        by_launch = [
            max(record.arrivals.issue_s)
            for record in self.measured
            if record.arrivals and record.arrivals.issue_s
        ]
        return median(by_launch) if by_launch else None

    def beside_s(self) -> tuple[float, float] | None:
        """Return the slowest rank's time of a concurrent compute call, alone and together."""
        overlaps = [record.beside for record in self.measured if record.beside]
        if not overlaps:
            return None
        return (
            median(max(map(median, overlap.alone_s)) for overlap in overlaps),
            median(max(map(median, overlap.together_s)) for overlap in overlaps),
        )


def pooled(records: Iterable[Record], kind: type[OfCase]) -> list[OfCase]:
    """Return the launches of each case in one environment, in order of appearance."""
    cases: dict[object, list[Record]] = {}
    for record in records:
        cases.setdefault((record.case.case_id, record.differs), []).append(record)
    return [
        kind(
            case=group[0].case,
            measured=tuple(record for record in group if _has_samples(record)),
            others=tuple(record for record in group if not _has_samples(record)),
        )
        for group in cases.values()
    ]


def _has_samples(record: Record) -> TypeGuard[Measured]:
    return isinstance(record, Measured) and any(record.samples.seconds)
