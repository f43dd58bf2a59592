"""Say which figures of a table are impossible, and whether communication bounds the job.

Two figures disagree only if no true values round to both. A table shows some rows and the sum
of all, so communication is an interval; docs/traces.md says what each end rests on.
"""

from collections.abc import Iterator, Mapping

from stepmark.text_tables.printed_figures import common_interval, overlap
from stepmark.text_tables.profiler_table import (
    DEVICE_WORK,
    Communication,
    Flag,
    ProfilerTable,
    RowKind,
    Span,
    TableRow,
    time_text,
)
from stepmark.text_tables.profiler_text import DAMAGED, GROUPING

_MAX_CONCURRENT = 8
_MIN_AGREEMENT = 0.6
_SLACK = 1e-6
_MAYBE_COMMUNICATION = (RowKind.COLLECTIVE, RowKind.COMM_KERNEL, RowKind.DEVICE_ROW)
# Columns without which communication is not known.
_NEEDED = {
    "self_cpu": "Self CPU",
    "cpu": "CPU total",
    "self_device": "Self CUDA (or of another device)",
    "device": "CUDA total",
}
_NO_WORK = {
    RowKind.MARKER: "markers of PyTorch-ROCm before 2.1.2 are no work of the device",
    RowKind.HOST_CALL: "a call of the runtime runs nothing on the device",
}
_Fault = tuple[str, str, str]  # column key, rule, reason


def flags(table: ProfilerTable) -> Iterator[Flag]:
    """Yield the figures that cannot be, by row."""
    sums = _sums_of(table)
    steps = _steps_ns(table)
    for row in table.rows:
        faults = (
            *_time_faults(row),
            *_share_faults(row, sums),
            *_device_faults(row, sums, steps),
        )
        for key, rule, reason in faults:
            printed = row.figures[key].printed
            yield Flag(rule, row.line, reason, row.name, table.columns[key], printed)


def _sums_of(table: ProfilerTable) -> dict[str, Span]:
    """Return the sums of all rows, in ns, by column: as printed, or from the shares."""
    sums = {key: (total.low, total.high) for key, total in table.totals.items()}
    for side in ("cpu", "device"):
        spans = [span for row in table.rows for key, span in _shares(row) if key.endswith(side)]
        common = common_interval(spans, _MIN_AGREEMENT)
        if common and f"self_{side}" not in sums:
            sums[f"self_{side}"] = common
    return sums


def _steps_ns(table: ProfilerTable) -> float | None:
    """Return the time of ProfilerStep on the host."""
    rows = (row.value("cpu") for row in table.rows if row.name.startswith("ProfilerStep"))
    return next(filter(None, rows), None)


def _time_faults(row: TableRow) -> Iterator[_Fault]:
    """Yield times that contradict each other."""
    for key, figure in row.figures.items():
        if figure.high < 0:
            yield key, "negative", "a time is not below 0"
    for side in ("cpu", "device"):
        own, total, average = map(row.figures.get, (f"self_{side}", side, f"{side}_avg"))
        if own and total and own.low > total.high * (1 + _SLACK):
            yield f"self_{side}", "self-total", f"above {total.printed}, which contains it"
        calls = row.value("calls")
        if total and average and calls is not None:
            product = (average.low * calls, average.high * calls)
            if not overlap((total.low, total.high), product, _SLACK):
                reason = f"{average.printed} x {calls:.0f} calls is {time_text(*product)}"
                yield side, "average", reason


def _share_faults(row: TableRow, sums: Mapping[str, Span]) -> Iterator[_Fault]:
    """Yield shares of another sum than that of the other rows."""
    for key, span in _shares(row):
        everything = sums.get(key) or sums.get(f"self_{key}")
        if everything and not overlap(everything, span, _SLACK):
            reason = f"it is {row.figures[f'{key}_pct'].printed} of {time_text(*span)}"
            yield key, "percent", f"{reason}, but the sum is {time_text(*everything)}"


def _shares(row: TableRow) -> Iterator[tuple[str, Span]]:
    """Yield (key of a time, the sum of all that follows from its share)."""
    for key, time in row.figures.items():
        share = row.figures.get(f"{key}_pct")
        # Rows that ran in another thread than they began in have a total, but no share.
        if share and time.value > 0:
            high = 100 * time.high / share.low if share.low > 0 else float("inf")
            yield key, (100 * time.low / share.high, high)


def _device_faults(
    row: TableRow, sums: Mapping[str, Span], steps: float | None
) -> Iterator[_Fault]:
    """Yield device time that is no work, or more than there is."""
    own = row.value("self_device")
    if own and row.kind in _NO_WORK:
        yield "self_device", row.kind.replace(" ", "-"), _NO_WORK[row.kind]
    if row.kind in _NO_WORK or (own and row.kind is RowKind.ANNOTATION):
        return  # torch copies annotations to the device, and leaves them out of its sum
    for key in ("self_device", "device", "time", "acc_time"):
        figure = row.figures.get(key)
        everything = sums.get(key) or sums.get(f"self_{key}")
        if figure and everything and figure.low > everything[1] * (1 + _SLACK):
            yield key, "over-all", f"above the sum, {time_text(*everything)}"
        if figure and steps and figure.low > _MAX_CONCURRENT * steps:
            times = f"{figure.value / steps:.0f} kernels at once"
            reason = f"it takes {times} through all of the {time_text(steps)} of the steps"
            yield key, "concurrent", reason


