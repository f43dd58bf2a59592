"""Columns of the rows of collectives. One row per case, its launches pooled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from operator import itemgetter
from statistics import fmean, median

from stepmark.cases.case import Label
from stepmark.cases.comm_case import CommCase
from stepmark.cases.fields import declared, in_words
from stepmark.cases.record import CommMemory, Record, RunInfo, Samples, Telemetry
from stepmark.ground.stats import Summary, quantile, summarize
from stepmark.ground.units import GB, format_bytes
from stepmark.model.collectives import Collective
from stepmark.model.device import DeviceSpec
from stepmark.store.commands import command_of
from stepmark.tables.columns import (
    BYTES,
    CONSOLE,
    COUNT,
    FLAG,
    NUMBER,
    PAGE,
    PERCENT,
    RATIO,
    SECONDS,
    SHOWN,
    TEXT,
    Column,
    Row,
    case_columns,
    number,
    rows_of,
)
from stepmark.tables.launches import CommLaunches, pooled
from stepmark.tables.outcomes import (
    LIMIT_SLACK,
    megahertz,
    percent,
    spread_pct,
    status_words,
    throttle_reasons,
    validity,
)

# NVLS and SHARP reduce or copy in the switch: the busbw of these can exceed the link's.
_IN_NETWORK = {
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.REDUCE,
    Collective.BROADCAST,
    Collective.ALL_GATHER,
}


@dataclass(frozen=True, kw_only=True)
class CommOutcome:
    """A case with all its launches, compared with a device. Times are the slowest rank's."""

    launches: CommLaunches
    run: RunInfo
    device: DeviceSpec | None

    @property
    def case(self) -> CommCase:
        return self.launches.case

    @cached_property
    def samples(self) -> list[float]:
        return sorted(value for values in self.launches.slowest_s for value in values)

    @cached_property
    def times(self) -> Summary:
        return summarize(self.samples)

    @property
    def cv_pct(self) -> float | None:
        times = self.times
        samples = (value for values in self.launches.slowest_s for value in values)
        squares = sum((value - times.mean) ** 2 for value in samples)
        return 100 * sqrt(squares / times.n) / times.mean if times.n > 1 else None

    @cached_property
    def slowest(self) -> int:
        """Return the index of the slowest rank among the members."""
        medians = self.launches.rank_medians_s
        return medians.index(max(medians))

    @cached_property
    def waited_for(self) -> tuple[int | None, float | None]:
        return self.launches.waited_for() or (None, None)

    @cached_property
    def beside_s(self) -> tuple[float, float] | None:
        return self.launches.beside_s()

    @property
    def bytes_per_s(self) -> float | None:
        """Return algbw = S / time, as nccl-tests."""
        is_barrier = self.case.collective is Collective.BARRIER
        return None if is_barrier else self.case.message_bytes / self.launches.time_s

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Return busbw = algbw x factor."""
        algbw = self.bytes_per_s
        return None if algbw is None else algbw * self.case.busbw_factor

    @property
    def pct_link(self) -> float | None:
        return percent(self.bus_bytes_per_s, self._link_bytes_per_s)

    @property
    def over_limit(self) -> bool | None:
        busbw = self.bus_bytes_per_s
        link = self._link_bytes_per_s
        reduced = self.run.environment.variables.get("NCCL_NVLS_ENABLE") != "0"
        if link is None or busbw is None or (self.case.collective in _IN_NETWORK and reduced):
            return None
        return busbw > link * LIMIT_SLACK

    @property
    def _link_bytes_per_s(self) -> float | None:
        """Return the bandwidth of a device's links per direction; None between hosts."""
        case = self.case
        device = self.device
        if device is None or case.device == "cpu" or case.num_ranks < 2:
            return None
        devices = self.run.environment.devices
        hosts = {info.host for info in devices if info.rank in case.members}
        return device.link_bytes_per_s if len(hosts) <= 1 else None

    @property
    def _states(self) -> list[tuple[Telemetry, ...]]:
        """Return the states of the devices by launch, where every rank's was read."""
        states = (record.telemetry for record in self.launches.measured)
        return [each for each in states if len(each) == len(self.case.members)]

    def state(self, name: str) -> float | None:
        """Return a reading of the slowest rank's device: the median of launches."""
        readings = (getattr(states[self.slowest], name) for states in self._states)
        values = [value for value in readings if value is not None]
        return median(values) if values else None

    @property
    def throttle(self) -> str | None:
        """Return why any rank's device was slowed."""
        return throttle_reasons(state for states in self._states for state in states)

    @property
    def validity(self) -> str | None:
        spreads = (spread_pct(self.times), self.launches.launch_spread_pct)
        return validity(
            self._states, *spreads, records=self.launches.measured, above_limit=self.over_limit
        )

    @property
    def slowest_rank(self) -> int | None:
        members = self.case.members
        return members[self.slowest] if len(members) > 1 else None

    @property
    def issue_s(self) -> float | None:
        """Return the time to issue a call; None on a CPU, where a call returns when done."""
        return None if self.case.device == "cpu" else self.launches.issue_s()

    @cached_property
    def memory(self) -> CommMemory | None:
        return self.launches.memory()

    @property
    def by_launch(self) -> list[Samples]:
        return [record.samples for record in self.launches.measured]

    @property
    def warmup_calls(self) -> int | None:
        arrivals = (record.arrivals for record in self.launches.measured)
        return min((arrival.warmup_calls for arrival in arrivals if arrival), default=None)


