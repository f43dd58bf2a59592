"""Schedules of torch.distributed.pipelining, call by call.

torch 2.13, torch/distributed/pipelining/schedules.py: Schedule1F1B and ScheduleGPipe
(_step_microbatches); multi_stage.py has the others. A transfer with an immediate wait is on the
computation's stream; an action with `after` is asynchronous. Waits for sends are left out: the
sends are long done by then.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from stepmark.model.parallel import PipelineSchedule
from stepmark.workloads.pipeline import Act, Span, Tick
from stepmark.workloads.rules.pytorch.multi_stage import moved_tick, multi_stage_spans
from stepmark.workloads.rules.pytorch.order import Order, act_of, later


@lru_cache(maxsize=16)  # of the same pipeline many steps are predicted
def spans(order: Order) -> list[tuple[Span, ...]]:
    """Return the schedule of each pp rank; ticks that repeat are one span."""
    if order.schedule not in _OF_ONE_STAGE:
        return multi_stage_spans(order)
    schedule_of_rank = _OF_ONE_STAGE[order.schedule]
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
        cool = moved_tick(_BACKWARD_ALONE, first + 1)
        yield Span(ticks=(around(cool),), times=warmup - 1)
    yield Span(ticks=((act_of(Act.REDUCE),),))


_OF_ONE_STAGE = {PipelineSchedule.GPIPE: _gpipe, PipelineSchedule.ONE_F_ONE_B: _one_f_one_b}
