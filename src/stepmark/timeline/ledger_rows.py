"""The few lines of a ledger that a reader sees first, rounded so that they still add up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.tables.columns import COUNT, Row, given
from stepmark.tables.table import Table
from stepmark.timeline.ledger import Group, Idle, Ledger, Line
from stepmark.timeline.ledger_text import UNEXPLAINED, doubt, lines_of, words_of

_SMALLEST_SHARE = 0.01  # of the step: shorter lines are one
_MOST_ROWS = 10
_MOST_APART = 3  # lines that have a row whatever their length, as causes of a difference
_PLACES = ((100e6, 1), (10e6, 2), (0.0, 3))  # of ms, by the length of the step in ns
_MOST_ROWS_ALONE = 8  # with a title, the other lines, a rule and the step they are 12 lines
_UNITS = {"s": 3, "ms": 0, "us": -3}  # powers of ten, in ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A line of one or several ledgers in ms.

    group: of one line; Idle.UNEXPLAINED for what is none; None for other lines together.
    """

    words: str
    group: Group | Idle | None
    times_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTable:
    """Rows that add up, as shown, to the step of each ledger.

    places: decimals of ms, below 0 for tens of them. unit: of what is shown.
    """

    rows: tuple[LedgerRow, ...]
    steps_ms: tuple[float, ...]
    places: int
    unit: str = "ms"

    def shown(self, time_ms: float) -> str:
        power = _UNITS[self.unit]
        return f"{time_ms / 10**power:,.{max(0, self.places + power)}f}"

    def signed(self, time_ms: float) -> str:
        return f"{time_ms:+,.{self.places}f}"


def ledger_table(
    ledgers: Sequence[Ledger], places: int | None = None, most_rows: int = _MOST_ROWS
) -> LedgerTable:
    """Return the largest lines of the ledgers by group; the others are one row.

    Of several ledgers, the lines that differ the most have a row, too.
    Unexplained time has a row of its own, the last. Times are rounded such that those of a
    ledger add up to its rounded step.
    """
    longest_ns = max(own.window_ns for own in ledgers)
    if places is None:
        places = next(places for least_ns, places in _PLACES if longest_ns >= least_ns)
    every = [line for group in Group for line in lines_of(ledgers, group)]
    lines = [line for line in every if line != UNEXPLAINED]
    longest = {line: max(abs(own.lines.get(line, 0)) for own in ledgers) for line in lines}
    has_unexplained = UNEXPLAINED in every
    large = [line for line in lines if longest[line] >= _SMALLEST_SHARE * longest_ns]
    most = most_rows - 1 if has_unexplained else most_rows
    large = sorted(large, key=lambda line: -longest[line])
    large = list(dict.fromkeys([*_most_apart(ledgers, lines, places), *large]))[:most]
    rest = [line for line in lines if line not in large]
    if len(rest) == 1:
        large = [*large, *rest]
        rest = []
    kept = [line for line in lines if line in large]
    columns = []
    for own in ledgers:
        times_ns = [own.lines.get(line, 0) for line in kept]
        times_ns += [sum(own.lines.get(line, 0) for line in rest)] if rest else []
        times_ns += [own.lines.get(UNEXPLAINED, 0)] if has_unexplained else []
        columns.append(_rounded(times_ns, places))
    names: list[tuple[str, Group | Idle | None]] = [(words_of(line), line[0]) for line in kept]
    names += [(f"{len(rest)} other lines", None)] if rest else []
    names += [(words_of(UNEXPLAINED), Idle.UNEXPLAINED)] if has_unexplained else []
    return LedgerTable(
        rows=tuple(
            LedgerRow(words=name, group=group, times_ms=times)
            for (name, group), times in zip(names, zip(*columns, strict=True), strict=True)
        ),
        steps_ms=tuple(round(sum(column), places) for column in columns),
        places=places,
    )


def _most_apart(ledgers: Sequence[Ledger], lines: Sequence[Line], places: int) -> list[Line]:
    """Return the lines with the largest differences of those that a table would show."""
    apart: dict[Line, int] = {}
    for line in lines:
        times_ns = [own.lines.get(line, 0) for own in ledgers]
        apart[line] = max(times_ns) - min(times_ns)
    shown = [line for line in lines if apart[line] >= 10 ** (6 - places)]
    return sorted(shown, key=lambda line: -apart[line])[:_MOST_APART]


def _rounded(times_ns: Sequence[int], places: int) -> list[float]:
    """Return times in ms, rounded up or down such that they add up to their rounded sum.

    Those with the largest remainder are rounded up.
    """
    unit_ns = int(10 ** (6 - places))
    units = [time_ns // unit_ns for time_ns in times_ns]
    missing = round(sum(times_ns) / unit_ns) - sum(units)
    by_remainder = sorted(range(len(units)), key=lambda i: -(times_ns[i] % unit_ns))
    for index in by_remainder[:missing]:
        units[index] += 1
    return [round(count / 10**places, places) for count in units]


def short_lines(predicted: Ledger | None, measured: Ledger) -> Iterator[str]:
    """Yield the measured ledger beside the predicted one, in ms; the last line is the step."""
    table = ledger_table([measured] if predicted is None else [predicted, measured])
    names = ["measured"] if predicted is None else ["predicted", "measured", "difference"]
    # Lines of which a profile knows too little have no share.
    yield from _lines(table, [*names, *([] if doubt(measured) else ["share"])])


def lines_of_one(ledger: Ledger, where: str = "") -> Iterator[str]:
    """Yield a ledger in at most 12 lines, the step with four digits; the last is the step."""
    exponent = int(f"{ledger.window_ns / 1e6:.3e}".partition("e")[2])
    places = min(3 - exponent, 6)
    table = ledger_table([ledger], places, _MOST_ROWS_ALONE)
    unit = next(unit for unit, power in _UNITS.items() if exponent >= power or unit == "us")
    yield from _lines(replace(table, unit=unit), ["predicted", "share"], where)


def _lines(table: LedgerTable, names: Sequence[str], where: str = "") -> Iterator[str]:
    """Yield a table under a title. where: of which stages it is, in the title."""
    columns = [given("line", heading=f"where the step goes{where}, in {table.unit}")]
    columns += [given(name, COUNT) for name in names]
    total = LedgerRow(words="step: the sum of the lines", group=None, times_ms=table.steps_ms)
    rows: list[Row] = []
    for own in (*table.rows, total):
        times = [table.shown(time_ms) for time_ms in own.times_ms]
        if "difference" in names:
            times.append(table.signed(own.times_ms[1] - own.times_ms[0]))
        share = 100 * own.times_ms[-1] / table.steps_ms[-1] if table.steps_ms[-1] else 0.0
        row: Row = dict(zip(names, times, strict=False))
        rows.append({**row, "line": own.words, "share": f"{share:.1f} %"})
    lines = Table(rows, columns).text()
    rule = "-" * max(map(len, lines))
    yield from (*lines[:-1], rule, lines[-1])
