"""Times of a simulated stage: when each operation runs, and the lines that it adds to.

Lines are a sum over the items of the stage, which calls of communication cut.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.predictions.program import Program
from stepmark.predictions.regions import Region
from stepmark.predictions.step_events import Lane
from stepmark.predictions.works import Busy, Call, Segment, is_compute
from stepmark.step.workload import COMPUTE, CommOp, Operation
from stepmark.timeline.ledger import (
    CONTENTION,
    CRITICAL,
    RECOMPUTED,
    TRANSFER,
    WAITING,
    Group,
    Idle,
    Line,
    Work,
)
from stepmark.timeline.timeline import LEFT_OUT, Span

_NS = 1e9
_SAME = 1e-9  # of a step: times that differ less are equal


class _Cover(NamedTuple):
    """Time in which a call has the line of communication. began: of the call."""

    start: float
    end: float
    name: str
    began: float


def seconds_of(
    lane: Lane, end: float, length_s: float, critical: Sequence[tuple[float, float]]
) -> tuple[dict[Line, float], dict[str, float], float]:
    """Return the seconds of a stage's window by line, of what is within, and of messages.

    end: of the window. What is left of the window is idle. critical: when messages on the
    critical path move.
    """
    start = end - length_s
    busy = _serial([each for each in lane.busy if each.end > start and each.start < end])
    total = _under([_Cover(start, end, "", start)], busy)
    calls = _covers(_calls(lane, start), start, end)
    moves = _covers([(*times, TRANSFER) for times in lane.transferred], start, end)
    hidden = _under(calls, busy)
    moving = _under(moves, busy)
    awaited = _under(_covers([(*times, CRITICAL) for times in critical], start, end), busy)
    contention_s = sum(each.extra_s for each in busy)
    lines = defaultdict[Line, float](float)
    recomputed_s = 0.0
    for (_, work, is_recomputed), time_s in total.items():
        lines[_line(work)] += time_s
        recomputed_s += time_s * is_recomputed * isinstance(work, Work)
    for (name, work, _), time_s in hidden.items():
        lines[_line(work)] -= time_s
        if is_compute(work):
            lines[Group.OVERLAPPED, work] += time_s
            lines[Group.COMM, name] -= time_s
    for call in calls:
        lines[Group.COMM, call.name] += call.end - call.start
    moved_s = sum(move.end - move.start for move in moves)
    within = {
        CONTENTION: contention_s,
        RECOMPUTED: recomputed_s,
        CRITICAL: _computed_s(awaited),
        TRANSFER: moved_s - _computed_s(moving),
    }
    return lines, within, moved_s


def _computed_s(times: Mapping[tuple[str, Work | Idle, bool], float]) -> float:
    return sum(time_s for (_, work, _), time_s in times.items() if is_compute(work))


def critical_messages(lane: Lane, number: int, since: float) -> Iterator[tuple[float, float]]:
    """Yield when messages on the critical path of a step move, the latest first.

    since: the time back to which the path is followed. From the last computation it goes back
    to what ended last of all that an item waits for: the item before on its stream, items of
    other streams, and those of the step before. It ends at one that waits for its host, which
    is busy until then; the delays of other stages are no part of it.
    """
    program = lane.program
    tolerance = _SAME * (lane.ends[number] - since)
    path = [(lane.ends[number], number, program.queues[0][-1])]
    while path and path[0][0] > since:
        end, number, item = path[0]
        work = program.works[item]
        start = lane.steps[number].starts[item]
        if isinstance(work, Call):
            yield lane.moved.get((number, item), start), end
        elif isinstance(work, Region):
            inside = critical_messages(work.alone, 0, since - start)
            yield from ((start + begin, start + stop) for begin, stop in inside)
        ends = [
            (lane.steps[step].ends[dep], step, dep)
            for step, dep in _awaited(program, number, item)
        ]
        latest = max((end for end, _, _ in ends), default=start)
        # Of what ends at once, computation: then a faster message shortens nothing.
        last = [
            (program.streams[dep] == 0, step, dep, end)
            for end, step, dep in ends
            if end >= latest - tolerance and not (lane.has_host and start > latest)
        ]
        path = [(end, step, dep) for _, step, dep, end in sorted(last)[-1:]]


def _awaited(program: Program, step: int, item: int) -> list[tuple[int, int]]:
    """Return the steps and items that an item waits for."""
    queue = program.queues[program.streams[item]]
    place = bisect_left(queue, item)
    awaited = [(step, dep) for dep in (*program.deps[item], *queue[place - 1 : place])]
    if step:
        ends = () if place else (queue[-1], program.queues[0][-1])
        later = (dep for dep, items in program.next_dependents.items() if item in items)
        awaited += [(step - 1, dep) for dep in (*ends, *later)]
    return awaited


def _line(work: Work | Idle) -> Line:
    """Return the line of work where no call is."""
    if isinstance(work, Idle):
        return Group.IDLE, work
    return (Group.COPIES if work is Work.COPY else Group.COMPUTE), work


def _calls(lane: Lane, after: float) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and name of calls, but of steps that were over then; NaN: not yet."""
    over = [
        end <= after and not unfinished
        for end, unfinished in zip(lane.ends, lane.unfinished, strict=True)
    ]
    for step in lane.steps[over.index(False) if False in over else len(over) :]:
        for item, call in lane.program.calls:
            yield step.starts[item], step.ends[item], call.ops[0].collective


