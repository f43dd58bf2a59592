"""Schedules of several stages per rank, and of split backward passes, as torch runs them.

torch 2.13, torch/distributed/pipelining/schedules.py: each rank's passes
(_calculate_single_rank_operations of ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble,
ScheduleZBVZeroBubble and ScheduleDualPipeV), and what _PipelineScheduleRuntime does around them
(_add_unshard_reshard, _add_reduce_grad, _add_send_recv). Stages on one rank send each other
nothing.

The order is computed for a few micro-batches: each further round inserts the same actions at
the same place. A round has as many micro-batches as ranks, in a V one.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from stepmark.model.parallel import PipelineSchedule
from stepmark.workloads.pipeline import PASSES, WITH_MICROBATCH, Act, Action, Span, Tick
from stepmark.workloads.rules.pytorch.order import Order, act_of, later

_MOST_ACTIVE = 3  # stages of a rank whose parameters are gathered at a time
_FEW = 2  # rounds that are computed, and one more to see which actions it inserts
_FEW_IN_V = 4  # micro-batches per rank, which is more than its ends of a pass have
_BACKWARDS = (Act.BACKWARD, Act.BACKWARD_INPUT)


def multi_stage_spans(order: Order) -> list[tuple[Span, ...]]:
    """Return the schedule of each pp rank; ticks that repeat are one span."""
    count = order.num_microbatches
    is_v = order.schedule.is_v
    step = 1 if is_v else count // order.rounds
    least = _FEW_IN_V * order.num_ranks if is_v else step * _FEW
    if count <= least + step:
        ticks_by_rank = _lowered(order, count)
        return [tuple(Span(ticks=(tick,)) for tick in ticks) for ticks in ticks_by_rank]
    shorter = _lowered(order, least)
    longer = _lowered(order, least + step)
    return [
        _lengthened(short, long, step, (count - least) // step)
        for short, long in zip(shorter, longer, strict=True)
    ]


def _lengthened(short: list[Tick], long: list[Tick], step: int, times: int) -> tuple[Span, ...]:
    """Return `long`, in which the ticks that `short` lacks are repeated so many times."""
    extra = len(long) - len(short)
    index = len(short)
    while index and long[index - 1 + extra] == moved_tick(short[index - 1], step):
        index -= 1
    assert long[:index] == short[:index]
    period = Span(ticks=tuple(long[index : index + extra]), times=times, step=step)
    rest = (Span(ticks=(moved_tick(tick, step * times),)) for tick in short[index:])
    return (*(Span(ticks=(tick,)) for tick in short[:index]), period, *rest)


def moved_tick(tick: Tick, microbatches: int) -> Tick:
    """Return the same tick for later micro-batches."""
    return tuple(
        replace(action, microbatch=action.microbatch + microbatches)
        if action.act in WITH_MICROBATCH
        else action
        for action in tick
    )


def _lowered(order: Order, count: int) -> list[list[Tick]]:
    """Return ticks by rank as in _add_send_recv, where a send determines the peer's receive."""
    ranks = order.num_ranks
    planned = [
        list(_with_parameters(_PASSES[order.schedule](order, count, rank), count))
        for rank in range(ranks)
    ]
    issued: list[list[Action]] = [[] for _ in range(ranks)]
    arrived: set[tuple[Act, int, int, int]] = set()
    heads = [0] * ranks
    while any(head < len(plan) for head, plan in zip(heads, planned, strict=True)):
        for rank, plan in enumerate(planned):
            if heads[rank] == len(plan):
                continue
            actions = plan[heads[rank]]
            needed = [(_needed(order, rank, one), one.chunk, one.microbatch) for one in actions]
            if any(act and (act, rank, *rest) not in arrived for act, *rest in needed):
                continue
            heads[rank] += 1
            issued[rank] += actions
            for action in actions:
                for sender, receiver, peer in _transfers(order, rank, action):
                    issued[rank].append(sender)
                    issued[peer].append(receiver)
                    arrived.add((receiver.act, peer, receiver.chunk, receiver.microbatch))
    return [_ticks(order, rank, actions) for rank, actions in enumerate(issued)]


