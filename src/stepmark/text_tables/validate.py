"""Check a table's figures against each other, allowing for the rounding of print.

Rules, each at most one finding with its first lines as evidence:

    wrong-values      PROBLEM  a result was not what it must be
    size-count        WARNING  count x element and size do not fit together
    algbw-time        WARNING  algbw is not size / time
    busbw-factor      WARNING  busbw is not algbw x the collective's factor
    ranks-factor      WARNING  busbw fits another number of ranks
    slow-outlier      WARNING  one size took far longer than the sizes beside it
    placement-ratio   NOTE     out-of-place and in-place are more than 10 % apart
    rows-missing      NOTE     the footer's average or the parameters show that rows are missing

Two figures disagree only if no true values round to both. slow-outlier: time / interpolation
between both neighbours (in log size, log time) above 1.3, and one more sign: longer than the
next size's, longer than the other placement's by 10 %, or, where the table holds bandwidth
alone, a bandwidth below that of the size before. A step to a faster algorithm is no outlier.

Over 250 lines: eight rules, each with the figures that it compares.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import exp, inf, log
from operator import attrgetter

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.ground.garbage import no_collection
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.ground.units import GB, format_bytes, format_time, plural
from stepmark.model.collectives import FACTS, Collective, Parts, busbw_factor
from stepmark.text_tables import printed_figures
from stepmark.text_tables.nccl_notes import NOT_VALID, OUT_OF_BOUNDS, ROWS_MISSING
from stepmark.text_tables.printed_figures import overlap, parse_number, rounding_error

MAX_SLOW_RATIO = 1.3
MAX_PLACEMENT_RATIO = 1.1
_MAX_EVIDENCE = 5
_SLACK = 1e-9
_DECIMALS_ERROR = 2e-6  # relative, of a value that was written with six decimals
_OTHER_PLACEMENT = {OUT_OF_PLACE: IN_PLACE, IN_PLACE: OUT_OF_PLACE}
# What the readings of one series have in common.
_SERIES = attrgetter("column", "placement", "cycle", "dtype", "redop", "root")
Span = tuple[float, float]
Doubt = tuple[Reading, str]
Point = tuple[int, float, Reading]  # size, time or what is proportional to it


@no_collection()
def validate(table: Table) -> list[Finding]:
    """Return the findings on a table, worst first."""
    outlier_text = "{} took far longer than the neighbouring sizes suggest"
    placement_text = (
        "{}: out-of-place and in-place are more than 10 % apart; slow first sizes may be the "
        "first use of a connection (-w 20)"
    )
    doubts = _placement_doubts(table)
    findings = [
        _wrong_values(table),
        _finding(table, "size-count", _size_doubts(table), "{}: count x element is not size"),
        _algbw(table),
        _busbw(table),
        _finding(table, "slow-outlier", _outliers(table), outlier_text),
        _finding(table, "placement-ratio", doubts, placement_text, Severity.NOTE),
        _noted(table, "rows-missing", Severity.NOTE, ROWS_MISSING, "{}"),
    ]
    return [finding for finding in findings if finding]


def _finding(
    table: Table,
    rule: str,
    doubts: Iterable[Doubt],
    text: str,
    severity: Severity = Severity.WARNING,
) -> Finding | None:
    """Return a finding on all doubts, or None if there are none. `{}` is their number."""
    measurements = list(doubts)
    if not measurements:
        return None
    evidence = tuple(
        Evidence(file=table.file, line=reading.line, text=words)
        for reading, words in measurements[:_MAX_EVIDENCE]
    )
    return Finding(
        rule=rule,
        severity=severity,
        text=text.format(plural(len(measurements), "measurement")),
        evidence=evidence,
        count=len(measurements),
    )


def _noted(
    table: Table, rule: str, severity: Severity, beginning: str, text: str
) -> Finding | None:
    """Return a finding on the reader's note with this beginning, or None if there is none."""
    note = next((note for note in table.notes if note.startswith(beginning)), "")
    if not note:
        return None
    evidence = (Evidence(file=table.file, line=table.last_line, text=note),)
    return Finding(rule=rule, severity=severity, text=text.format(note), evidence=evidence)


