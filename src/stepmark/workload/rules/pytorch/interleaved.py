"""The interleaved schedule of torch.distributed.pipelining: several stages on a rank.

torch 2.13, torch/distributed/pipelining/schedules.py: ScheduleInterleaved1F1B
(_get_1f1b_rank_ops, _add_unshard_reshard, _add_reduce_grad, _add_send_recv). Its order is
worked out for a few rounds of micro-batches: one round more puts the same actions in at the
same place, so more rounds are more of the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from stepmark.workload.pipeline import Act, Action, Span, Tick
from stepmark.workload.rules.pytorch.schedules import COMPUTE, MOVED, Order, act_of, later

_MOST_ACTIVE = 3  # stages of a rank whose parameters are gathered at a time
_FEW = 2  # rounds that are worked out, and one more to see what is put in


def spans(order: Order) -> list[tuple[Span, ...]]:
    """By rank."""
    per_round = order.num_microbatches // order.rounds
    if order.rounds <= _FEW + 1:
        made = _interleaved(order, order.num_microbatches)
        return [tuple(Span(ticks=(tick,)) for tick in ticks) for ticks in made]
    few = _interleaved(order, per_round * _FEW)
    more = _interleaved(order, per_round * (_FEW + 1))
    times = order.rounds - _FEW
    return [
        _lengthened(short, long, per_round, times)
        for short, long in zip(few, more, strict=True)
    ]


def _lengthened(short: list[Tick], long: list[Tick], step: int, times: int) -> tuple[Span, ...]:
    """What is in `long` beyond `short`, so many times where it is."""
    extra = len(long) - len(short)
    at = len(short)
    while at and long[at - 1 + extra] == _moved(short[at - 1], step):
        at -= 1
    assert long[:at] == short[:at]
    period = Span(ticks=tuple(long[at : at + extra]), times=times, step=step)
    rest = (Span(ticks=(_moved(tick, step * times),)) for tick in short[at:])
    return (*(Span(ticks=(tick,)) for tick in short[:at]), period, *rest)


def _moved(tick: Tick, microbatches: int) -> Tick:
    """Of later micro-batches."""
    return tuple(_moved_one(one, microbatches) for one in tick)


@cache
def _moved_one(one: Action, microbatches: int) -> Action:
    if one.act not in MOVED:
        return one
    return replace(one, microbatch=one.microbatch + microbatches)


def _interleaved(order: Order, count: int) -> list[list[Tick]]:
    """By rank, as _add_send_recv finds it: whoever sends says when the other one receives."""
    ranks = order.num_ranks
    planned = [_computed(order, count, rank) for rank in range(ranks)]
    issued: list[list[Action]] = [[] for _ in range(ranks)]
    arrived: set[tuple[Act, int, int, int]] = set()
    heads = [0] * ranks
    while any(head < len(plan) for head, plan in zip(heads, planned, strict=True)):
        for rank, plan in enumerate(planned):
            if heads[rank] == len(plan):
                continue
            action = plan[heads[rank]]
            if not _is_ready(order, rank, action, arrived):
                continue
            heads[rank] += 1
            issued[rank].append(action)
            for sender, receiver, peer in _transfers(order, rank, action):
                issued[rank].append(sender)
                issued[peer].append(receiver)
                arrived.add((receiver.act, peer, receiver.chunk, receiver.microbatch))
    return [_ticks(order, rank, actions) for rank, actions in enumerate(issued)]


def _computed(order: Order, count: int, rank: int) -> list[Action]:
    """Forward and backward passes of a rank's stages, their gathers and reductions."""
    chunks, total = order.num_chunks, order.num_chunks * count
    per_round = count // max(1, count // order.num_ranks)
    ahead = (chunks - 1) * per_round + 2 * (order.num_ranks - 1 - rank)
    warmup = min(ahead, total)
    done = {act: [0] * chunks for act in COMPUTE}
    found: list[Action] = []

    def add(act: Act, chunk: int) -> None:
        found.append(act_of(act, done[act][chunk], chunk))
        done[act][chunk] += 1

    for number in range(warmup + total):
        if number < total:
            add(Act.FORWARD, number // per_round % chunks)
        if number >= warmup:
            add(Act.BACKWARD, chunks - 1 - (number - warmup) // per_round % chunks)
    return list(_with_parameters(found, chunks, count))


def _with_parameters(actions: list[Action], chunks: int, count: int) -> Iterator[Action]:
    """Parameters of the next stages are gathered, those of others given back."""
    following: list[tuple[int, ...]] = [()] * (len(actions) + 1)
    for index in range(len(actions) - 1, -1, -1):
        mine = actions[index].chunk
        following[index] = (mine, *(one for one in following[index + 1] if one != mine))
    active: set[int] = set()
    back = [0] * chunks
    for index, action in enumerate(actions):
        wanted = following[index][:_MOST_ACTIVE]
        for chunk in sorted(active.difference(wanted)):
            yield act_of(Act.RELEASE, chunk=chunk)
        for chunk in wanted:
            if chunk not in active:
                yield act_of(Act.GATHER, chunk=chunk)
        active = set(wanted)
        yield action
        if action.act is Act.BACKWARD:
            back[action.chunk] += 1
            if back[action.chunk] == count:
                yield act_of(Act.REDUCE, chunk=action.chunk)
    for chunk in sorted(active):
        yield act_of(Act.RELEASE, chunk=chunk)


def _stage(order: Order, rank: int, action: Action) -> int:
    return action.chunk * order.num_ranks + rank


def _is_ready(
    order: Order, rank: int, action: Action, arrived: set[tuple[Act, int, int, int]]
) -> bool:
    needed = _needed(order, rank, action)
    return needed is None or (needed, rank, action.chunk, action.microbatch) in arrived


def _needed(order: Order, rank: int, action: Action) -> Act | None:
    """What has to arrive before a computation."""
    stage = _stage(order, rank, action)
    if action.act is Act.FORWARD and stage > 0:
        return Act.RECV_FORWARD
    if action.act is Act.BACKWARD and stage < order.num_stages - 1:
        return Act.RECV_BACKWARD
    return None


def _transfers(order: Order, rank: int, action: Action) -> Iterator[tuple[Action, Action, int]]:
    """What a computation makes, as both sides see it, and the other one's rank."""
    if action.act not in COMPUTE:
        return
    forward = action.act is Act.FORWARD
    there = _stage(order, rank, action) + (1 if forward else -1)
    if not 0 <= there < order.num_stages:
        return
    chunk, peer = divmod(there, order.num_ranks)
    send, recv = (
        (Act.SEND_FORWARD, Act.RECV_FORWARD)
        if forward
        else (Act.SEND_BACKWARD, Act.RECV_BACKWARD)
    )
    microbatch = action.microbatch
    yield later(send, microbatch, action.chunk), later(recv, microbatch, chunk), peer


def _ticks(order: Order, rank: int, actions: list[Action]) -> list[Tick]:
    """Cut before each computation, which waits for what it needs."""
    found: list[list[Action]] = [[]]
    received: dict[tuple[Act, int], int] = {}
    for action in actions:
        if action.act in COMPUTE:
            found.append([])
            if (needed := _needed(order, rank, action)) is not None:
                newer = received[needed, action.chunk] - 1 - action.microbatch
                name = f"{needed}.{action.chunk}" + (f"~{newer}" if newer else "")
                found[-1].append(Action(act=Act.WAIT, after=(name,)))
        elif action.act in (Act.RECV_FORWARD, Act.RECV_BACKWARD):
            key = action.act, action.chunk
            received[key] = received.get(key, 0) + 1
        found[-1].append(action)
    return [tuple(tick) for tick in found if tick]
