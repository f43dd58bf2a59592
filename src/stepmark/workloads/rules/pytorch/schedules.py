"""Schedules of torch.distributed.pipelining, call by call.

torch 2.13, torch/distributed/pipelining/schedules.py: Schedule1F1B and ScheduleGPipe
(_step_microbatches), ScheduleInterleaved1F1B (_get_1f1b_rank_ops, _add_unshard_reshard,
_add_reduce_grad, _add_send_recv). A transfer with an immediate wait is on the computation's
stream; an action with `after` is asynchronous. Waits for sends are left out: the sends are
long done by then.

The interleaved order is computed for a few rounds of micro-batches: each further round inserts
the same actions at the same place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import groupby

from stepmark.ground.errors import ConfigError
from stepmark.model.parallel import StageSplit
from stepmark.workloads.job import Job, refuse_first
from stepmark.workloads.pipeline import COMPUTE_DONE, WITH_MICROBATCH, Act, Action, Span, Tick

COMPUTE = (Act.FORWARD, Act.BACKWARD)


class Schedule(StrEnum):
    """Torch's schedules by our names."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    GPIPE = "gpipe"


def split_note(sizes: list[int], split: StageSplit) -> tuple[str, ...]:
    """Return a note if stages have different numbers of layers."""
    if len(set(sizes)) < 2:
        return ()
    alike = [(size, len(list(same))) for size, same in groupby(sizes)]
    words = ", ".join(f"{size} x {times}" if times > 1 else str(size) for size, times in alike)
    why = "embedding and head count as a layer each, as in torchtitan (--pp-split even)"
    rule = why if split is StageSplit.TORCHTITAN else "the first ones have the remainder"
    return (f"layers of the {len(sizes)} pipeline stages: {words}: {rule}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One pass of micro-batches through all stages. Raises ConfigError."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1  # stages of a rank

    def __post_init__(self) -> None:
        # `spans` keeps results by equality, and a plain "gpipe" is equal.
        object.__setattr__(self, "schedule", Schedule(self.schedule))
        count = self.num_microbatches
        ranks = self.num_ranks
        refuse_first(
            (
                self.schedule is Schedule.ONE_F_ONE_B and count < ranks,
                "pp_microbatches",
                count,
                f"at least pp ({ranks}) with 1f1b",
            ),
            (
                self.schedule is Schedule.INTERLEAVED and count % self.rounds,
                "pp_microbatches",
                count,
                f"a multiple of its rounds ({count} // pp {ranks} = {self.rounds})",
            ),
        )

    @property
    def rounds(self) -> int:
        return max(1, self.num_microbatches // self.num_ranks)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


def order_of(job: Job, schedule: Schedule, count: int, num_chunks: int) -> Order:
    """Return a pass of `count` micro-batches; 0: all of a step. Raises ConfigError."""
    pp = job.parallel.pp
    at_once = job.mbs * job.parallel.data_ranks
    if not count and schedule is Schedule.ONE_F_ONE_B and job.num_microbatches < pp:
        allowed = (
            f"{pp * at_once} or more: 1f1b needs pp ({pp}) micro-batches of {at_once}; "
            "--pp-schedule interleaved or gpipe takes fewer"
        )
        raise ConfigError("gbs", job.gbs, allowed)
    count = count or job.num_microbatches
    if job.num_microbatches % count:
        allowed = f"a divisor of {job.num_microbatches} micro-batches of a step"
        raise ConfigError("pp_microbatches", count, allowed)
    return Order(
        schedule=schedule,
        num_ranks=job.parallel.pp,
        num_microbatches=count,
        num_chunks=num_chunks if schedule is Schedule.INTERLEAVED else 1,
    )


@cache
def act_of(act: Act, microbatch: int = 0, chunk: int = 0, *, fused: bool = False) -> Action:
    return Action(act=act, microbatch=microbatch, chunk=chunk, fused=fused)


@cache
def later(act: Act, microbatch: int, chunk: int = 0) -> Action:
    """Return an asynchronous action, which starts after the newest computation."""
    return Action(act=act, microbatch=microbatch, chunk=chunk, after=(COMPUTE_DONE,))


@lru_cache(maxsize=16)  # of the same pipeline many steps are predicted
def spans(order: Order) -> list[tuple[Span, ...]]:
    """Return the schedule of each pp rank; ticks that repeat are one span."""
    if order.schedule is Schedule.INTERLEAVED:
        return _interleaved_spans(order)
    schedule_of_rank = _gpipe if order.schedule is Schedule.GPIPE else _one_f_one_b
    ranks = order.num_ranks
    count = order.num_microbatches
    return [tuple(schedule_of_rank(rank, ranks, count)) for rank in range(ranks)]


def _around(rank: int, num_ranks: int) -> Callable[[Tick], Tick]:
    """Return a function that drops transfers with neighbours that a stage does not have."""
    missing: set[Act] = set()
    if rank == 0:
        missing |= {Act.RECV_FORWARD, Act.SEND_BACKWARD}
    if rank == num_ranks - 1:
        missing |= {Act.SEND_FORWARD, Act.RECV_BACKWARD}
    return lambda tick: tuple(action for action in tick if action.act not in missing)


_FORWARD_ALONE = (
    act_of(Act.RECV_FORWARD),
    act_of(Act.FORWARD),
    later(Act.SEND_FORWARD, 0),
)
_BACKWARD_ALONE = (
    act_of(Act.RECV_BACKWARD),
    act_of(Act.BACKWARD),
    later(Act.SEND_BACKWARD, 0),
)


def _gpipe(rank: int, num_ranks: int, count: int) -> Iterator[Span]:
    around = _around(rank, num_ranks)
    yield Span(ticks=(around(_FORWARD_ALONE),), times=count)
    yield Span(ticks=(around(_BACKWARD_ALONE),), times=count)
    yield Span(ticks=((act_of(Act.REDUCE),),))


def _one_f_one_b(rank: int, num_ranks: int, count: int) -> Iterator[Span]:
    around = _around(rank, num_ranks)
    warmup = min(count, num_ranks - rank)

    def turned(ahead: int, behind: int) -> Tick:
        """Return the exchange of the last output and a gradient, and the backward pass."""
        sent = act_of(Act.SEND_FORWARD, ahead)
        return sent, act_of(Act.RECV_BACKWARD, behind, fused=True), act_of(Act.BACKWARD, behind)

    if warmup > 1:
        yield Span(ticks=(around(_FORWARD_ALONE),), times=warmup - 1)
    last_warm = act_of(Act.RECV_FORWARD, warmup - 1), act_of(Act.FORWARD, warmup - 1)
    yield Span(ticks=(around(last_warm),))
    if count > warmup:
        steady = (
            *turned(warmup - 1, 0),
            act_of(Act.SEND_BACKWARD, 0),
            act_of(Act.RECV_FORWARD, warmup, fused=True),
            act_of(Act.FORWARD, warmup),
        )
        yield Span(ticks=(around(steady),), times=count - warmup)
    first = count - warmup
    last = (*turned(count - 1, first), later(Act.SEND_BACKWARD, first))
    yield Span(ticks=(around(last),))
    if warmup > 1:
        cool = _moved(_BACKWARD_ALONE, first + 1)
        yield Span(ticks=(around(cool),), times=warmup - 1)
    yield Span(ticks=((act_of(Act.REDUCE),),))


_MOST_ACTIVE = 3  # stages of a rank whose parameters are gathered at a time
_FEW = 2  # rounds that are computed, and one more to see which actions it inserts


def _interleaved_spans(order: Order) -> list[tuple[Span, ...]]:
    per_round = order.num_microbatches // order.rounds
    if order.rounds <= _FEW + 1:
        ticks_by_rank = _interleaved(order, order.num_microbatches)
        return [tuple(Span(ticks=(tick,)) for tick in ticks) for ticks in ticks_by_rank]
    shorter = _interleaved(order, per_round * _FEW)
    longer = _interleaved(order, per_round * (_FEW + 1))
    times = order.rounds - _FEW
    return [
        _lengthened(short, long, per_round, times)
        for short, long in zip(shorter, longer, strict=True)
    ]


def _lengthened(short: list[Tick], long: list[Tick], step: int, times: int) -> tuple[Span, ...]:
    """Return `long`, in which the ticks that `short` lacks are repeated so many times."""
    extra = len(long) - len(short)
    index = len(short)
    while index and long[index - 1 + extra] == _moved(short[index - 1], step):
        index -= 1
    assert long[:index] == short[:index]
    period = Span(ticks=tuple(long[index : index + extra]), times=times, step=step)
    rest = (Span(ticks=(_moved(tick, step * times),)) for tick in short[index:])
    return (*(Span(ticks=(tick,)) for tick in short[:index]), period, *rest)


def _moved(tick: Tick, microbatches: int) -> Tick:
    """Return the same tick for later micro-batches."""
    return tuple(
        replace(action, microbatch=action.microbatch + microbatches)
        if action.act in WITH_MICROBATCH
        else action
        for action in tick
    )


def _interleaved(order: Order, count: int) -> list[list[Tick]]:
    """Return ticks by rank as in _add_send_recv, where a send determines the peer's receive."""
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
            needed = _needed(order, rank, action)
            if needed and (needed, rank, action.chunk, action.microbatch) not in arrived:
                continue
            heads[rank] += 1
            issued[rank].append(action)
            for sender, receiver, peer in _transfers(order, rank, action):
                issued[rank].append(sender)
                issued[peer].append(receiver)
                arrived.add((receiver.act, peer, receiver.chunk, receiver.microbatch))
    return [_ticks(order, rank, actions) for rank, actions in enumerate(issued)]


def _computed(order: Order, count: int, rank: int) -> list[Action]:
    """Return passes of a rank's stages, with their gathers and reductions."""
    chunks = order.num_chunks
    total = order.num_chunks * count
    per_round = count // max(1, count // order.num_ranks)
    ahead = (chunks - 1) * per_round + 2 * (order.num_ranks - 1 - rank)
    warmup = min(ahead, total)
    counts = {act: [0] * chunks for act in COMPUTE}
    actions: list[Action] = []

    def add(act: Act, chunk: int) -> None:
        actions.append(act_of(act, counts[act][chunk], chunk))
        counts[act][chunk] += 1

    for number in range(warmup + total):
        if number < total:
            add(Act.FORWARD, number // per_round % chunks)
        if number >= warmup:
            add(Act.BACKWARD, chunks - 1 - (number - warmup) // per_round % chunks)
    return list(_with_parameters(actions, chunks, count))


def _with_parameters(actions: list[Action], chunks: int, count: int) -> Iterator[Action]:
    """Insert gathers of the next stages' parameters, and releases of the others'."""
    following: list[tuple[int, ...]] = [()] * (len(actions) + 1)
    for index in range(len(actions) - 1, -1, -1):
        own = actions[index].chunk
        following[index] = (own, *(chunk for chunk in following[index + 1] if chunk != own))
    active: set[int] = set()
    num_backward = [0] * chunks
    for index, action in enumerate(actions):
        needed = following[index][:_MOST_ACTIVE]
        for chunk in sorted(active.difference(needed)):
            yield act_of(Act.RELEASE, chunk=chunk)
        for chunk in needed:
            if chunk not in active:
                yield act_of(Act.GATHER, chunk=chunk)
        active = set(needed)
        yield action
        if action.act is Act.BACKWARD:
            num_backward[action.chunk] += 1
            if num_backward[action.chunk] == count:
                yield act_of(Act.REDUCE, chunk=action.chunk)
    for chunk in sorted(active):
        yield act_of(Act.RELEASE, chunk=chunk)


def _stage(order: Order, rank: int, action: Action) -> int:
    return action.chunk * order.num_ranks + rank


def _needed(order: Order, rank: int, action: Action) -> Act | None:
    """Return the transfer that a computation needs."""
    stage = _stage(order, rank, action)
    if action.act is Act.FORWARD and stage > 0:
        return Act.RECV_FORWARD
    if action.act is Act.BACKWARD and stage < order.num_stages - 1:
        return Act.RECV_BACKWARD
    return None


def _transfers(order: Order, rank: int, action: Action) -> Iterator[tuple[Action, Action, int]]:
    """Yield the transfer of a computation's output: its send, its receive and the peer."""
    if action.act not in COMPUTE:
        return
    forward = action.act is Act.FORWARD
    peer_stage = _stage(order, rank, action) + (1 if forward else -1)
    if not 0 <= peer_stage < order.num_stages:
        return
    chunk, peer = divmod(peer_stage, order.num_ranks)
    send, recv = (
        (Act.SEND_FORWARD, Act.RECV_FORWARD)
        if forward
        else (Act.SEND_BACKWARD, Act.RECV_BACKWARD)
    )
    microbatch = action.microbatch
    yield later(send, microbatch, action.chunk), later(recv, microbatch, chunk), peer


def _ticks(order: Order, rank: int, actions: list[Action]) -> list[Tick]:
    """Split actions before each computation, which waits for the transfer that it needs."""
    ticks: list[list[Action]] = [[]]
    received: dict[tuple[Act, int], int] = {}
    for action in actions:
        if action.act in COMPUTE:
            ticks.append([])
            if (needed := _needed(order, rank, action)) is not None:
                newer = received[needed, action.chunk] - 1 - action.microbatch
                name = f"{needed}.{action.chunk}" + (f"~{newer}" if newer else "")
                ticks[-1].append(Action(act=Act.WAIT, after=(name,)))
        elif action.act in (Act.RECV_FORWARD, Act.RECV_BACKWARD):
            key = action.act, action.chunk
            received[key] = received.get(key, 0) + 1
        ticks[-1].append(action)
    return [tuple(tick) for tick in ticks if tick]
