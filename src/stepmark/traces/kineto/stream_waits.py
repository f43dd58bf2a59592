"""Which GPU events had to wait for events of other streams, as far as a trace tells."""

import re

import numpy as np

from stepmark.timeline.trace_columns import NONE, Flags, Ints, RankTrace
from stepmark.traces.kineto.links import lookup, name_flags

# Waits of the host for a GPU.
WAITS = re.compile(r"^(?:cuda|hip|cu)(?:Ctx|Device|Stream|Event)Synchronize")
_CALL = re.compile("StreamWaitEvent")
_RECORDED = re.compile("Stream Wait Event")  # of cuda_sync: tells the stream that waits


def made_to_wait(trace: RankTrace, call: Ints) -> Flags:
    """Return whether the host made a stream wait between an event's launch and the one before.

    call: of each GPU event's launch. Where cuda_sync does not tell which stream had to wait,
    it may have been any. Flagged are also events of graphs, whose waits no call makes, and all
    events of a trace without such calls.
    """
    gpu = trace.gpu
    calls = trace.calls
    waits = np.ones(gpu.start.size, bool)
    syncs = np.flatnonzero(name_flags(trace.names, _RECORDED.search)[trace.syncs.name])
    times = calls.start[name_flags(trace.names, _CALL.search)[calls.name]]
    if not times.size and not syncs.size:
        return waits
    issued = np.append(calls.start, NONE)[call]
    for stream in np.unique(gpu.stream):
        rows = np.flatnonzero((gpu.stream == stream) & (call != NONE))
        rows = rows[np.argsort(issued[rows], kind="stable")]
        if syncs.size:
            times = np.sort(trace.syncs.start[syncs[trace.syncs.stream[syncs] == stream]])
        number = np.searchsorted(times, issued[rows])
        waits[rows] = np.diff(number, prepend=0) > 0
    _, index, counts = np.unique(call, return_inverse=True, return_counts=True)
    return waits | (counts[index] > 1)


def awaited(trace: RankTrace, call: Ints, rows: Ints) -> Ints:
    """Return for which of these GPU events each of them waits, by cuda_sync, or NONE.

    A wait holds for the next event that its stream gets, and is for the last one that the other
    stream had got when the event was recorded. CUPTI does not tell this of events recorded by
    cudaEventRecordWithFlags, as torch 2.11 does.
    """
    gpu = trace.gpu
    syncs = trace.syncs
    calls = trace.calls
    after = np.full(rows.size, NONE, np.int64)
    waits = np.flatnonzero(name_flags(trace.names, _RECORDED.search)[syncs.name])
    called = lookup(calls.correlation, syncs.correlation[waits])
    recorded = lookup(calls.correlation, syncs.recorded[waits])
    issued = np.append(calls.start, NONE)[call[rows]]
    last = issued.max(initial=0)
    for wait, launch, record in zip(waits, called, recorded, strict=True):
        if NONE in (launch, record) or calls.start[launch] > last:
            continue
        first = (gpu.stream[rows] == syncs.stream[wait]) & (issued > calls.start[launch])
        before = (gpu.stream[rows] == syncs.awaited[wait]) & (issued != NONE)
        before &= issued < calls.start[record]
        if first.any() and before.any():
            place = np.flatnonzero(first)[np.argmin(issued[first])]
            other = np.flatnonzero(before)[np.argmax(issued[before])]
            old = after[place]
            if old == NONE or gpu.end[rows[other]] > gpu.end[rows[old]]:
                after[place] = other
    return after