def _covers(
    calls: Iterable[tuple[float, float, str]], start: float, end: float
) -> list[_Cover]:
    """Return the pieces of a window in which calls run; the one that began first has each."""
    covers = list[_Cover]()
    now = start
    clipped = sorted(
        (max(first, start), name, end if math.isnan(last) else min(last, end))
        for first, last, name in calls
        if first < end and not last <= start
    )
    for first, name, last in clipped:
        if last > now:
            covers.append(_Cover(max(first, now), last, name, first))
            now = last
    return covers


def _under(
    covers: Iterable[_Cover], busy: Sequence[Busy]
) -> dict[tuple[str, Work | Idle, bool], float]:
    """Return the seconds of work in these times, by their name, work and recomputation."""
    counts = Counter[tuple[str, Segment, float, float, bool]]()
    place = 0
    for start, end, name, _ in covers:
        while place < len(busy) and busy[place].end <= start:
            place += 1
        index = place
        while index < len(busy) and (each := busy[index]).start < end:
            first = each.progress(start) if start > each.start else each.first
            last = each.progress(end) if end < each.end else each.last
            counts[name, each.segment, first, last, each.slow] += 1
            index += 1
    times = defaultdict[tuple[str, Work | Idle, bool], float](float)
    for (name, segment, first, last, slow), count in counts.items():
        for (work, is_recomputed), time_s in segment.times(first, last, slow=slow).items():
            times[name, work, is_recomputed] += count * time_s
    return times


def _serial(busy: list[Busy]) -> list[Busy]:
    """Return computation in order; of pieces that run at once only the one that has the time.

    Compute goes before copies, these before gaps, and then the one that began first.
    """
    busy.sort(key=lambda each: each.start)
    if not any(after.start < before.end for before, after in pairwise(busy)):
        return busy
    pieces: list[tuple[int, float, float, int]] = []  # rank, start, end, place in busy
    for place, each in enumerate(busy):
        now = each.start
        for piece, time_s in each.pieces:
            work, _ = each.segment.kinds[piece]
            rank = 0 if is_compute(work) else 1 if isinstance(work, Work) else 2
            pieces.append((rank, now, now := now + time_s, place))
    cuts = sorted({time for _, start, end, _ in pieces for time in (start, end)})
    coming = sorted(pieces, key=lambda piece: -piece[1])
    running: list[tuple[int, float, float, int]] = []  # a heap: the one that has the time first
    serial: list[Busy] = []
    for start, end in pairwise(cuts):
        while coming and coming[-1][1] <= start:
            heappush(running, coming.pop())
        while running and running[0][2] <= start:
            heappop(running)
        if running:
            each = busy[running[0][3]]
            progress = each.progress(start), each.progress(end)
            serial.append(
                each._replace(start=start, end=end, first=progress[0], last=progress[1])
            )
    return serial


