"""Ledgers of steps as rows, in ns, and as text, in ms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from stepmark.core.columns import COUNT, FLAG, PERCENT, TEXT, Column, Row, aligned
from stepmark.core.columns import rows as rows_of
from stepmark.core.ledger import Group, Ledger, Line
from stepmark.core.trace_breakdown import StepTimes
from stepmark.core.units import ranks_text

DEFINITIONS = "docs/traces.md"
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
    for each in steps:
        lines = sorted(each.ledger.lines.items(), key=lambda item: -item[1])
        items += [(each, str(group), name, ns, False) for (group, name), ns in lines]
        items += [(each, "within", name, ns, True) for name, ns in each.ledger.within.items()]
    return rows_of(STEP_COLUMNS, items)


def step_lines(steps: Sequence[RankLedger]) -> Iterator[str]:
    """Yield each line of the steps: mean, share, spread over ranks and steps."""
    if not steps:
        yield "no times of any step"
        return
    ledgers = [each.ledger for each in steps]
    several = len(steps) > 1
    titles = ("mean", "share", "min", "median", "max") if several else ("time", "share")
    cells = [[f"{_which(steps)}, in ms", *titles]]
    total_ns = sum(each.window_ns for each in ledgers)
    for title, values in _table(ledgers):
        share = f"{100 * sum(values) / total_ns:.1f} %" if total_ns else "n/a"
        spread = (min(values), median(values), max(values)) if several else ()
        cells.append([title, _ms(mean(values)), share, *map(_ms, spread)])
    yield from aligned(cells, [False, *[True] * len(titles)])
    yield from ["", f"Definitions: {DEFINITIONS}."]


def _which(steps: Sequence[RankLedger]) -> str:
    numbers = {each.step for each in steps if each.step is not None}
    which = ranks_text(numbers).replace("rank", "step") if numbers else "whole trace"
    is_host = all(each.times.device is None for each in steps)
    where = " on the host (no GPU events)" * is_host
    return f"{which} of {ranks_text({each.rank for each in steps})}{where}"


def _table(ledgers: Sequence[Ledger]) -> Iterator[tuple[str, list[int]]]:
    """Yield titles, indented, with the times of each ledger: step, groups, lines, parts."""
    yield "step", [own.window_ns for own in ledgers]
    for group in Group:
        if lines := lines_of(ledgers, group):
            yield f"  {group}", [own.total(group) for own in ledgers]
            for line in lines:
                yield f"    {line[1]}", [own.lines.get(line, 0) for own in ledgers]
    for name in dict.fromkeys(name for own in ledgers for name in own.within):
        yield f"of which {name}", [own.within.get(name, 0) for own in ledgers]


def lines_of(ledgers: Sequence[Ledger], group: Group) -> list[Line]:
    """Return the lines of a group in any of the ledgers, the largest first."""
    lines = {line for own in ledgers for line in own.lines if line[0] is group}
    return sorted(lines, key=lambda n: (-max(abs(o.lines.get(n, 0)) for o in ledgers), n[1]))


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / _MS:.3f}"
