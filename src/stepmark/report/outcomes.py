"""What rows of operators, collectives and training derive alike, and pooled launches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from stepmark.core.collectives import FACTS
from stepmark.core.comm_case import CommCase
from stepmark.core.dtypes import DType
from stepmark.core.ops import Bmm, Copy, Gemm, GroupedGemm
from stepmark.core.record import Failed, Measured, Record, Skipped, Telemetry
from stepmark.core.stats import Summary, slowest_per_sample, summarize

# A figure may exceed a data sheet's rounding, not its hardware.
LIMIT_SLACK = 1.01
MATMULS = (Gemm, Bmm, GroupedGemm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best rates this run itself reached, by device: what stands in for unknown peaks."""

    flops_per_s: Mapping[tuple[str, DType], float] = field(default_factory=dict)
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


def measured_ceilings(records: Iterable[Record]) -> Ceilings:
    """Best matmul rate by dtype and best copy bandwidth; wrong results do not count."""
    flops_per_s: dict[tuple[str, DType], float] = {}
    bytes_per_s: dict[str, float] = {}
    for record in records:
        if not isinstance(record, Measured) or record.num_wrong or not record.samples.seconds:
            continue
        op, place = record.operator.op, record.operator.device
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        if isinstance(op, MATMULS):
            key = (place, op.dtype)
            flops_per_s[key] = max(flops_per_s.get(key, 0.0), op.flops / time_s)
        elif isinstance(op, Copy):
            rate = op.bytes_moved / time_s
            bytes_per_s[place] = max(bytes_per_s.get(place, 0.0), rate)
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def status_of(record: Record, num_wrong: int | None) -> str:
    """What came of a case in one word."""
    return "wrong" if num_wrong else record.kind


def message_of(record: Record) -> str:
    """Why a record has no figures."""
    match record:
        case Skipped():
            return record.reason
        case Failed():
            return f"{record.cause}: {record.message}"
        case Measured():
            return f"samples in {record.samples.file or 'no file'}"


def num_wrong(record: Measured, rank: int | None = None) -> int | None:
    """Wrong elements over all ranks, or of one; None where nothing was checked."""
    checks = record.checks if rank is None else record.checks[rank : rank + 1]
    return sum(check.num_wrong for check in checks) if checks else None


def state_of(record: Measured, rank: int) -> Telemetry | None:
    """The state of a rank's device; None where it was not read."""
    return record.telemetry[rank] if rank < len(record.telemetry) else None


def clock_mhz(state: Telemetry | None) -> float | None:
    """The clock while the samples ran."""
    return state.sm_clock_hz / 1e6 if state and state.sm_clock_hz is not None else None


def throttle_reasons(record: Measured, rank: int | None) -> str | None:
    """Why a rank's device was slowed; for None, any rank's."""
    states = record.telemetry if rank is None else record.telemetry[rank : rank + 1]
    return ", ".join(sorted({reason for state in states for reason in state.throttle})) or None


def spread_pct(times: Summary) -> float | None:
    """Half the distance from p10 to p90, in percent of the median; None of one sample."""
    return (times.p90 - times.p10) / 2 / times.median * 100 if times.n > 1 else None


def ratio(values: Sequence[float], index: int) -> float | None:
    """One of the values over their median."""
    middle = median(values)
    return values[index] / middle if middle else None


def percent(value: float | None, base: float | None) -> float | None:
    """None where either is unknown."""
    return 100 * value / base if value is not None and base else None


