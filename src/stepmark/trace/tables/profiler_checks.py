"""Check a table of the PyTorch profiler: which figures are impossible, and why.

Rules, one flag per figure:

    negative     a time below 0
    self-total   self time above the total, which contains it
    average      average x calls is not the total
    percent      the share is not that of the sum which the other rows have
    over-all     a device row, or a self time, above the sum of all self times
    concurrent   device time so far above the time of the steps that more than
                 MAX_CONCURRENT kernels would have to run at once all the time
    host-call    device time on a call of the CUDA, HIP or Level Zero runtime
    marker       markers that PyTorch-ROCm before 2.1.2 counted as device time
    order        one row above the one before it, in a table that is sorted otherwise

Two figures disagree only if no true values round to both.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from stepmark.core.profiler_table import (
    Figure,
    Flag,
    ProfilerTable,
    RowKind,
    TableRow,
)
from stepmark.core.units import format_time
from stepmark.trace.tables.printed_figures import common_interval

MAX_CONCURRENT = 8
_SIDES = ("cpu", "device")
_MIN_AGREEMENT = 0.6
_MIN_SORTED = 6  # rows, from which on one row out of order is an exception
_SLACK = 1e-6
Span = tuple[float, float]


def sums_of_self(table: ProfilerTable) -> dict[str, Span]:
    """Return the sums of all self times, in ns, by side: as printed, or from the shares.

    A side without a sum, or whose shares do not agree on one, is left out.
    """
    sums: dict[str, Span] = {}
    for side in _SIDES:
        spans = [span for _, _, span in _shares(table.rows, side)]
        if printed := table.totals.get(f"self_{side}"):
            sums[side] = (printed.low, printed.high)
        elif common := common_interval(spans, _MIN_AGREEMENT):
            sums[side] = common
    return sums


def steps_row(table: ProfilerTable) -> TableRow | None:
    """Return the row of ProfilerStep on the host."""
    rows = (row for row in table.rows if row.name.startswith("ProfilerStep"))
    return next((row for row in rows if row.value("cpu")), None)


def flags(table: ProfilerTable) -> Iterator[Flag]:
    """Yield the figures that cannot be, in the order of the rules."""
    sums = sums_of_self(table)
    found = [flag for row in table.rows for flag in _of_row(table, row, sums)]
    yield from (*found, *_percents(table, sums), *_order(table))


def _of_row(table: ProfilerTable, row: TableRow, sums: Mapping[str, Span]) -> Iterator[Flag]:
    calls = row.value("calls")
    for key, figure in row.figures.items():
        if figure.high < 0 and not key.endswith("_mem"):
            yield flag_on(table, row, key, "negative", "a time is not below 0")
    for side in _SIDES:
        own, total, average = map(row.figures.get, (f"self_{side}", side, f"{side}_avg"))
        if own and total and own.low > total.high * (1 + _SLACK):
            reason = f"above {table.columns[side]} {total.printed}, which contains it"
            yield flag_on(table, row, f"self_{side}", "self-total", reason)
        if total and average and calls is not None:
            low, high = average.low * calls, average.high * calls
            if not _overlap((total.low, total.high), (low, high)):
                reason = f"{average.printed} x {calls:.0f} calls is {time_text(low, high)}"
                yield flag_on(table, row, side, "average", reason)
    yield from _of_device(table, row, sums.get("device"))


def _of_device(table: ProfilerTable, row: TableRow, everything: Span | None) -> Iterator[Flag]:
    own, steps = row.figures.get("self_device"), steps_row(table)
    if own and own.value > 0 and row.kind is RowKind.HOST_CALL:
        reason = "a call of the runtime runs nothing on the device; the time is of other rows"
        yield flag_on(table, row, "self_device", "host-call", reason)
    if row.kind is RowKind.MARKER:
        reason = "markers of PyTorch-ROCm before 2.1.2 are no work of the device"
        yield flag_on(table, row, "self_device", "marker", reason)
    if row.kind in (RowKind.HOST_CALL, RowKind.MARKER) or (
        own and own.value and row.kind is RowKind.ANNOTATION
    ):
        return  # torch copies annotations to the device, and leaves them out of its sum
    for key in ("self_device", "device"):
        figure = row.figures.get(key)
        if figure is None:
            continue
        if everything and figure.low > everything[1] * (1 + _SLACK):
            reason = f"above the Self {table.device} of all rows, {time_text(*everything)}"
            yield flag_on(table, row, key, "over-all", reason)
        wall = steps.value("cpu") if steps else None
        if wall and figure.low > MAX_CONCURRENT * wall:
            reason = (
                f"it takes {figure.value / wall:.0f} kernels at once through all of the "
                f"{format_time(wall / 1e9)} of the steps"
            )
            yield flag_on(table, row, key, "concurrent", reason)


def _shares(rows: Sequence[TableRow], side: str) -> Iterator[tuple[TableRow, str, Span]]:
    """Yield (row, key of the share, sum of all by this share)."""
    for row in rows:
        for key in (f"self_{side}", side):
            time, share = row.figures.get(key), row.figures.get(f"{key}_pct")
            # Rows that ran in another thread than they began in have a total, but no share.
            if not time or not share or time.value <= 0 or "%" not in share.printed:
                continue
            high = 100 * time.high / share.low if share.low > 0 else float("inf")
            yield row, f"{key}_pct", (100 * time.low / share.high, high)


def _percents(table: ProfilerTable, sums: Mapping[str, Span]) -> Iterator[Flag]:
    for side in _SIDES:
        everything = sums.get(side)
        for row, key, span in _shares(table.rows, side) if everything else ():
            if everything and not _overlap(everything, span):
                reason = f"it makes the sum {time_text(*span)}, "
                reason += f"others make it {time_text(*everything)}"
                yield flag_on(table, row, key, "percent", reason)
        if everything is None and f"self_{side}_pct" in table.columns and table.rows:
            reason = f"the shares of Self {side} have no sum in common"
            yield flag_on(table, table.rows[0], f"self_{side}_pct", "percent", reason)


def self_times(
    rows: Sequence[TableRow], kinds: frozenset[RowKind], side: str = "device"
) -> Span | None:
    """Return the sum of the self times of rows of these kinds, or None if there are none."""
    figures = [row.figures.get(f"self_{side}") for row in rows if row.kind in kinds]
    own = [figure for figure in figures if figure]
    return (sum(each.low for each in own), sum(each.high for each in own)) if own else None


def _order(table: ProfilerTable) -> Iterator[Flag]:
    if table.sorted_by or len(table.rows) < _MIN_SORTED:
        return
    for key in table.columns:
        figures = [row.figures.get(key) for row in table.rows]
        pairs = [
            (row, after, before)
            for row, (before, after) in zip(table.rows[1:], pairwise(figures), strict=True)
            if after and before and after.value > before.value
        ]
        if len(pairs) == 1 and None not in figures:
            row, _, before = pairs[0]
            assert before is not None
            reason = f"above the row before it, {before.printed}, in a column sorted otherwise"
            yield flag_on(table, row, key, "order", reason)


def flag_on(table: ProfilerTable, row: TableRow, key: str, rule: str, reason: str) -> Flag:
    """Return a flag on one figure of a row."""
    figure: Figure | None = row.figures.get(key)
    return Flag(
        rule=rule,
        line=row.line,
        row=row.name,
        column=table.columns[key],
        printed=figure.printed if figure else "",
        reason=reason,
    )


def _overlap(left: Span, right: Span) -> bool:
    slack = _SLACK * max(abs(left[0]), abs(right[0]))
    return left[0] <= right[1] + slack and right[0] <= left[1] + slack


def time_text(low: float, high: float) -> str:
    """Return an interval of ns as text."""
    first, last = format_time(low / 1e9), format_time(high / 1e9)
    return first if first == last else f"{first} to {last}"
