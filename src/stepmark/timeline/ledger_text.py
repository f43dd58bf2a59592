"""Ledgers of steps as rows, in ns, and as text, in ms: of traces, and two beside each other."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from stepmark.ground.units import ranks_text
from stepmark.tables.columns import (
    COUNT,
    FLAG,
    MS,
    NO_HEADING,
    NUMBER,
    PERCENT,
    SHARE,
    SIGNED_MS,
    SIGNED_PERCENT,
    TEXT,
    Column,
    Row,
    digits,
    given,
    rows_of,
)
from stepmark.tables.outcomes import megahertz
from stepmark.tables.table import Table
from stepmark.timeline.ledger import (
    Group,
    Idle,
    Ledger,
    Line,
    MeasuredLedger,
    StepPower,
)
from stepmark.timeline.trace_breakdown import StepTimes

DEFINITIONS = "docs/traces.md"
NAMES = ("predicted", "measured")
_MOST_UNEXPLAINED_PCT = 10.0  # of a step whose profile tells where its time goes
UNEXPLAINED: Line = Group.IDLE, str(Idle.UNEXPLAINED)
UNDER_COMMUNICATION = " under communication"
_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Ledger of a step of one rank's trace."""

    rank: int
    times: StepTimes
    ledger: Ledger

    @property
    def step(self) -> int | None:
        return self.times.step


# Ledger, group, line, time, and whether it counts: parts of lines do not.
_Item = tuple[RankLedger, str, str, int, bool]
STEP_COLUMNS: tuple[Column[_Item], ...] = (
    Column("rank", lambda o: o[0].rank, COUNT),
    Column("device", lambda o: o[0].times.device, COUNT),
    Column("step", lambda o: o[0].step, COUNT),
    Column("window_ns", lambda o: o[0].ledger.window_ns, COUNT),
    Column("group", lambda o: o[1], TEXT),
    Column("line", lambda o: o[2], TEXT),
    Column("time_ns", lambda o: o[3], COUNT),
    Column("share_pct", lambda o: 100 * o[3] / (o[0].ledger.window_ns or 1), PERCENT),
    Column("is_part", lambda o: o[4], FLAG),
)


def step_rows(steps: Sequence[RankLedger]) -> list[Row]:
    """Return a row per line of each step. Rows that are no parts add up to the window."""
    items: list[_Item] = []
    parts = _part_names([each.ledger for each in steps])
    for each in steps:
        lines = sorted(each.ledger.lines.items(), key=lambda item: -item[1])
        items += [(each, str(group), name, ns, False) for (group, name), ns in lines]
        within = each.ledger.within.items()
        items += [(each, "within", name, ns, True) for name, ns in within if name in parts]
    return rows_of(STEP_COLUMNS, items)


def step_lines(steps: Sequence[RankLedger]) -> Iterator[str]:
    """Yield each line of the steps: mean, share, spread over ranks and steps."""
    if not steps:
        yield "no times of any step"
        return
    ledgers = [each.ledger for each in steps]
    window_ns = mean(each.window_ns for each in ledgers)
    parts = [(t, [ns for ns in times if ns is not None]) for t, times in _parts(ledgers)]
    table = [(title, times, window_ns) for title, times in (*_table(ledgers), *parts)]
    yield from spread_lines(_which(steps), table, several=len(steps) > 1)
    yield from ["", f"Definitions: {DEFINITIONS}."]


def spread_lines(
    which: str, parts: Iterable[tuple[str, Sequence[int], float]], *, several: bool
) -> list[str]:
    """Return the parts of steps, in ms: mean, share, and of several the spread.

    which: the steps. parts: title, nanoseconds of each step, nanoseconds of the whole.
    """
    columns = (
        given("part", heading=f"{which}, in ms"),
        given("mean_ns", MS, "mean" if several else "time"),
        given("share_pct", SHARE, "share"),
        *((given("min_ns", MS, "min"), given("median_ns", MS, "median")) if several else ()),
        *((given("max_ns", MS, "max"),) if several else ()),
    )
    rows: list[Row] = [
        {
            "part": part,
            "mean_ns": mean(times_ns),
            "share_pct": 100 * mean(times_ns) / whole_ns if whole_ns else "n/a",
            "min_ns": min(times_ns),
            "median_ns": median(times_ns),
            "max_ns": max(times_ns),
        }
        for part, times_ns, whole_ns in parts
    ]
    return Table(rows, columns).text()


