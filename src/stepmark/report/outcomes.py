"""Figures that rows of operators, collectives and training share, and pooled launches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TypeVar

from stepmark.core.collectives import FACTS
from stepmark.core.comm_case import CommCase
from stepmark.core.dtypes import DType
from stepmark.core.record import Failed, Measured, Record, Skipped, Telemetry
from stepmark.core.stats import Summary, slowest_per_sample, summarize

# A figure may exceed a data sheet's rounding, not its hardware.
LIMIT_SLACK = 1.01
# Beyond these, something else had a part in the figure: half of p10 to p90 in percent of the
# median, and the share of the CPU time that a hypervisor took.
MAX_SPREAD_PCT = 20.0
MAX_STEAL = 0.05
# Operands of a memory-bound operator that fit in this many last-level caches may come from it.
CACHES = 4
# Operand sets of more than so many caches find nothing in them, as the runner provides them.
DEFEATED_CACHES = 2
CACHE_NOT_DEFEATED = "cache not defeated"
T = TypeVar("T")
MATMULS = ("gemm", "bmm", "grouped-gemm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Best rates of this run by device, which stand in for unknown peaks.

    cases: the case_id of each best rate, by the same keys; it has no ratio to itself.
    """

    flops_per_s: Mapping[tuple[str, DType], float] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    cases: Mapping[object, str] = field(default_factory=dict)


def measured_ceilings(records: Iterable[Record]) -> Ceilings:
    """Return the best matmul rates by dtype and copy bandwidths; wrong results are left out."""
    flops_per_s: dict[tuple[str, DType], float] = {}
    bytes_per_s: dict[str, float] = {}
    cases: dict[object, str] = {}
    for record in records:
        if not isinstance(record, Measured) or record.num_wrong or not record.samples.seconds:
            continue
        case, op = record.operator, record.operator.op
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        if case.family in MATMULS:
            key, rate = (case.device, op.dtype), op.flops / time_s
            if rate > flops_per_s.get(key, 0.0):
                flops_per_s[key], cases[key] = rate, case.case_id
        elif case.family == "copy":
            rate = op.bytes_moved / time_s
            if rate > bytes_per_s.get(case.device, 0.0):
                bytes_per_s[case.device], cases[case.device] = rate, case.case_id
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, cases=cases)


def status_of(record: Record, num_wrong: int | None) -> str:
    """Return the outcome of a case in one word."""
    return "wrong" if num_wrong else record.kind


def message_of(record: Record) -> str:
    """Return why a record has no figures."""
    match record:
        case Skipped():
            return record.reason
        case Failed():
            return f"{record.cause}: {record.message}"
        case Measured():
            return f"samples in {record.samples.file or 'no file'}"


def num_wrong(record: Measured, rank: int | None = None) -> int | None:
    """Return wrong elements over all ranks, or of one; None where nothing was checked."""
    checks = record.checks if rank is None else record.checks[rank : rank + 1]
    return sum(check.num_wrong for check in checks) if checks else None


def megahertz(clock_hz: float | None) -> float | None:
    return None if clock_hz is None else clock_hz / 1e6


def ratio(values: Sequence[float], index: int) -> float | None:
    """Return one of the values over their median."""
    middle = median(values)
    return values[index] / middle if middle else None


def percent(value: float | None, base: float | None) -> float | None:
    """Return a share in percent; None where either is unknown."""
    return 100 * value / base if value is not None and base else None


def is_beyond_chance(count: int, n: int, p: float) -> bool:
    """Return whether `count` of n is three standard deviations above a binomial's mean."""
    return count > n * p + 3 * math.sqrt(n * p * (1 - p))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a measured case, of all ranks together (rank None) or of one."""

    record: Measured
    rank: int | None

    @cached_property
    def medians(self) -> list[float]:
        """Return the median of each rank."""
        return [summarize(values).median for values in self.record.samples.seconds]

    @cached_property
    def shown(self) -> int:
        """Return the rank itself, or the slowest of all."""
        return self.medians.index(max(self.medians)) if self.rank is None else self.rank

    @cached_property
    def times(self) -> Summary:
        seconds = self.record.samples.seconds
        return summarize(
            slowest_per_sample(seconds) if self.rank is None else seconds[self.rank]
        )

    @property
    def spread_pct(self) -> float | None:
        return spread_pct(self.times)

    @cached_property
    def state(self) -> Telemetry | None:
        """Return the state of the shown rank's device; None where it was not read."""
        states = self.record.telemetry
        return states[self.shown] if self.shown < len(states) else None

    @property
    def clock_mhz(self) -> float | None:
        """Return the clock while the samples ran."""
        return megahertz(self.state.sm_clock_hz) if self.state else None

    @property
    def throttle(self) -> str | None:
        """Return why the rank's device was slowed; of all ranks, why any was."""
        return throttle_reasons(self.own(self.record.telemetry)) if self.state else None

    def own(self, by_rank: Sequence[T]) -> Sequence[T]:
        """Return the values of this rank, or of all."""
        return by_rank if self.rank is None else by_rank[self.rank : self.rank + 1]


