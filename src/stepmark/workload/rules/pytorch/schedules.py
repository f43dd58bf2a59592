"""In which order a stage of torch.distributed.pipelining works, call by call.

torch 2.13, torch/distributed/pipelining/schedules.py: Schedule1F1B and ScheduleGPipe
(_step_microbatches); the interleaved one is in interleaved. What a call waits for at once
lies on the computation's stream; an action with `after` is asynchronous. Waits for sends,
long done by then, are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from stepmark.core.errors import ConfigError
from stepmark.workload.pipeline import Act, Action, Span, Tick
from stepmark.workload.rules.pytorch.fsdp_order import PASSED

COMPUTE = (Act.FORWARD, Act.BACKWARD)
# What has a micro-batch.
MOVED = (
    *COMPUTE,
    Act.SEND_FORWARD,
    Act.RECV_FORWARD,
    Act.SEND_BACKWARD,
    Act.RECV_BACKWARD,
)


class Schedule(StrEnum):
    """Of torch, by our names."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    GPIPE = "gpipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A pass of so many micro-batches through all stages. Raises ConfigError."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1  # stages of a rank

    def __post_init__(self) -> None:
        count, ranks = self.num_microbatches, self.num_ranks
        if self.schedule is Schedule.ONE_F_ONE_B and count < ranks:
            raise ConfigError("pp_microbatches", count, f"at least pp ({ranks}) with 1f1b")
        if self.schedule is Schedule.INTERLEAVED and count % self.rounds:
            raise ConfigError(
                "pp_microbatches",
                count,
                f"a multiple of its rounds ({count} // pp {ranks} = {self.rounds})",
            )

    @property
    def rounds(self) -> int:
        return max(1, self.num_microbatches // self.num_ranks)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


@cache
def act_of(act: Act, microbatch: int = 0, chunk: int = 0, *, fused: bool = False) -> Action:
    return Action(act=act, microbatch=microbatch, chunk=chunk, fused=fused)


@cache
def later(act: Act, microbatch: int, chunk: int = 0) -> Action:
    """Goes on beside the computation, from the end of what was computed so far."""
    return Action(act=act, microbatch=microbatch, chunk=chunk, after=(PASSED,))


def spans(order: Order) -> list[tuple[Span, ...]]:
    """By rank what it does where it has one stage; ticks that repeat as one span."""
    one = _gpipe if order.schedule is Schedule.GPIPE else _one_f_one_b
    ranks, count = order.num_ranks, order.num_microbatches
    return [tuple(one(rank, ranks, count)) for rank in range(ranks)]


def _around(rank: int, num_ranks: int) -> Callable[[Tick], Tick]:
    """Keeps what a stage has neighbours for."""
    missing: set[Act] = set()
    if rank == 0:
        missing |= {Act.RECV_FORWARD, Act.SEND_BACKWARD}
    if rank == num_ranks - 1:
        missing |= {Act.SEND_FORWARD, Act.RECV_BACKWARD}
    return lambda tick: tuple(one for one in tick if one.act not in missing)


def _gpipe(rank: int, num_ranks: int, count: int) -> Iterator[Span]:
    kept = _around(rank, num_ranks)
    forward = act_of(Act.RECV_FORWARD, 0), act_of(Act.FORWARD, 0), later(Act.SEND_FORWARD, 0)
    back = act_of(Act.RECV_BACKWARD, 0), act_of(Act.BACKWARD, 0), later(Act.SEND_BACKWARD, 0)
    yield Span(ticks=(kept(forward),), times=count)
    yield Span(ticks=(kept(back),), times=count)
    yield Span(ticks=((act_of(Act.REDUCE),),))


def _one_f_one_b(rank: int, num_ranks: int, count: int) -> Iterator[Span]:
    kept = _around(rank, num_ranks)
    warmup = min(count, num_ranks - rank)

    def turned(ahead: int, behind: int) -> Tick:
        """The last output leaves while a gradient arrives."""
        sent = act_of(Act.SEND_FORWARD, ahead)
        return sent, act_of(Act.RECV_BACKWARD, behind, fused=True), act_of(Act.BACKWARD, behind)

    warm = act_of(Act.RECV_FORWARD, 0), act_of(Act.FORWARD, 0), later(Act.SEND_FORWARD, 0)
    if warmup > 1:
        yield Span(ticks=(kept(warm),), times=warmup - 1)
    last_warm = act_of(Act.RECV_FORWARD, warmup - 1), act_of(Act.FORWARD, warmup - 1)
    yield Span(ticks=(kept(last_warm),))
    if count > warmup:
        steady = (
            *turned(warmup - 1, 0),
            act_of(Act.SEND_BACKWARD, 0),
            act_of(Act.RECV_FORWARD, warmup, fused=True),
            act_of(Act.FORWARD, warmup),
        )
        yield Span(ticks=(kept(steady),), times=count - warmup)
    first = count - warmup
    last = (*turned(count - 1, first), later(Act.SEND_BACKWARD, first))
    yield Span(ticks=(kept(last),))
    if warmup > 1:
        back = (
            act_of(Act.RECV_BACKWARD, 0),
            act_of(Act.BACKWARD, 0),
            later(Act.SEND_BACKWARD, 0),
        )
        cool = tuple(replace(one, microbatch=first + 1) for one in back)
        yield Span(ticks=(kept(cool),), times=warmup - 1)
    yield Span(ticks=((act_of(Act.REDUCE),),))
