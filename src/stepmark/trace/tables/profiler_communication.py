"""Decide from a table of the PyTorch profiler whether communication bounds the job.

Device time is the sum over kernels and copies, each counted once: torch's own sum (printed, or
from the shares) without markers and annotations. A table shows some rows and their sum, so
communication is an interval:

at least    the communication kernels shown; or the self device time of the collective
            operators shown, which launched these kernels. All markers are subtracted from the
            latter: ROCm's tables count them as kernels of operators.
at most     all device time without the kernels shown that are none of communication; without
            that of the operators shown that are no collectives; and, where rows are sorted by
            device time and none is of communication, the smallest figure shown, because in
            torch 2 one row, record_param_comms, has all that torch.distributed launched.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from stepmark.core.profiler_table import (
    DEVICE_WORK,
    Communication,
    ProfilerTable,
    RowKind,
    TableRow,
)
from stepmark.core.units import format_time
from stepmark.trace.tables.profiler_checks import (
    MAX_CONCURRENT,
    Span,
    flags,
    self_times,
    steps_row,
    sums_of_self,
    time_text,
)
from stepmark.trace.tables.profiler_text import DAMAGED, GROUPING

_PARENT = "record_param_comms"
# Kernels are told from operators by their lack of CPU time.
_NEEDED = {
    "self_device": "self time on a device",
    "device": "total time on a device",
    "self_cpu": "self time on the CPU",
    "cpu": "total time on the CPU",
}
# Device rows that are kernels for certain; an annotation of the user has any other name.
_KERNEL_NAME = re.compile(
    r"void |.*(?:[<(]|kernel|gemm|cutlass|cudnn)"
    r"|(?:nvjet|triton|ampere|volta|sm\d\d|fmha|cijk)_",
    re.IGNORECASE,
)
_COMMUNICATION = frozenset((RowKind.COLLECTIVE, RowKind.COMM_KERNEL))
_OPERATORS = frozenset((RowKind.OPERATOR, RowKind.COLLECTIVE))
_HALF = 0.5
_ZERO: Span = (0.0, 0.0)


def checked(table: ProfilerTable) -> ProfilerTable:
    """Return the table with its impossible figures and what it says of communication."""
    table = replace(table, flags=(*table.flags, *flags(table)))
    return replace(table, communication=communication(table))


def communication(table: ProfilerTable) -> Communication:
    """Return what the table says of communication, with the reasons."""
    sums = sums_of_self(table)
    everything, steps = sums.get("device"), steps_row(table)
    if missing := [key for key in _NEEDED if key not in table.columns]:
        return _unknown(f"the table has no column of {_NEEDED[missing[0]]}")
    if any(flag.rule == DAMAGED for flag in table.flags):
        return _unknown("rows of the table may be lost")
    if everything is None or everything[1] <= 0:
        return _unknown(f"neither a sum nor shares give the Self {table.device} of all rows")
    device, device_reason = _device_time(table, everything)
    host = (steps.value("cpu") if steps else None) or sums.get("cpu", _ZERO)[1]
    low, low_reason = max(_at_least(table), default=(0.0, ""))
    limits = sorted(_at_most(table, device))
    high, high_reason = limits[0]
    if host and device[0] > MAX_CONCURRENT * host:
        times = f"device time, {time_text(*device)}, is {device[0] / host:.0f} times"
        return _unknown(f"{times} the time of the host, {format_time(host / 1e9)}")
    if low > high * (1 + 1e-6):
        return _unknown(f"its figures contradict each other: {low_reason}, but {high_reason}")
    answer = Communication(
        bound=None,
        low_ns=low,
        high_ns=high,
        device_low_ns=device[0],
        device_high_ns=device[1],
        definition="sum over kernels and copies, each counted once",
        steps=int(steps.value("calls") or 0) or None if steps else None,
        steps_ns=steps.value("cpu") if steps else None,
        reasons=tuple(
            filter(None, (device_reason, low_reason, *(why for _, why in limits[:2])))
        ),
        largest=_largest(table),
    )
    least, most = answer.share_low or 0.0, answer.share_high
    is_clear = least > _HALF or (most is not None and most < _HALF)
    return replace(answer, bound=least > _HALF if is_clear else None)


def _unknown(reason: str) -> Communication:
    return Communication(bound=None, reasons=(reason,))


def _device_time(table: ProfilerTable, everything: Span) -> tuple[Span, str]:
    """Return the device time of kernels and copies.

    torch before 2.5 also counts the annotations that it copied to the device. Their time is
    part of the sum if it has room for them.
    """
    markers = _times(table, RowKind.MARKER)
    work = self_times([row for row in table.rows if _is_work(row)], DEVICE_WORK) or _ZERO
    others = [row for row in table.rows if not _is_work(row)]
    annotations = self_times(others, frozenset((RowKind.ANNOTATION, RowKind.KERNEL))) or _ZERO
    low, high = everything[0] - markers[1], everything[1] - markers[0]
    if work[0] + annotations[0] <= high:
        low -= annotations[1]
    operators = self_times(table.rows, _OPERATORS) or _ZERO
    low = min(high, max(low, work[0], 0.0 if markers[1] else operators[0], 0.0))
    source = "as printed" if "self_device" in table.totals else "by the shares"
    reason = f"Self {table.device} of all rows is {time_text(*everything)} ({source})"
    reason += f", of it Marker {time_text(*markers)}" if markers[1] else ""
    return (low, high), reason


def _at_least(table: ProfilerTable) -> Iterator[tuple[float, str]]:
    """Yield (ns, reason): communication is at least this."""
    kernels, markers = _times(table, RowKind.COMM_KERNEL), _times(table, RowKind.MARKER)
    if kernels[1]:
        yield kernels[0], f"the communication kernels shown take {time_text(*kernels)}"
    operators = _times(table, RowKind.COLLECTIVE)
    if operators[0] > markers[1]:
        reason = f"collective operators have a Self {table.device} of {time_text(*operators)}"
        rest = time_text(operators[0] - markers[1], operators[1] - markers[0])
        without = f"; {rest} of it is no Marker, if each event counts for one operator"
        yield operators[0] - markers[1], reason + (without if markers[1] else "")


def _at_most(table: ProfilerTable, device: Span) -> Iterator[tuple[float, str]]:
    """Yield (ns, reason): communication is at most this."""
    yield device[1], ""
    kernels = [row for row in table.rows if row.kind is RowKind.KERNEL and _is_work(row)]
    operators = [row for row in table.rows if row.kind is RowKind.OPERATOR]
    with_markers = _times(table, RowKind.MARKER)[1] > 0
    for name, rows in (("kernels", kernels), ("operators", [] if with_markers else operators)):
        if others := self_times(rows, frozenset(RowKind)):
            most = max(device[1] - others[0], 0.0)
            reason = f"{name} shown that are no communication take {time_text(*others)}"
            yield most, f"{reason}, which leaves at most {format_time(most / 1e9)}"
    if bound := _unlisted(table):
        yield bound


def _unlisted(table: ProfilerTable) -> tuple[float, str] | None:
    """Return the bound on rows that are not shown, if communication is among these."""
    is_shown = any(row.kind in _COMMUNICATION for row in table.rows)
    key = next((key for key in ("device", "self_device") if key in table.sorted_by), None)
    if is_shown or key is None or GROUPING & table.columns.keys():
        return None
    last = table.rows[-1].figures[key]
    return last.high, (
        f"no collective is among the {len(table.rows)} rows, which are sorted by "
        f"{table.columns[key]} down to {last.printed}; if one row, {_PARENT}, has all that "
        "torch.distributed launched, as in torch 2, it takes at most that"
    )


def _is_work(row: TableRow) -> bool:
    """Return whether a row is work of the device for certain."""
    is_named = row.kind is not RowKind.KERNEL or _KERNEL_NAME.match(row.name) is not None
    return row.kind in DEVICE_WORK and is_named


def _times(table: ProfilerTable, kind: RowKind) -> Span:
    return self_times(table.rows, frozenset((kind,))) or _ZERO


def _largest(table: ProfilerTable) -> str:
    """Return which collective has most of the calls."""
    rows = [row for row in table.rows if row.kind is RowKind.COLLECTIVE and row.value("calls")]
    operators = [row for row in rows if row.name.startswith(("c10d::", "_c10d_functional::"))]
    if not operators:
        return ""
    most = max(operators, key=_number_of_calls)
    total = sum(map(_number_of_calls, operators))
    text = f"{most.name} has {_number_of_calls(most):.0f} of the {total:.0f} calls shown"
    parent = next((row for row in rows if row.name == _PARENT), None)
    own, all_of_it = most.value("device"), parent.value("device") if parent else None
    if own and all_of_it and own <= all_of_it:
        text += f", and {own / all_of_it:.0%} of the {table.columns['device']} of {_PARENT}"
        text += " (markers included)" if _times(table, RowKind.MARKER)[1] else ""
    return text


def _number_of_calls(row: TableRow) -> float:
    return row.value("calls") or 0.0