@dataclass(frozen=True, kw_only=True)
class Launches:
    """One case, measured in several launches. Samples of one launch are not independent, so
    the time is the median over launches of each launch's median."""

    case: CommCase
    measured: tuple[Measured, ...]
    others: tuple[Skipped | Failed, ...]

    @property
    def num_wrong(self) -> int | None:
        """Over ranks and launches. None where no launch was checked."""
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
        """Why the case, or one launch of it, has no samples."""
        reasons = dict.fromkeys(
            record.reason
            if isinstance(record, Skipped)
            else f"{record.cause}: {record.message}"
            for record in self.others
        )
        text = "; ".join(reasons) or None
        if text and self.measured:
            numbers = ", ".join(str(record.launch) for record in self.others)
            return f"launch {numbers}: {text}"
        return text

    @cached_property
    def slowest_s(self) -> list[list[float]]:
        """By launch: the slowest rank's time of each sample."""
        return [slowest_per_sample(record.samples.seconds) for record in self.measured]

    @cached_property
    def launch_medians_s(self) -> list[float]:
        return [summarize(values).median for values in self.slowest_s]

    @cached_property
    def rank_medians_s(self) -> list[float]:
        """By rank, in the order of case.members."""
        by_launch = [
            [summarize(values).median for values in record.samples.seconds]
            for record in self.measured
        ]
        return [median(values) for values in zip(*by_launch, strict=True)]

    @property
    def time_min_s(self) -> float | None:
        """As the time, of the fastest rank: the wire's share where all ranks wait for all."""
        if not FACTS[self.case.collective].synchronizing or not self.measured:
            return None
        by_launch: list[list[float]] = [
            [min(column) for column in zip(*record.samples.seconds, strict=True)]
            for record in self.measured
        ]
        return median(median(fastest) for fastest in by_launch)

    @property
    def launch_spread_pct(self) -> float | None:
        """(max - min) / median of the launches' medians."""
        if len(self.measured) < 2:
            return None
        medians = self.launch_medians_s
        return 100 * (max(medians) - min(medians)) / median(medians)

    def waited_for(self) -> tuple[int, float] | None:
        """The world rank that the others of its communicator wait for, and how long.

        Where no rank can finish before all have come, the last to come has the shortest time;
        what the median of the others has above it is the cost. None where ranks do not wait,
        and where it is not the fastest more often than by chance: three standard deviations of
        a binomial over all samples.
        """
        if not FACTS[self.case.collective].synchronizing or len(self.rank_medians_s) < 2:
            return None
        of_rank = dict(zip(self.case.members, self.rank_medians_s, strict=True))
        delays = []
        for ranks in self.case.communicators:
            last = min(ranks, key=of_rank.__getitem__)
            others = [of_rank[rank] for rank in ranks if rank != last]
            if self._is_beyond_chance(last, ranks):
                delays.append((median(others) - of_rank[last], last))
        return max(delays)[::-1] if delays else None

    def _is_beyond_chance(self, rank: int, among: tuple[int, ...]) -> bool:
        """Whether this rank has the shortest time of a sample too often for luck."""
        places = [self.case.members.index(member) for member in among]
        place = self.case.members.index(rank)
        columns = [
            column
            for record in self.measured
            for column in zip(*record.samples.seconds, strict=True)
        ]
        fastest = sum(min(column[i] for i in places) == column[place] for column in columns)
        n, p = len(columns), 1 / len(places)
        return bool(fastest > n * p + 3 * math.sqrt(n * p * (1 - p)))

    def late_s(self) -> float | None:
        """How long after the first rank the last one began a batch: a median.

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
        """Host seconds to issue one call, of the slowest rank."""
        by_launch = [
            max(record.arrivals.issue_s)
            for record in self.measured
            if record.arrivals and record.arrivals.issue_s
        ]
        return median(by_launch) if by_launch else None

    def beside_s(self) -> tuple[float, float] | None:
        """One call of the compute beside: alone, and together; of the slowest rank."""
        overlaps = [record.beside for record in self.measured if record.beside]
        if not overlaps:
            return None
        return (
            median(max(map(median, overlap.alone_s)) for overlap in overlaps),
            median(max(map(median, overlap.together_s)) for overlap in overlaps),
        )


def pooled(records: Iterable[Record]) -> list[Launches]:
    """Collectives by case, in the order in which they came; operators are left out."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        if isinstance(record.case, CommCase):
            cases.setdefault(record.case.case_id, []).append(record)
    return [_of_one_case(group) for group in cases.values()]


def _of_one_case(records: Sequence[Record]) -> Launches:
    return Launches(
        case=records[0].comm,
        measured=tuple(r for r in records if isinstance(r, Measured) and r.samples.seconds),
        others=tuple(r for r in records if not isinstance(r, Measured)),
    )
