"""Spans of a simulated step: when each operation runs."""

import math
from collections.abc import Iterator
from operator import add
from typing import NamedTuple

from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.predictions.step_events import Lane
from stepmark.predictions.works import Call, Segment
from stepmark.step.workload import COMPUTE, CommOp, Operation
from stepmark.timeline.ledger import WAITING, Idle
from stepmark.timeline.timeline import LEFT_OUT, Span

_NS = 1e9


class _Ran(NamedTuple):
    """An operation from start to end; the end is infinite for one that has not ended."""

    step: int
    item: int
    owner: int  # in the item
    op: Operation
    kind: str
    start: float
    end: float


def spans(lane: Lane, step: int, less: int, hole_s: float, length_s: float) -> Iterator[Span]:
    """Yield what runs on a stage while its computation is in a step.

    less: repetitions that are left out; they begin hole_s after the step, and take length_s.
    """
    start, end = lane.ends[step - 1] if step else 0.0, lane.ends[step]
    cut = lane.program.bounds[-1] if less else len(lane.program.works)
    for ran in (*_computations(lane), *_calls(lane)):
        if ran.start >= end or ran.end <= start:
            continue
        shift_s = length_s * (ran.step == step and ran.item >= cut) - start
        begin_ns = round((max(ran.start, start) + shift_s) * _NS)
        end_ns = round((end - start + length_s if ran.end >= end else ran.end + shift_s) * _NS)
        if end_ns <= begin_ns:
            continue
        op, (layer, microbatch) = ran.op, lane.program.offsets[ran.item]
        work = lane.program.works[ran.item]
        if isinstance(work, Segment):
            layer, microbatch = map(add, work.places[ran.owner], (layer, microbatch))
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
    if less:
        yield Span(
            rank=lane.stage,
            stream=COMPUTE,
            kind=LEFT_OUT,
            name=f"{less} more repetitions of the steady state",
            start_ns=round(hole_s * _NS),
            end_ns=round((hole_s + length_s) * _NS),
            repeats=less,
        )


def _computations(lane: Lane) -> Iterator[_Ran]:
    """Yield the kernels of each operation by kind of work."""
    latest: dict[str, _Ran] = {}
    for busy in lane.busy:
        now = busy.start
        for piece, time_s in busy.pieces:
            start, now = now, now + time_s
            owner = busy.segment.owners[piece]
            op = busy.segment.ops[owner]
            if isinstance(kind := busy.segment.kinds[piece][0], Idle):
                continue
            if isinstance(op, CommOp):
                kind = COMMUNICATION
            before = latest.pop(op.stream, None)
            what = busy.item, owner, op, kind
            if before and before[1:5] == what and not start > before.end:
                start = before.start  # communication began or ended inside
            elif before:
                yield before
            latest[op.stream] = _Ran(busy.step, *what, start, now)
    yield from latest.values()


def _calls(lane: Lane) -> Iterator[_Ran]:
    """Yield each call: it waits until the first of its messages moves."""
    for step in lane.steps:
        times = zip(lane.program.works, step.starts, step.ends, strict=True)
        for item, (work, start, end) in enumerate(times):
            if isinstance(work, Call) and not math.isnan(start):
                stop = math.inf if math.isnan(end) else end
                moved = min(stop, lane.moved.get((step.number, item), stop))
                yield _Ran(step.number, item, 0, work.ops[0], WAITING, start, moved)
                yield _Ran(step.number, item, 0, work.ops[0], COMMUNICATION, moved, stop)