def _which(steps: Sequence[RankLedger]) -> str:
    numbers = {each.step for each in steps if each.step is not None}
    which = ranks_text(numbers).replace("rank", "step") if numbers else "whole trace"
    text = f"{which} of {ranks_text({each.rank for each in steps})}"
    is_host = all(each.times.device is None for each in steps)
    return f"{text} on the host (no GPU events)" if is_host else text


def _table(ledgers: Sequence[Ledger]) -> Iterator[tuple[str, list[int]]]:
    """Yield titles, indented, with the times of each ledger: step, groups, lines.

    Unexplained time is none of a group: it may be negative, which idle time is not.
    """
    yield "step", [own.window_ns for own in ledgers]
    rest = [own.lines.get(UNEXPLAINED, 0) for own in ledgers]
    for group in Group:
        if lines := [line for line in lines_of(ledgers, group) if line != UNEXPLAINED]:
            totals = [own.total(group) for own in ledgers]
            if group is Group.IDLE:
                totals = [total - ns for total, ns in zip(totals, rest, strict=True)]
            yield f"  {group}", totals
            for line in lines:
                yield f"    {line[1]}", [own.lines.get(line, 0) for own in ledgers]
    if any(rest):
        yield f"  {Idle.UNEXPLAINED}", rest


def _parts(ledgers: Sequence[Ledger]) -> Iterator[tuple[str, list[int | None]]]:
    """Yield titles and times of what lines consist of; None where it is not known."""
    for name in _part_names(ledgers):
        yield f"of which {name}", [own.within.get(name) for own in ledgers]


def _part_names(ledgers: Sequence[Ledger]) -> list[str]:
    """Return the names of parts that any ledger has."""
    return list(dict.fromkeys(name for own in ledgers for name, ns in own.within.items() if ns))