def _wrong_values(table: Table) -> Finding | None:
    doubts = [
        (reading, f"{_name_of(reading)}: {reading.num_wrong} wrong elements")
        for reading in table.readings
        if reading.num_wrong
    ]
    text = "{} with wrong results: the data that arrived was not what was sent"
    severity = Severity.PROBLEM
    return (
        _finding(table, "wrong-values", doubts, text, severity)
        or _noted(table, "wrong-values", severity, OUT_OF_BOUNDS, "results out of bounds: {}")
        or _noted(table, "wrong-values", severity, NOT_VALID, "{}")
    )


def _size_doubts(table: Table) -> Iterator[Doubt]:
    """Yield rows whose size is not count x element x parts; trimmed rows may be 0."""
    facts = FACTS.get(Collective(table.collective)) if _known(table) else None
    is_whole = facts is not None and facts.parts is Parts.WHOLE
    is_uneven = table.collective == Collective.ALL_TO_ALL_V
    # Both placements of a row have the same size and count.
    rows = {
        (reading.line, reading.size_bytes, reading.count): reading for reading in table.readings
    }
    for reading in rows.values():
        itemsize = printed_figures.itemsize_of(reading.dtype)
        if not reading.count or reading.size_bytes is None or itemsize is None or is_uneven:
            continue
        unit = reading.count * itemsize
        parts = 1 if is_whole else table.num_ranks
        fits = reading.size_bytes % unit == 0
        if facts is not None and facts.parts is not Parts.PER_OTHER and parts:
            fits = reading.size_bytes == unit * parts
        if not fits:
            yield reading, f"{_name_of(reading)}: count {reading.count} x {itemsize} B"


def _algbw(table: Table) -> Finding | None:
    if table.collective == "hypercube":
        return None
    doubts, _ = _rate_doubts(table, 1, 1.0)
    return _finding(table, "algbw-time", doubts, "{}: algbw is not size / time")


def _rate_doubts(table: Table, which: int, factor: float) -> tuple[list[Doubt], int]:
    """Return where algbw (1) or busbw (2) is not factor x size / time, and how many say.

    Without a time, busbw is compared with algbw.
    """
    inexact = _inexact(table, which, factor)
    doubts = []
    checked = len(table.readings) - len(inexact)
    for reading in inexact:
        expected = _expected(reading, factor)
        printed = _rate_span(reading, which)
        algbw = _rate_span(reading, 1)
        if expected is None and which == 2 and algbw:
            expected = algbw[0] * factor, algbw[1] * factor
        if expected and printed:
            checked += 1
            if not overlap(expected, printed, _SLACK):
                doubts.append((reading, f"{_name_of(reading)}: {_against(printed, expected)}"))
    return doubts, checked


def _busbw(table: Table) -> Finding | None:
    if not _known(table) or not table.num_ranks:
        return None
    factor = busbw_factor(Collective(table.collective), table.num_ranks)
    doubts, checked = _rate_doubts(table, 2, factor)
    if 2 * len(doubts) > checked:
        without_counts = [replace(reading, count=None) for reading in table.readings]
        fits, reason = printed_figures.num_ranks_of(without_counts, table.collective)
        if fits and fits != table.num_ranks:
            text = f"{{}}: busbw is not that of {table.num_ranks} ranks ({reason})"
            return _finding(table, "ranks-factor", doubts, text)
    text = f"{{}}: busbw is not algbw x {factor:.6g}, the factor of {table.num_ranks} ranks"
    return _finding(table, "busbw-factor", doubts, text)


def _outliers(table: Table) -> Iterator[Doubt]:
    readings: dict[tuple[int, str], Reading] = {}
    for points in _series(table):
        for index in range(1, len(points) - 1):
            before = points[index - 1]
            this = points[index]
            after = points[index + 1]
            size, time, reading = this
            if time <= MAX_SLOW_RATIO * min(before[1], after[1]):
                continue  # an interpolation is not below both
            share = log(size / before[0]) / log(after[0] / before[0])
            expected = exp(log(before[1]) * (1 - share) + log(after[1]) * share)
            if time <= MAX_SLOW_RATIO * expected:
                continue
            if not readings:
                readings = {(each.line, each.placement): each for each in table.readings}
            if signs := _signs(readings, before, this, after):
                words = f"{time / expected:.2f} times what its neighbours suggest"
                yield reading, f"{_name_of(reading)}: {words}; {', '.join(signs)}"


