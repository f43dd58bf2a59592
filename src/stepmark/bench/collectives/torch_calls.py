"""One binder per collective: from buffers to the call that torch.distributed offers for it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stepmark.bench.collectives.data import PREMUL_FACTOR
from stepmark.core.collectives import Collective, RedOp
from stepmark.core.comm_case import CommCase

Issue = Callable[[], object]

# torch 2.13 renamed these two; 2.11 knows the former names only.
_all_gather_tensor: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_tensor: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank's place in a communicator, with its buffers as core/comm_case.py sizes them."""

    group: dist.ProcessGroup
    members: tuple[int, ...]  # world ranks
    case: CommCase
    index: int
    send: torch.Tensor
    recv: torch.Tensor

    @property
    def root(self) -> int:
        """World rank of the root."""
        return self.members[self.case.root]

    @property
    def others(self) -> list[int]:
        """Places of all but the root."""
        return [index for index in range(self.case.num_ranks) if index != self.case.root]


def bind(seat: Seat) -> Issue:
    """The call, ready to be made."""
    return _BINDERS[seat.case.collective](seat)


def _redop(redop: RedOp) -> Any:
    if redop is RedOp.MULSUM:
        made: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  no public name
        return made(PREMUL_FACTOR)
    return _REDOPS[redop]


_REDOPS = {
    RedOp.SUM: dist.ReduceOp.SUM,
    RedOp.PROD: dist.ReduceOp.PRODUCT,
    RedOp.MIN: dist.ReduceOp.MIN,
    RedOp.MAX: dist.ReduceOp.MAX,
    RedOp.AVG: dist.ReduceOp.AVG,
}


def _all_reduce(seat: Seat) -> Issue:
    op = _redop(seat.case.redop)
    return functools.partial(dist.all_reduce, seat.recv, op=op, group=seat.group)


def _all_gather(seat: Seat) -> Issue:
    return functools.partial(_all_gather_tensor, seat.recv, seat.send, group=seat.group)


def _reduce_scatter(seat: Seat) -> Issue:
    op = _redop(seat.case.redop)
    return functools.partial(
        _reduce_scatter_tensor, seat.recv, seat.send, op=op, group=seat.group
    )


def _broadcast(seat: Seat) -> Issue:
    return functools.partial(dist.broadcast, seat.recv, src=seat.root, group=seat.group)


def _reduce(seat: Seat) -> Issue:
    op = _redop(seat.case.redop)
    return functools.partial(dist.reduce, seat.recv, dst=seat.root, op=op, group=seat.group)


def _all_to_all(seat: Seat) -> Issue:
    return functools.partial(dist.all_to_all_single, seat.recv, seat.send, group=seat.group)


def _all_to_all_v(seat: Seat) -> Issue:
    counts = seat.case.counts
    into, out_of = [row[seat.index] for row in counts], list(counts[seat.index])
    return functools.partial(
        dist.all_to_all_single, seat.recv, seat.send, into, out_of, group=seat.group
    )


def _gather(seat: Seat) -> Issue:
    is_root = seat.index == seat.case.root
    parts = list(seat.recv.chunk(seat.case.num_ranks)) if is_root else None
    return functools.partial(dist.gather, seat.send, parts, dst=seat.root, group=seat.group)


def _scatter(seat: Seat) -> Issue:
    is_root = seat.index == seat.case.root
    parts = list(seat.send.chunk(seat.case.num_ranks)) if is_root else None
    return functools.partial(dist.scatter, seat.recv, parts, src=seat.root, group=seat.group)


def _batch(seat: Seat, moves: Sequence[tuple[Any, torch.Tensor, int]]) -> Issue:
    """All of these sends and receives at once; peers by place."""
    batch = [
        dist.P2POp(kind, part, peer=seat.members[peer], group=seat.group)
        for kind, part, peer in moves
    ]

    def issue() -> None:
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return issue


def _sendrecv(seat: Seat) -> Issue:
    n, me = seat.case.num_ranks, seat.index
    moves = [(dist.isend, seat.send, (me + 1) % n), (dist.irecv, seat.recv, (me - 1) % n)]
    return _batch(seat, moves)


def _p2p(seat: Seat) -> Issue:
    first = seat.index == 0
    return _batch(seat, [(dist.isend, seat.send, 1) if first else (dist.irecv, seat.recv, 0)])


def _p2p_both(seat: Seat) -> Issue:
    peer = 1 - seat.index
    return _batch(seat, [(dist.isend, seat.send, peer), (dist.irecv, seat.recv, peer)])


def _ping_pong(seat: Seat) -> Issue:
    first = seat.index == 0
    there = [(dist.isend, seat.send, 1) if first else (dist.irecv, seat.recv, 0)]
    back = [(dist.irecv, seat.recv, 1) if first else (dist.isend, seat.recv, 0)]
    steps = (_batch(seat, there), _batch(seat, back))

    def issue() -> None:
        for step in steps:
            step()

    return issue


def _incast(seat: Seat) -> Issue:
    if seat.index != seat.case.root:
        return _batch(seat, [(dist.isend, seat.send, seat.case.root)])
    parts = seat.recv.chunk(len(seat.others))
    return _batch(
        seat, [(dist.irecv, part, peer) for part, peer in zip(parts, seat.others, strict=True)]
    )


def _multicast(seat: Seat) -> Issue:
    if seat.index != seat.case.root:
        return _batch(seat, [(dist.irecv, seat.recv, seat.case.root)])
    parts = seat.send.chunk(len(seat.others))
    return _batch(
        seat, [(dist.isend, part, peer) for part, peer in zip(parts, seat.others, strict=True)]
    )


def _barrier(seat: Seat) -> Issue:
    if seat.send.device.type == "cuda":
        places = [seat.send.device.index]
        return functools.partial(dist.barrier, group=seat.group, device_ids=places)
    return functools.partial(dist.barrier, group=seat.group)


_BINDERS: dict[Collective, Callable[[Seat], Issue]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.BROADCAST: _broadcast,
    Collective.REDUCE: _reduce,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.ALL_TO_ALL_V: _all_to_all_v,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.SENDRECV: _sendrecv,
    Collective.P2P: _p2p,
    Collective.P2P_BOTH: _p2p_both,
    Collective.PING_PONG: _ping_pong,
    Collective.INCAST: _incast,
    Collective.MULTICAST: _multicast,
    Collective.BARRIER: _barrier,
}