def spread_pct(times: Summary) -> float | None:
    """Return half of p10 to p90, in percent of the median; None of one sample."""
    return (times.p90 - times.p10) / 2 / times.median * 100 if times.n > 1 else None


def validity(
    launches: Iterable[Sequence[Telemetry]],
    *spreads: float | None,
    above_limit: bool | None = None,
    pct_ceiling: float | None = None,
    in_cache: bool = False,
) -> str | None:
    """Return what speaks against a figure, joined by commas; None if nothing is known.

    launches: the states of all ranks, whose threads count as the measurement's own.
    """
    hosts = [[state.host for state in states if state.host] for states in launches]
    reasons = {
        "above limit": above_limit,
        "above the measured ceiling": pct_ceiling and pct_ceiling > 100 * LIMIT_SLACK,
        CACHE_NOT_DEFEATED: in_cache,
        "busy host": any(
            (queue or 0) > max(load.num_cores, sum(each.own_threads for each in loads))
            for loads in hosts
            for load in loads
            for queue in (load.runnable_before, load.runnable)
        ),
        "CPU steal": any((load.steal or 0.0) > MAX_STEAL for loads in hosts for load in loads),
        f"spread above {MAX_SPREAD_PCT:.0f} %": any(
            spread is not None and spread > MAX_SPREAD_PCT for spread in spreads
        ),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds) or None


def throttle_reasons(states: Iterable[Telemetry]) -> str | None:
    return ", ".join(sorted({reason for state in states for reason in state.throttle})) or None


@dataclass(frozen=True, kw_only=True)
class Launches:
    """One case, measured in several launches.

    Samples of one launch are not independent: the time is the median of launches' medians.
    """

    case: CommCase
    measured: tuple[Measured, ...]
    others: tuple[Skipped | Failed, ...]

    @property
    def num_wrong(self) -> int | None:
        """Return wrong elements over ranks and launches; None where no launch was checked."""
        checks = [check for record in self.measured for check in record.checks]
        return sum(check.num_wrong for check in checks) if checks else None

    @property
    def status(self) -> str:
        if self.measured:
            return "wrong" if self.num_wrong else "measured"
        failed = any(isinstance(record, Failed) for record in self.others)
        return "failed" if failed else "skipped"

    @property
    def message(self) -> str | None:
        """Return why the case, or one launch of it, has no samples."""
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

    @cached_property
    def rank_medians_s(self) -> list[float]:
        """Return medians by rank, in the order of case.members."""
        by_launch = [
            [summarize(values).median for values in record.samples.seconds]
            for record in self.measured
        ]
        return [median(values) for values in zip(*by_launch, strict=True)]

    @property
    def time_min_s(self) -> float | None:
        """Return the time of the fastest rank, which waits least for others."""
        if not FACTS[self.case.collective].synchronizing or not self.measured:
            return None
        by_launch: list[float] = [
            median(map(min, zip(*record.samples.seconds, strict=True)))
            for record in self.measured
        ]
        return median(by_launch)

    @property
    def launch_spread_pct(self) -> float | None:
        """Return (max - min) / median of the launches' medians."""
        if len(self.measured) < 2:
            return None
        medians = self.launch_medians_s
        return 100 * (max(medians) - min(medians)) / median(medians)

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
        place = self.case.members.index(rank)
        columns = [
            column
            for record in self.measured
            for column in zip(*record.samples.seconds, strict=True)
        ]
        fastest = sum(min(column[i] for i in places) == column[place] for column in columns)
        return is_beyond_chance(fastest, len(columns), 1 / len(places))

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


def pooled(records: Iterable[Record]) -> list[Launches]:
    """Return collectives by case, in order of appearance; operators are left out."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record.case, CommCase):
            cases.setdefault(record.case.case_id, []).append(record)
    return [
        Launches(
            case=group[0].comm,
            measured=tuple(r for r in group if isinstance(r, Measured) and r.samples.seconds),
            others=tuple(r for r in group if not isinstance(r, Measured)),
        )
        for group in cases.values()
    ]
