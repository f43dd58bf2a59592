"""What cannot be right in the events of a trace, although each of them can be read."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stepmark.timeline.trace_columns import NONE, Damage, GpuKind, Ints, RankTrace
from stepmark.traces.kineto import links

_LAUNCH = re.compile(r"launch\w*kernel|graphlaunch|memcpy\w*(?:async|stream)", re.IGNORECASE)
_GRAPH = re.compile(r"graphlaunch", re.IGNORECASE)
_CAPTURE = re.compile(r"(Begin|End)Capture")
# Times of traces before 2024 are whole microseconds.
_ROUNDING_NS = 1_000
# Kernels of one stream overlap by some us where one is launched before the other has ended
# (programmatic dependent launch): up to 4 us on a B200.
_MAX_OVERLAP_NS = 20_000
_MAX_SPAN_NS = 3_600_000_000_000


def checked(trace: RankTrace) -> RankTrace:
    """Return the trace with what is impossible in it among its damage."""
    damage = (*trace.info.damage, *check(trace, links.launches(trace)))
    return replace(trace, info=replace(trace.info, damage=damage))


def check(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Yield what is impossible. call: of each GPU event, as links.launches returns it."""
    yield from _lost(trace, call)
    yield from _unlaunched(trace, call)
    yield from _twice(trace, call)
    yield from _early(trace, call)
    yield from _out_of_order(trace, call)
    yield from _overlaps(trace)
    yield from _structure(trace, call)


def _damage(kind: str, count: int, text: str) -> Iterator[Damage]:
    if count:
        yield Damage(kind=kind, count=count, text=text)