def shape_text(case: CommCase) -> str:
    """Return size, ranks and settings that are not the default, as one reads them aloud."""
    words = [] if case.collective is Collective.BARRIER else [format_bytes(case.message_bytes)]
    words.append(f"{case.pair[0]}->{case.pair[1]}" if case.pair else f"x{case.num_ranks}")
    words += ["in-place"] if case.in_place else []
    words += [f"root {case.root}"] if case.root > 0 else []
    words += [case.mode.value] if not case.has_default_mode else []
    values = {field.name: field.value(case) for field in declared(CommCase)}
    return " ".join([*words, *in_words(CommCase, values)])


def _joined(words: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(words)) or None


def figure(of: Callable[[CommOutcome], object]) -> Callable[[CommOutcome], object]:
    """Make a column that is empty without a measurement."""
    return lambda outcome: of(outcome) if outcome.launches.measured else None


COMM_COLUMNS: tuple[Column[CommOutcome], ...] = (
    Column("family", lambda o: o.case.family),
    Column("model", lambda o: _joined(label.model for label in o.case.labels), views=SHOWN),
    Column("role", lambda o: _joined(map(_role, o.case.labels)), TEXT, "message", SHOWN),
    Column("collective", lambda o: o.case.collective.value, views=SHOWN),
    Column("shape", lambda o: shape_text(o.case)),
    Column("size_bytes", lambda o: o.case.message_bytes, BYTES, "size", SHOWN),
    *case_columns(CommCase, lambda o: o.case),
    Column("case_id", lambda o: o.case.case_id),
    Column("run_id", lambda o: o.run.run_id),
    Column("command", lambda o: command_of(o.case)),
    Column("time_s", figure(lambda o: o.launches.time_s), SECONDS, "time", SHOWN),
    Column(
        "time_min_s", figure(lambda o: o.launches.time_min_s), SECONDS, "fastest rank", PAGE
    ),
    # As -a 0 to 2 of nccl-tests, which also has the fastest rank where ranks do not wait.
    Column("rank0_s", figure(lambda o: o.launches.time_over_ranks_s(itemgetter(0))), SECONDS),
    Column("rank_mean_s", figure(lambda o: o.launches.time_over_ranks_s(fmean)), SECONDS),
    Column("rank_min_s", figure(lambda o: o.launches.time_over_ranks_s(min)), SECONDS),
    Column("mean_s", figure(lambda o: o.times.mean), SECONDS),
    Column("p10_s", figure(lambda o: o.times.p10), SECONDS, "p10", PAGE),
    Column("p50_s", figure(lambda o: o.times.median), SECONDS, "p50", CONSOLE, 6),
    Column("p90_s", figure(lambda o: o.times.p90), SECONDS, "p90", PAGE),
    Column("p99_s", figure(lambda o: quantile(o.samples, 0.99)), SECONDS, "p99", SHOWN, 2),
    Column("min_s", figure(lambda o: o.times.min), SECONDS, "min", SHOWN, 5),
    Column("max_s", figure(lambda o: o.times.max), SECONDS, "max", SHOWN, 5),
    Column("cv_pct", figure(lambda o: o.cv_pct), PERCENT, "cv %", SHOWN, 4),
    Column("n", figure(lambda o: o.times.n), COUNT, "", SHOWN, 5),
    Column("launches", figure(lambda o: len(o.launches.measured)), COUNT, "", SHOWN, 6),
    Column(
        "launch_spread_pct",
        figure(lambda o: o.launches.launch_spread_pct),
        PERCENT,
        "spread %",
        SHOWN,
        3,
    ),
    Column("algbw_gb_s", figure(lambda o: _gb(o.bytes_per_s)), NUMBER, "algbw GB/s", SHOWN, 3),
    Column("busbw_gb_s", figure(lambda o: _gb(o.bus_bytes_per_s)), NUMBER, "busbw GB/s", SHOWN),
    Column("num_wrong", figure(lambda o: o.launches.num_wrong), COUNT, "#wrong", SHOWN, 1),
    Column("slowest_rank", figure(lambda o: o.slowest_rank), COUNT, "slowest rank", SHOWN, 4),
    Column(
        "waited_for_rank", figure(lambda o: o.waited_for[0]), COUNT, "waited for rank", SHOWN, 3
    ),
    Column("waited_for_s", figure(lambda o: o.waited_for[1]), SECONDS, "by", SHOWN, 3),
    Column("late_s", figure(lambda o: o.launches.late_s()), SECONDS, "start skew", SHOWN, 4),
    Column("issue_s", figure(lambda o: o.issue_s), SECONDS, "issue", SHOWN, 5),
    Column("pct_link", figure(lambda o: o.pct_link), PERCENT, "% link", SHOWN, 1),
    Column("over_limit", figure(lambda o: o.over_limit), FLAG),
    Column("beside_alone_s", figure(lambda o: o.beside_s and o.beside_s[0]), SECONDS),
    Column("beside_together_s", figure(lambda o: o.beside_s and o.beside_s[1]), SECONDS),
    Column(
        "slowdown_beside",
        figure(lambda o: o.beside_s and o.beside_s[1] / o.beside_s[0]),
        RATIO,
        "compute x alone",
        SHOWN,
    ),
    # Over the same case without compute in the same run: rows() fills it.
    Column("slowdown", lambda o: None, RATIO, "x alone", SHOWN),
    Column("method", figure(lambda o: _joined(s.method for s in o.by_launch))),
    Column(
        "calls_per_sample",
        figure(lambda o: min(s.calls_per_sample for s in o.by_launch)),
        COUNT,
    ),
    Column("warmup_calls", figure(lambda o: o.warmup_calls), COUNT),
    Column("init_memory_bytes", figure(lambda o: o.memory and o.memory.init_bytes), COUNT),
    Column("buffer_memory_bytes", figure(lambda o: o.memory and o.memory.buffer_bytes), COUNT),
    Column("call_memory_bytes", figure(lambda o: o.memory and o.memory.call_bytes), COUNT),
    Column("started_at", figure(lambda o: o.launches.measured[-1].started_at), NUMBER),
    Column("power_w", figure(lambda o: o.state("power_w")), NUMBER, "W", PAGE),
    Column(
        "clock_mhz", figure(lambda o: megahertz(o.state("sm_clock_hz"))), NUMBER, "MHz", PAGE
    ),
    Column("throttle", figure(lambda o: o.throttle), TEXT, "throttled", PAGE),
    Column("status", lambda o: o.launches.status, views=SHOWN, words=status_words),
    Column("message", lambda o: o.launches.message),
    Column("validity", figure(lambda o: o.validity), views=SHOWN),
    Column(
        "sets",
        figure(lambda o: min(s.num_sets for s in o.by_launch)),
        COUNT,
        views=CONSOLE,
        leaves=8,
    ),
)


def rows(
    records: Iterable[Record], run: RunInfo, device: DeviceSpec | None = None
) -> list[Row]:
    """Return one flat row per case of communication."""
    collectives = (record for record in records if isinstance(record.case, CommCase))
    outcomes = [
        CommOutcome(launches=each, run=run, device=device)
        for each in pooled(collectives, CommLaunches)
    ]
    table = rows_of(COMM_COLUMNS, outcomes)
    keys = [(outcome.case.case_id, outcome.launches.differs) for outcome in outcomes]
    alone = {key: number(row, "time_s") for key, row in zip(keys, table, strict=True)}
    for outcome, row in zip(outcomes, table, strict=True):
        case = outcome.case
        key = (replace(case, beside="").case_id, outcome.launches.differs)
        base = alone.get(key) if case.beside else None
        time_s = number(row, "time_s")
        row["slowdown"] = time_s / base if base and time_s else None
    return table


def _role(label: Label) -> str:
    return label.role + (f" mbs {label.mbs}" if label.mbs else "")


def _gb(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / GB
