"""Figures that rows of operators, collectives and training share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from stepmark.cases.record import Measured, Record, Telemetry, is_busy
from stepmark.ground.dtypes import DType
from stepmark.ground.ratio import BUSY
from stepmark.ground.stats import Summary, slowest_per_sample, summarize
from stepmark.tables.columns import PERCENT, Row
from stepmark.tables.launches import OpLaunches, launch_spread_pct, pooled, rank_medians_s

# A figure may exceed a data sheet's rounding, not its hardware.
LIMIT_SLACK = 1.01
# Beyond these, something else had a part in the figure: half of p10 to p90 in percent of the
# median, and the share of the CPU time that a hypervisor took.
MAX_SPREAD_PCT = 20.0
MAX_STEAL = 0.05
_LARGEST_SPREAD_PCT = 100.0  # a larger one says no more than that the time is unknown
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
    for launches in pooled(records, OpLaunches):
        if not launches.measured or launches.num_wrong:
            continue
        case = launches.case
        op = launches.case.op
        time_s = launches.time_s
        if case.family in MATMULS:
            key = (case.device, op.dtype)
            rate = op.flops / time_s
            if rate > flops_per_s.get(key, 0.0):
                flops_per_s[key], cases[key] = rate, case.case_id
        elif case.family == "copy":
            rate = op.bytes_moved / time_s
            if rate > bytes_per_s.get(case.device, 0.0):
                bytes_per_s[case.device], cases[case.device] = rate, case.case_id
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, cases=cases)


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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a case measured in launches, of all ranks together (rank None) or of one."""

    records: tuple[Measured, ...]
    rank: int | None

    @property
    def record(self) -> Measured:
        """Return the record of the first launch."""
        return self.records[0]

    @cached_property
    def medians(self) -> list[float]:
        """Return the median of each rank, over launches the median of theirs."""
        return rank_medians_s(self.records)

    @cached_property
    def shown(self) -> int:
        """Return the rank itself, or the slowest of all."""
        return self.medians.index(max(self.medians)) if self.rank is None else self.rank

    @cached_property
    def launch_times(self) -> list[Summary]:
        """Return the times of each launch."""
        return [summarize(values) for values in self._seconds]

    @cached_property
    def times(self) -> Summary:
        """Return the times of all samples; the median is that of the launches' medians."""
        together = summarize([value for values in self._seconds for value in values])
        return replace(together, median=median(times.median for times in self.launch_times))

    @cached_property
    def _seconds(self) -> list[Sequence[float]]:
        matrices = (record.samples.seconds for record in self.records)
        return [
            slowest_per_sample(seconds) if self.rank is None else seconds[self.rank]
            for seconds in matrices
        ]

    @property
    def spread_pct(self) -> float | None:
        return spread_pct(self.times)

    @property
    def launch_spread_pct(self) -> float | None:
        return launch_spread_pct([times.median for times in self.launch_times])

    def state(self, name: str) -> float | None:
        """Return a reading of the shown rank's device: the median of launches."""
        states = [record.telemetry[self.shown : self.shown + 1] for record in self.records]
        readings = (getattr(state, name) for of_launch in states for state in of_launch)
        values = [value for value in readings if value is not None]
        return median(values) if values else None

    @property
    def clock_mhz(self) -> float | None:
        """Return the clock while the samples ran."""
        return megahertz(self.state("sm_clock_hz"))

    @property
    def throttle(self) -> str | None:
        """Return why the rank's device was slowed; of all ranks, why any was."""
        return throttle_reasons(
            state
            for record in self.records
            if self.shown < len(record.telemetry)
            for state in self.own(record.telemetry)
        )

    def own(self, by_rank: Sequence[T]) -> Sequence[T]:
        """Return the values of this rank, or of all."""
        return by_rank if self.rank is None else by_rank[self.rank : self.rank + 1]


def spread_pct(times: Summary) -> float | None:
    """Return half of p10 to p90, in percent of the median; None of one sample."""
    return (times.p90 - times.p10) / 2 / times.median * 100 if times.n > 1 else None


def validity(
    launches: Iterable[Sequence[Telemetry]],
    *spreads: float | None,
    records: Iterable[Measured],
    above_limit: bool | None = None,
    pct_ceiling: float | None = None,
    in_cache: bool = False,
) -> str | None:
    """Return what speaks against a figure, joined by commas; None if nothing is known.

    launches: the states of all ranks, whose threads count as the measurement's own. records:
    those of the figure.
    """
    states = list(launches)
    hosts = [[state.host for state in own if state.host] for own in states]
    reasons = {
        "above limit": above_limit,
        "above the measured ceiling": pct_ceiling and pct_ceiling > 100 * LIMIT_SLACK,
        CACHE_NOT_DEFEATED: in_cache,
        "another environment": any(record.differs for record in records),
        BUSY: any(map(is_busy, states)),
        "CPU steal": any((load.steal or 0.0) > MAX_STEAL for loads in hosts for load in loads),
        f"spread above {MAX_SPREAD_PCT:.0f} %": any(
            spread is not None and spread > MAX_SPREAD_PCT for spread in spreads
        ),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds) or None


def throttle_reasons(states: Iterable[Telemetry]) -> str | None:
    return ", ".join(sorted({reason for state in states for reason in state.throttle})) or None


def spread_words(row: Row) -> str:
    """Return the spread of a row; "unknown" above the time itself."""
    value = row.get("spread_pct")
    is_known = not isinstance(value, float) or value <= _LARGEST_SPREAD_PCT
    return PERCENT.show(value) if is_known else "unknown"


def rank_words(row: Row) -> str:
    """Return the rank of a row; "all" of several."""
    rank = row["rank"]
    return ("all" if row["num_ranks"] != 1 else "") if rank is None else str(rank)


def status_words(row: Row) -> str:
    """Return the outcome of a row where it is not just measured."""
    above = "above limit" if row["over_limit"] else ""
    return above if row["status"] == "measured" else f"{row['status']} {above}".strip()


def figure(of: Callable[[Any], object]) -> Callable[[Any], object]:
    """Make a column of an outcome's figures that is empty without a measurement."""
    return lambda outcome: None if outcome.figures is None else of(outcome.figures)