def _signs(
    readings: Mapping[tuple[int, str], Reading], before: Point, this: Point, after: Point
) -> list[str]:
    """Return the signs that a row is slow by accident and not by a change of algorithm."""
    signs = []
    if this[1] > after[1]:
        signs.append(f"slower than {format_bytes(after[0])}")
    if this[2].time_s is None and this[1] / this[0] > before[1] / before[0]:
        signs.append(f"below the bandwidth of {format_bytes(before[0])}")
    placement = _OTHER_PLACEMENT.get(this[2].placement, "")
    other = readings.get((this[2].line, placement)) if placement else None
    if other and other.time_s and this[1] > MAX_PLACEMENT_RATIO * other.time_s:
        signs.append(f"{this[1] / other.time_s:.2f} times its {other.placement} time")
    return signs


def _series(table: Table) -> list[list[Point]]:
    """Return rows that differ in size alone, by size."""
    series: dict[tuple[object, ...], dict[int, Point]] = {}
    for reading in table.readings:
        size = reading.size_bytes
        time = reading.time_s
        if time is None and reading.rate and size:
            time = size / reading.rate  # proportional to the time
        if time and size:
            series.setdefault(_SERIES(reading), {}).setdefault(size, (size, time, reading))
    return [[points[size] for size in sorted(points)] for points in series.values()]


def _placement_doubts(table: Table) -> Iterator[Doubt]:
    waiting: dict[tuple[int, int | None, int], Reading] = {}
    for reading in table.readings:
        key = (reading.line, reading.size_bytes, reading.cycle)
        if reading.placement == OUT_OF_PLACE:
            waiting[key] = reading
        elif reading.placement == IN_PLACE and (out := waiting.pop(key, None)):
            if not out.time_s or not reading.time_s:
                continue
            ratio = out.time_s / reading.time_s
            if max(ratio, 1 / ratio) > MAX_PLACEMENT_RATIO:
                times = f"{format_time(out.time_s)} / {format_time(reading.time_s)}"
                size = format_bytes(reading.size_bytes or 0)
                yield out, f"{size}: out-of-place / in-place {times} = {ratio:.3f}"


def _inexact(table: Table, which: int, factor: float) -> list[Reading]:
    """Return those whose algbw (1) or busbw (2) is not, in all digits, factor x size / time.

    It is the quick test that most figures pass; the spans of the others decide.
    """
    inexact = []
    for reading in table.readings:
        time_s = reading.time_s
        size = reading.size_bytes
        if time_s and size and reading.printed:
            text = reading.printed[which]
            printed = parse_number(text)
            rate = factor * size / time_s / GB
            if printed is not None and abs(rate - printed) < rounding_error(text):
                continue
        inexact.append(reading)
    return inexact


def _expected(reading: Reading, factor: float) -> Span | None:
    """Return the range of factor x size / time, given the rounding of the printed time."""
    if not reading.time_s or not reading.size_bytes:
        return None
    work = factor * reading.size_bytes
    half = reading.time_s * _DECIMALS_ERROR + 1e-12
    if reading.printed and (time := parse_number(reading.printed[0])):
        half = rounding_error(reading.printed[0]) * reading.time_s / time
    low = work / (reading.time_s + half)
    return low, work / (reading.time_s - half) if half < reading.time_s else inf


def _rate_span(reading: Reading, which: int) -> Span | None:
    """Return the range of the printed algbw (1) or busbw (2), in bytes/s."""
    if reading.printed is None:
        rate = reading.algbw_bytes_per_s if which == 1 else reading.busbw_bytes_per_s
        if rate is None:
            return None
        return rate * (1 - _DECIMALS_ERROR) - 1e3, rate * (1 + _DECIMALS_ERROR) + 1e3
    value = parse_number(reading.printed[which])
    half = rounding_error(reading.printed[which])
    return None if value is None else ((value - half) * GB, (value + half) * GB)


def _against(printed: Span, expected: Span) -> str:
    low = expected[0] / GB
    high = expected[1] / GB
    middle = (printed[0] + printed[1]) / 2 / GB
    return f"{middle:.6g} GB/s printed, {low:.6g} to {high:.6g} by its time"


def _known(table: Table) -> bool:
    return table.collective in set(Collective)


def _name_of(reading: Reading) -> str:
    size = reading.label or format_bytes(reading.size_bytes or 0)
    return " ".join(filter(None, (size, reading.placement, reading.column)))