def _lost(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Find launches of kernels and copies whose work is not in the trace."""
    calls = trace.calls
    is_launch = links.name_flags(trace.names, _LAUNCH.search)
    has_event = np.zeros(calls.start.size, bool)
    has_event[call[call != NONE]] = True
    rows = np.flatnonzero(is_launch[calls.name] & ~has_event)
    rows = rows[~_in_capture(trace, rows)]
    names = Counter(trace.names[name] for name in calls.name[rows])
    most = ", ".join(f"{count} {name}" for name, count in names.most_common(3))
    text = f"launches have no GPU event ({most}): work of the GPU is missing"
    yield from _damage("lost-gpu-events", rows.size, text)


def _unlaunched(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Find GPU events whose launch is missing and not only before the trace."""
    known = [call[rows] != NONE for rows in _streams(trace)]
    count = sum(int((~each[each.argmax() :]).sum()) for each in known if each.any())
    if known and not any(each.any() for each in known) and links.step_rows(trace).size:
        count = call.size
    text = "GPU events have no launch in the trace: it lost some, and their steps are not known"
    yield from _damage("lost-launches", count, text)


def _in_capture(trace: RankTrace, rows: Ints) -> Ints:
    """Return which calls are recorded into a CUDA graph, and launch nothing."""
    calls = trace.calls
    ends = {n: m[1] for n, name in enumerate(trace.names) if (m := _CAPTURE.search(name))}
    marks = np.flatnonzero(np.isin(calls.name, list(ends)))
    change = np.array(
        [1 if ends[int(n)] == "Begin" else -1 for n in calls.name[marks]], np.int64
    )
    level = np.concatenate(([0], np.cumsum(change)))
    return np.asarray(level[np.searchsorted(calls.start[marks], calls.start[rows])] > 0)


def _twice(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Find kernels beyond the first that a call other than of a graph launched."""
    known = np.flatnonzero((call != NONE) & (trace.gpu.kind == GpuKind.KERNEL))
    if not known.size:
        return
    is_graph = links.name_flags(trace.names, _GRAPH.search)
    known = known[~is_graph[trace.calls.name[call[known]]]]
    count = known.size - int((np.bincount(call[known]) > 0).sum())
    text = "kernels have the launch of another one: events are duplicated"
    yield from _damage("duplicate-launch", count, text)


def _early(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    rows = np.flatnonzero(call != NONE)
    ahead = trace.calls.start[call[rows]] - trace.gpu.start[rows]
    count = int((ahead > _ROUNDING_NS).sum())
    if count:
        text = (
            f"GPU events start before their launch, by up to {_us(ahead.max())}: shifted times"
        )
        yield from _damage("before-launch", count, text)


def _out_of_order(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Find events of a stream that run before one that was launched earlier."""
    count = 0
    for rows in _streams(trace):
        own = call[rows]
        own = own[own != NONE]
        if own.size:
            latest = np.maximum.accumulate(trace.calls.start[own])
            count += int((trace.calls.end[own] + _ROUNDING_NS < latest).sum())
    text = "GPU events run after one that was launched later on their stream: times are shifted"
    yield from _damage("out-of-order", count, text)


def _overlaps(trace: RankTrace) -> Iterator[Damage]:
    """Find events that overlap on a stream, which runs one after the other."""
    count = 0
    most = 0
    for rows in _streams(trace):
        start = trace.gpu.start[rows]
        end = trace.gpu.end[rows]
        overlap = np.minimum(np.maximum.accumulate(end)[:-1], end[1:]) - start[1:]
        is_whole = (overlap > _ROUNDING_NS) & (overlap == (end - start)[1:])
        is_wrong = is_whole | (overlap > _MAX_OVERLAP_NS)
        count += int(is_wrong.sum())
        most = max(most, int(overlap.max(initial=0)))
    text = f"GPU events overlap on their stream, by up to {_us(most)}: duplicated or shifted"
    yield from _damage("overlap", count, text)


def _structure(trace: RankTrace, call: Ints) -> Iterator[Damage]:
    """Find what the analysis does not tell apart."""
    first, last = links.first_and_last(trace)
    text = (
        f"the events lie {(last - first) / 3.6e12:.3g} hours apart: times are not of one clock"
    )
    yield from _damage("span", int(last - first > _MAX_SPAN_NS), text)
    processes = {trace.threads[t][0] for t in np.unique(trace.calls.thread[call[call != NONE]])}
    words = ", ".join(sorted(processes)[:4])
    text = f"processes launch work in this file ({words}): its figures are those of all"
    yield from _damage("processes", len(processes) * (len(processes) > 1), text)
    steps = links.step_rows(trace)
    if links.marks_overlap(trace.spans.start[steps], trace.spans.end[steps]):
        text = "ProfilerStep marks overlap, as of several processes: the trace is one window"
        yield Damage(kind="steps-overlap", count=1, text=text)
    num_devices = np.unique(device_of(trace)).size
    text = "GPUs are in this trace: breakdown has rows of each, other commands none apart"
    yield from _damage("devices", num_devices * (num_devices > 1), text)


def missing_work(trace: RankTrace) -> Iterator[Damage]:
    """Find what shows, in a trace without GPU events, that a device ran work all the same.

    Times of the host would then be those of launching it.
    """
    damage = (*_lost(trace, links.launches(trace)), *trace.info.damage)
    reasons = {
        "other-device": "events of its device are not read",
        "lost-gpu-events": "it has launches and no GPU events",
    }
    cases = [reasons[d.kind] for d in damage if d.kind in reasons]
    if trace.info.cut and trace.info.devices != ():
        cases.insert(0, "it is cut before any work of a device, which may follow")
    if any(name.startswith("nccl:") for name in trace.names):
        cases.append("it has calls of NCCL and no GPU events")
    if cases:
        text = f"{cases[0]}: times of the host do not show where the step went"
        yield Damage(kind="no-device-times", count=1, text=text)


def _streams(trace: RankTrace) -> Iterator[Ints]:
    for stream in np.unique(trace.gpu.stream):
        yield np.flatnonzero(trace.gpu.stream == stream)


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:.4g} us"


def device_of(trace: RankTrace) -> Ints:
    """Return the device of each GPU event."""
    devices = np.array([device for device, _ in trace.streams], np.int64)
    return devices[trace.gpu.stream] if trace.gpu.stream.size else devices[:0]