def lines_of(ledgers: Sequence[Ledger], group: Group) -> list[Line]:
    """Return the lines of a group in any of the ledgers, the largest first."""
    lines = {line for own in ledgers for line in own.lines if line[0] is group}
    return sorted(lines, key=lambda n: (-max(abs(o.lines.get(n, 0)) for o in ledgers), n[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A line of two ledgers."""

    line: Line
    first_ns: int
    second_ns: int

    @property
    def ns(self) -> int:
        return self.second_ns - self.first_ns


def differences(first: Ledger, second: Ledger) -> list[Difference]:
    """Return every line of either ledger, by group, the largest first."""
    return [
        Difference(
            line=line,
            first_ns=first.lines.get(line, 0),
            second_ns=second.lines.get(line, 0),
        )
        for group in Group
        for line in lines_of((first, second), group)
    ]


def largest_difference(first: Ledger, second: Ledger) -> Difference:
    """Return the line that explains most of the difference of the steps, in its direction.

    Work counts alone and under communication together: how much of it communication covers
    depends on ranks that come late, not on the work.
    """
    sums: dict[Line, tuple[int, int]] = {}
    for each in differences(first, second):
        group, name = each.line
        line = (Group.COMPUTE if group is Group.OVERLAPPED else group), name
        first_ns, second_ns = sums.get(line, (0, 0))
        sums[line] = first_ns + each.first_ns, second_ns + each.second_ns
    direction = 1 if second.window_ns > first.window_ns else -1
    return max(
        (Difference(line=line, first_ns=a, second_ns=b) for line, (a, b) in sums.items()),
        key=lambda each: direction * each.ns,
    )


def absolute_ns(first: Ledger, second: Ledger) -> int:
    """Return the sum of absolute differences, which do not cancel as those of steps may."""
    return sum(abs(each.ns) for each in differences(first, second))


def difference_lines(
    first: Ledger, second: Ledger, names: tuple[str, str] = NAMES
) -> Iterator[str]:
    """Yield two ledgers as a table: times in ms, differences in % of the second step."""
    apart = f"{names[1]} - {names[0]}"
    columns = (
        given("part", heading="in ms"),
        given("first_ns", MS, names[0]),
        given("second_ns", MS, names[1]),
        given("apart_ns", SIGNED_MS, apart),
        given("apart_pct", SIGNED_PERCENT, f"% of {names[1]}"),
    )
    both = (first, second)
    step_ns = second.window_ns
    rows: list[Row] = []
    table: list[tuple[str, Sequence[int | None]]] = [*_table(both), *_parts(both)]
    for part, (first_ns, second_ns) in table:
        row: Row = {"part": part, "first_ns": first_ns, "second_ns": second_ns}
        if first_ns is not None and second_ns is not None:
            row["apart_ns"] = second_ns - first_ns
            row["apart_pct"] = percent(second_ns - first_ns, step_ns)
        rows.append(row)
    total_ns = absolute_ns(first, second)
    rows.append(
        {
            "part": "sum of absolute differences of lines",
            "apart_ns": MS.show(total_ns),
            "apart_pct": f"{percent(total_ns, step_ns):.1f}" if step_ns else None,
        }
    )
    yield from Table(rows, columns).text()


_Quantity = tuple[str, str, float | None, float | None]  # name, unit, predicted, measured
POWER_COLUMNS: tuple[Column[_Quantity], ...] = (
    Column("quantity", lambda o: o[0], TEXT),
    Column("unit", lambda o: o[1], TEXT),
    Column("predicted", lambda o: o[2], NUMBER),
    Column("measured", lambda o: o[3], NUMBER),
    Column(
        "difference_pct",
        lambda o: None if not o[3] or o[2] is None else 100 * (1 - o[2] / o[3]),
        PERCENT,
    ),
)


def power_rows(predicted: StepPower, measured: StepPower) -> list[Row]:
    """Return clock, power and energy of the step on one GPU, as predicted and measured."""
    items: list[_Quantity] = [
        ("SM clock", "MHz", megahertz(predicted.clock_hz), megahertz(measured.clock_hz)),
        ("power", "W", predicted.power_w, measured.power_w),
        ("energy", "J", predicted.energy_j, measured.energy_j),
    ]
    return rows_of(POWER_COLUMNS, items)


def power_lines(predicted: StepPower, measured: StepPower) -> Iterator[str]:
    """Yield the rows that are known on either side; what is unknown is n/a."""
    columns = (
        given("quantity", heading=NO_HEADING, words="{quantity} ({unit})".format_map),
        given("predicted", NUMBER),
        given("measured", NUMBER),
        given("difference_pct", SIGNED_PERCENT, "measured - predicted, % of measured"),
    )
    unknown = {"predicted": "n/a", "measured": "n/a"}
    rows = [
        unknown | {name: value for name, value in row.items() if value is not None}
        for row in power_rows(predicted, measured)
        if (row["predicted"], row["measured"]) != (None, None)
    ]
    yield from Table(rows, columns).text()


def source_line(measured: MeasuredLedger) -> str:
    """Return which step was measured, and what became of the profiler's cost."""
    if measured.profiled is None:
        return f"measured: the lines of rank {measured.rank}; its trace is not kept in the run"
    which = f"step {measured.step}, the median of {measured.num_steps}, of rank {measured.rank}"
    if measured.num_ranks > 1:
        which += f", which works the longest of {measured.num_ranks}"
    cost_ns = measured.profiled.window_ns - measured.ledger.window_ns
    than = f"{MS.show(abs(cost_ns))} ms {'more' if cost_ns > 0 else 'less'} than without it"
    text = f"{which}: {MS.show(measured.profiled.window_ns)} ms with the profiler, {than}"
    if rest_ns := measured.ledger.lines.get(UNEXPLAINED, 0):
        text += f"; {MS.show(rest_ns)} ms are unexplained"
    return f"measured: {text}"


def doubt(measured: Ledger) -> str:
    """Return why the lines are not known; "" where the profile explains the step."""
    rest_ns = measured.lines.get(UNEXPLAINED, 0)
    share = percent(rest_ns, measured.window_ns)
    if abs(share) < _MOST_UNEXPLAINED_PCT:
        return ""
    text = f"the profile leaves {in_ms(rest_ns)} ms ({share:.1f} %) of the step unexplained"
    if rest_ns < 0:
        more = f"{in_ms(-rest_ns)} ms ({-share:.1f} %)"
        text = f"what was profiled takes {more} longer than the step without the profiler"
    return f"{text}: its lines, and what there is to gain, are not known"


def words_of(line: Line) -> str:
    """Return a line in words, without its group's heading."""
    group, name = line
    return {
        Group.COMPUTE: name,
        Group.OVERLAPPED: name + UNDER_COMMUNICATION,
        Group.COMM: f"exposed {name}",
        Group.COPIES: f"exposed {name}",
        Group.IDLE: f"idle time ({name})" if name != Idle.UNEXPLAINED else "unexplained time",
    }[group]


def percent(part: float, whole: float) -> float:
    """Return a share in percent, 0 of nothing."""
    return 100 * part / whole if whole else 0.0


def in_ms(nanoseconds: float) -> str:
    """Return milliseconds with three digits."""
    return digits(nanoseconds / _MS, 3)