class _Ran(NamedTuple):
    """An operation from start to end; the end is infinite for one that has not ended."""

    step: int
    item: int
    owner: int  # in the item
    op: Operation
    kind: str
    start: float
    end: float


def spans(
    lane: Lane, step: int, num_omitted: int, omitted_s: float, length_s: float
) -> Iterator[Span]:
    """Yield what runs on a stage while its computation is in a step.

    num_omitted: repetitions that are left out; they begin omitted_s after the step, and take
    length_s.
    """
    start = lane.ends[step - 1] if step else 0.0
    end = lane.ends[step]
    cut = lane.program.bounds[-1] if num_omitted else len(lane.program.works)
    for ran in (*_ran_computations(lane), *_ran_calls(lane)):
        if ran.start >= end or ran.end <= start:
            continue
        shift_s = length_s * (ran.step == step and ran.item >= cut) - start
        begin_ns = round((max(ran.start, start) + shift_s) * _NS)
        end_ns = round((end - start + length_s if ran.end >= end else ran.end + shift_s) * _NS)
        if end_ns <= begin_ns:
            continue
        op, (layer, microbatch) = ran.op, lane.program.offsets[ran.item]
        yield Span(
            rank=lane.stage,
            stream=op.stream,
            kind=ran.kind,
            name=op.collective if isinstance(op, CommOp) else op.module,
            module=op.module,
            phase=f"{op.phase}, recomputed" if op.recompute else str(op.phase),
            layer=None if op.layer is None else op.layer + layer,
            microbatch=None if op.microbatch is None else op.microbatch + microbatch,
            start_ns=begin_ns,
            end_ns=end_ns,
        )
    if num_omitted:
        yield Span(
            rank=lane.stage,
            stream=COMPUTE,
            kind=LEFT_OUT,
            name=f"{num_omitted} more repetitions of the steady state",
            start_ns=round(omitted_s * _NS),
            end_ns=round((omitted_s + length_s) * _NS),
            repeats=num_omitted,
        )


def _ran_computations(lane: Lane) -> Iterator[_Ran]:
    """Yield the kernels of each operation by kind of work."""
    latest: dict[str, _Ran] = {}
    for busy in lane.busy:
        now = busy.start
        for piece, time_s in busy.pieces:
            start = now
            now = now + time_s
            owner = busy.segment.owners[piece]
            op = busy.segment.ops[owner]
            if isinstance(kind := busy.segment.kinds[piece][0], Idle):
                continue
            before = latest.pop(op.stream, None)
            what = busy.item, owner, op, kind
            if before and before[1:5] == what and not start > before.end:
                start = before.start  # communication began or ended inside
            elif before:
                yield before
            latest[op.stream] = _Ran(busy.step, *what, start, now)
    yield from latest.values()


def _ran_calls(lane: Lane) -> Iterator[_Ran]:
    """Yield each call: it waits until the first of its messages moves."""
    for step in lane.steps:
        times = zip(lane.program.works, step.starts, step.ends, strict=True)
        for item, (work, start, end) in enumerate(times):
            if isinstance(work, Call) and not math.isnan(start):
                stop = math.inf if math.isnan(end) else end
                moved = min(stop, lane.moved.get((step.number, item), stop))
                yield _Ran(step.number, item, 0, work.ops[0], WAITING, start, moved)
                yield _Ran(step.number, item, 0, work.ops[0], COMMUNICATION, moved, stop)