def communication(table: ProfilerTable) -> Communication:
    """Return what the table says of communication, with the reasons."""
    sums = _sums_of(table)
    steps = _steps_ns(table)
    everything = sums.get("self_device", (0.0, 0.0))
    # Kernels are told from operators by their lack of CPU time.
    if missing := [text for key, text in _NEEDED.items() if key not in table.columns]:
        return Communication.unknown(f"it has no {' and no '.join(missing)}")
    if any(flag.rule == DAMAGED for flag in table.flags):
        return Communication.unknown("rows of the table may be lost")
    if everything[1] <= 0:
        return Communication.unknown("neither a sum nor shares give all self device time")
    device, device_reason = _device_time(table, everything)
    low, low_reason = max(_at_least(table), default=(0.0, ""))
    limits = sorted(_at_most(table, device))
    high, high_reason = limits[0]
    host = steps or sums.get("self_cpu", (0.0, 0.0))[1]
    if host and device[0] > _MAX_CONCURRENT * host:
        times = f"device time, {time_text(*device)}, is {device[0] / host:.0f} times"
        return Communication.unknown(f"{times} the time of the host, {time_text(host)}")
    if low > high * (1 + _SLACK):
        return Communication.unknown(f"figures contradict: {low_reason}, but {high_reason}")
    reasons = [device_reason, low_reason, *(reason for _, reason in limits[:2])]
    if 2 * low > device[1]:
        exposed = f"at least {time_text(2 * low - device[1])} of it is beside no other kernel"
        reasons.append(f"{exposed}, unless collectives overlap each other")
    if steps and high < steps:
        gain = f"a network without cost would save at most {high / steps:.1%} of the steps"
        reasons.append(f"{gain}, which take {time_text(steps)} on the host")
    is_bound = 2 * low > device[1]
    is_free = 2 * high < device[0]
    return Communication(
        bound=is_bound if is_bound or is_free else None,
        low_ns=low,
        high_ns=high,
        device_low_ns=device[0],
        device_high_ns=device[1],
        share_low=min(1.0, low / device[1]),
        share_high=min(1.0, high / device[0]) if device[0] > 0 else 1.0,
        reasons=tuple(filter(None, reasons)),
    )


def _self_times(table: ProfilerTable, *kinds: RowKind) -> Span:
    """Return the sum of the self device times of rows of these kinds."""
    figures = [row.figures.get("self_device") for row in table.rows if row.kind in kinds]
    own = [figure for figure in figures if figure]
    return sum(each.low for each in own), sum(each.high for each in own)


def _device_time(table: ProfilerTable, everything: Span) -> tuple[Span, str]:
    """Return the device time of kernels and copies, and the reason.

    torch before 2.5 also counts the annotations that it copied to the device. Their time is
    part of the sum if it has room for them.
    """
    markers = _self_times(table, RowKind.MARKER)
    work = _self_times(table, *DEVICE_WORK)
    annotations = _self_times(table, RowKind.ANNOTATION, RowKind.DEVICE_ROW)
    operators = _self_times(table, RowKind.OPERATOR, RowKind.COLLECTIVE)
    low = everything[0] - markers[1]
    high = everything[1] - markers[0]
    if work[0] + annotations[0] <= high:
        low -= annotations[1]
    low = min(high, max(low, work[0], 0.0 if markers[1] else operators[0], 0.0))
    source = "as printed" if "self_device" in table.totals else "by the shares"
    heading = table.columns["self_device"]
    reason = "device time counts each kernel and copy once; "
    reason += f"{heading} of all rows is {time_text(*everything)} ({source})"
    reason += f", of it Marker {time_text(*markers)}" if markers[1] else ""
    return (low, high), reason


def _at_least(table: ProfilerTable) -> Iterator[tuple[float, str]]:
    """Yield (ns, reason): communication is at least this.

    ROCm's tables count markers as kernels of operators, so all of them are subtracted.
    """
    kernels = _self_times(table, RowKind.COMM_KERNEL)
    markers = _self_times(table, RowKind.MARKER)
    if kernels[1]:
        yield kernels[0], f"the communication kernels shown take {time_text(*kernels)}"
    operators = _self_times(table, RowKind.COLLECTIVE)
    if operators[0] > markers[1]:
        heading = table.columns["self_device"]
        reason = f"collective operators have a {heading} of {time_text(*operators)}"
        rest = time_text(operators[0] - markers[1], operators[1] - markers[0])
        without = f"; {rest} of it is no Marker, if each event counts for one operator"
        yield operators[0] - markers[1], reason + (without if markers[1] else "")


def _at_most(table: ProfilerTable, device: Span) -> Iterator[tuple[float, str]]:
    """Yield (ns, reason): communication is at most this."""
    yield device[1], ""
    others = {"kernels": _self_times(table, RowKind.KERNEL)}
    if not _self_times(table, RowKind.MARKER)[1]:
        others["operators"] = _self_times(table, RowKind.OPERATOR)
    for name, times in others.items():
        most = max(device[1] - times[0], 0.0)
        reason = f"{name} shown that are no communication take {time_text(*times)}"
        if times[1] > 0:
            yield most, f"{reason}, which leaves at most {time_text(most)}"
    is_shown = any(row.kind in _MAYBE_COMMUNICATION for row in table.rows)
    key = next((key for key in ("device", "self_device") if _is_sorted(table, key)), None)
    if key and not is_shown and not GROUPING & table.columns.keys():
        last = table.rows[-1].figures[key]
        reason = (
            f"no collective is among the {len(table.rows)} rows, which are sorted by "
            f"{table.columns[key]} down to {last.printed}; if one row, record_param_comms, has "
            "all that torch.distributed launched, as in torch 2, it takes at most that"
        )
        yield last.high, reason


def _is_sorted(table: ProfilerTable, key: str) -> bool:
    """Return whether all rows have a figure in a column, and none one above that before."""
    values = [row.figures[key].value for row in table.rows if key in row.figures]
    is_known = len(values) == len(table.rows) > 2 and values[0] > values[-1]
    return is_known and values == sorted(values, reverse=True)