class _Passes:
    """The passes of a rank, of which each kind goes through the micro-batches in order."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self._counts: Counter[tuple[Act, int]] = Counter()

    def count(self, act: Act, chunk: int) -> int:
        """Count backward passes with those of inputs alone."""
        return self._counts[self._kind(act), chunk]

    def add(self, *passes: tuple[Act, int]) -> None:
        """Add passes (of a chunk) that run one right after the other, then send both."""
        self.ticks.append(tuple(self._next(act, chunk) for act, chunk in passes))

    def _next(self, act: Act, chunk: int) -> Action:
        key = self._kind(act), chunk
        self._counts[key] += 1
        if act is Act.BACKWARD:
            self._counts[Act.BACKWARD_WEIGHT, chunk] += 1
        return act_of(act, self._counts[key] - 1, chunk)

    def _kind(self, act: Act) -> Act:
        return Act.BACKWARD_INPUT if act is Act.BACKWARD else act


def _looped(order: Order, count: int, rank: int) -> list[Tick]:
    """Return passes of interleaved stages. A split pass's second part comes `rank` later."""
    chunks = order.num_chunks
    total = chunks * count
    per_round = count // max(1, count // order.num_ranks)
    splits = order.schedule.splits_backward
    ahead = (chunks - 1) * per_round + (1 if splits else 2) * (order.num_ranks - 1 - rank)
    warmup = min(ahead, total)
    passes = _Passes()
    backward = Act.BACKWARD_INPUT if splits else Act.BACKWARD

    def chunk_of(number: int) -> int:
        return chunks - 1 - number // per_round % chunks

    for number in range(warmup + total):
        done = number - warmup
        if number < total:
            passes.add((Act.FORWARD, number // per_round % chunks))
        if done >= 0:
            passes.add((backward, chunk_of(done)))
        if splits and done >= rank:
            passes.add((Act.BACKWARD_WEIGHT, chunk_of(done - rank)))
    for number in range(max(0, total - rank), total) if splits else ():
        passes.add((Act.BACKWARD_WEIGHT, chunk_of(number)))
    return passes.ticks


def _zbv(order: Order, count: int, rank: int) -> list[Tick]:
    """Return passes as ScheduleZBVZeroBubble has them, for fewer micro-batches without gaps."""
    passes = _Passes()
    ranks = order.num_ranks
    most = max(2 * ranks - 1, count)

    def add(acts: str) -> None:
        """Add passes such as F0 (forward), I1 (gradients of inputs), W1 (of weights)."""
        for one in acts.split():
            passes.add((_LETTERS[one[0]], int(one[1])))

    for _ in range(2 * (ranks - rank) - 1):
        add("F0")
    for _ in range(rank):
        add("F1 F0")
    for _ in range(ranks - rank):
        add("F1 I1 W1")
    while passes.count(Act.FORWARD, 1) < most:
        if passes.count(Act.FORWARD, 0) < most:
            add("F0")
        add("I0 W0 F1 I1 W1")
    for _ in range(rank):
        add("I0 I1")
    for _ in range(ranks - rank):
        add("I0 W0")
    for chunk in 1, 0:
        while passes.count(Act.BACKWARD_WEIGHT, chunk) < most:
            add(f"W{chunk}")
    return [tick for tick in passes.ticks if all(one.microbatch < count for one in tick)]


_LETTERS = {"F": Act.FORWARD, "I": Act.BACKWARD_INPUT, "W": Act.BACKWARD_WEIGHT}


def _dualpipe_v(order: Order, count: int, rank: int) -> list[Tick]:
    """Return passes as ScheduleDualPipeV has them; a pair that it overlaps is one tick."""
    passes = _Passes()
    ranks = order.num_ranks
    others = ranks - rank - 1
    waiting: list[int] = []  # chunks whose weights' gradients are still to compute

    def backward(chunk: int, *, splits: bool) -> None:
        passes.add((Act.BACKWARD_INPUT if splits else Act.BACKWARD, chunk))
        waiting.extend([chunk] if splits else ())

    def weights() -> None:
        if waiting:
            passes.add((Act.BACKWARD_WEIGHT, waiting.pop(0)))

    for _ in range(2 * others):
        passes.add((Act.FORWARD, 0))
    for _ in range(rank + 1):
        passes.add((Act.FORWARD, 0))
        passes.add((Act.FORWARD, 1))
    for _ in range(others):
        backward(1, splits=True)
        weights()
        passes.add((Act.FORWARD, 1))
    for number in range(count - 2 * ranks + rank + 1):
        if number == 0 and rank == ranks - 1:
            passes.add((Act.FORWARD, 0))
            backward(1, splits=False)
        else:
            passes.add((Act.FORWARD, 0), (Act.BACKWARD, 1))
        passes.add((Act.FORWARD, 1), (Act.BACKWARD, 0))
    for _ in range(others):
        backward(1, splits=False)
        passes.add((Act.FORWARD, 1), (Act.BACKWARD, 0))
    # The second half splits its passes, of an even rank from the second chunk's on.
    half = (rank + 1) // 2
    for number in range(rank + 1):
        backward(1, splits=number > half or (number == half and rank % 2 == 1))
        backward(0, splits=number >= half)
    for _ in range(others):
        weights()
        backward(0, splits=True)
    for _ in range(rank + 1):
        weights()
    return passes.ticks


_PASSES = {
    PipelineSchedule.INTERLEAVED: _looped,
    PipelineSchedule.ZB1P: _looped,
    PipelineSchedule.ZBV: _zbv,
    PipelineSchedule.DUALPIPE_V: _dualpipe_v,
}


def _with_parameters(ticks: list[Tick], count: int) -> Iterator[Tick]:
    """Insert gathers of the next stages' parameters, releases of the others', reductions."""
    following: list[tuple[int, ...]] = [()] * (len(ticks) + 1)
    for index in range(len(ticks) - 1, -1, -1):
        own = tuple(dict.fromkeys(action.chunk for action in ticks[index]))
        following[index] = (*own, *(one for one in following[index + 1] if one not in own))
    active: set[int] = set()
    num_backward: Counter[int] = Counter()
    for index, tick in enumerate(ticks):
        needed = following[index][:_MOST_ACTIVE]
        for chunk in sorted(active.difference(needed)):
            yield (act_of(Act.RELEASE, chunk=chunk),)
        for chunk in needed:
            if chunk not in active:
                yield (act_of(Act.GATHER, chunk=chunk),)
        active = set(needed)
        yield tick
        for action in tick:
            if action.act in (Act.BACKWARD, Act.BACKWARD_WEIGHT):
                num_backward[action.chunk] += 1
                if num_backward[action.chunk] == count:
                    yield (act_of(Act.REDUCE, chunk=action.chunk),)
    for chunk in sorted(active):
        yield (act_of(Act.RELEASE, chunk=chunk),)


def _needed(order: Order, rank: int, action: Action) -> Act | None:
    """Return the transfer that a pass needs."""
    if action.act is Act.FORWARD:
        source = order.neighbour(rank, action.chunk, forward=False)
        return Act.RECV_FORWARD if source and source[0] != rank else None
    if action.act in _BACKWARDS:
        source = order.neighbour(rank, action.chunk, forward=True)
        return Act.RECV_BACKWARD if source and source[0] != rank else None
    return None


def _transfers(order: Order, rank: int, action: Action) -> Iterator[tuple[Action, Action, int]]:
    """Yield the transfer of a pass's result: its send, its receive and the peer."""
    forward = action.act is Act.FORWARD
    if not forward and action.act not in _BACKWARDS:
        return
    target = order.neighbour(rank, action.chunk, forward=forward)
    if target is None or target[0] == rank:
        return
    peer, chunk = target
    send, recv = (
        (Act.SEND_FORWARD, Act.RECV_FORWARD)
        if forward
        else (Act.SEND_BACKWARD, Act.RECV_BACKWARD)
    )
    microbatch = action.microbatch
    yield later(send, microbatch, action.chunk), later(recv, microbatch, chunk), peer


def _ticks(order: Order, rank: int, actions: list[Action]) -> list[Tick]:
    """Split actions before each pass, which waits for the transfer that it needs."""
    ticks: list[list[Action]] = [[]]
    received: Counter[tuple[Act, int]] = Counter()
    for action in actions:
        if action.act in PASSES:
            ticks.append([])
            if (needed := _needed(order, rank, action)) is not None:
                newer = received[needed, action.chunk] - 1 - action.microbatch
                name = f"{needed}.{action.chunk}" + (f"~{newer}" if newer else "")
                ticks[-1].append(Action(act=Act.WAIT, after=(name,)))
        elif action.act in (Act.RECV_FORWARD, Act.RECV_BACKWARD):
            received[action.act, action.chunk] += 1
        ticks[-1].append(action)
    return [tuple(tick) for tick in ticks if tick]
