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
class Endpoint:
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


def bind(end: Endpoint) -> Issue:
    """The call, ready to be made."""
    return _BINDERS[end.case.collective](end)


def _redop(redop: RedOp) -> Any:
    if redop is RedOp.MULSUM:
        make: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  no public name
        return make(PREMUL_FACTOR)
    return _REDOPS[redop]


_REDOPS = {
    RedOp.SUM: dist.ReduceOp.SUM,
    RedOp.PROD: dist.ReduceOp.PRODUCT,
    RedOp.MIN: dist.ReduceOp.MIN,
    RedOp.MAX: dist.ReduceOp.MAX,
    RedOp.AVG: dist.ReduceOp.AVG,
}


def _all_reduce(end: Endpoint) -> Issue:
    op = _redop(end.case.redop)
    return functools.partial(dist.all_reduce, end.recv, op=op, group=end.group)


def _all_gather(end: Endpoint) -> Issue:
    return functools.partial(_all_gather_tensor, end.recv, end.send, group=end.group)


def _reduce_scatter(end: Endpoint) -> Issue:
    op = _redop(end.case.redop)
    return functools.partial(_reduce_scatter_tensor, end.recv, end.send, op=op, group=end.group)


def _broadcast(end: Endpoint) -> Issue:
    return functools.partial(dist.broadcast, end.recv, src=end.root, group=end.group)


def _reduce(end: Endpoint) -> Issue:
    op = _redop(end.case.redop)
    return functools.partial(dist.reduce, end.recv, dst=end.root, op=op, group=end.group)


def _all_to_all(end: Endpoint) -> Issue:
    return functools.partial(dist.all_to_all_single, end.recv, end.send, group=end.group)


def _all_to_all_v(end: Endpoint) -> Issue:
    counts = end.case.counts
    into, out_of = [row[end.index] for row in counts], list(counts[end.index])
    return functools.partial(
        dist.all_to_all_single, end.recv, end.send, into, out_of, group=end.group
    )


def _gather(end: Endpoint) -> Issue:
    is_root = end.index == end.case.root
    parts = list(end.recv.chunk(end.case.num_ranks)) if is_root else None
    return functools.partial(dist.gather, end.send, parts, dst=end.root, group=end.group)


def _scatter(end: Endpoint) -> Issue:
    is_root = end.index == end.case.root
    parts = list(end.send.chunk(end.case.num_ranks)) if is_root else None
    return functools.partial(dist.scatter, end.recv, parts, src=end.root, group=end.group)


def _batch(end: Endpoint, moves: Sequence[tuple[Any, torch.Tensor, int]]) -> Issue:
    """All of these sends and receives at once; peers by place."""
    batch = [
        dist.P2POp(kind, part, peer=end.members[peer], group=end.group)
        for kind, part, peer in moves
    ]

    def issue() -> None:
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return issue


def _sendrecv(end: Endpoint) -> Issue:
    n, me = end.case.num_ranks, end.index
    moves = [
        (dist.isend, end.send, (me + 1) % n),
        (dist.irecv, end.recv, (me - 1) % n),
    ]
    return _batch(end, moves)


def _p2p(end: Endpoint) -> Issue:
    first = end.index == 0
    return _batch(end, [(dist.isend, end.send, 1) if first else (dist.irecv, end.recv, 0)])


def _p2p_both(end: Endpoint) -> Issue:
    peer = 1 - end.index
    return _batch(end, [(dist.isend, end.send, peer), (dist.irecv, end.recv, peer)])


def _ping_pong(end: Endpoint) -> Issue:
    first = end.index == 0
    there = [(dist.isend, end.send, 1) if first else (dist.irecv, end.recv, 0)]
    back = [(dist.irecv, end.recv, 1) if first else (dist.isend, end.recv, 0)]
    steps = (_batch(end, there), _batch(end, back))

    def issue() -> None:
        for step in steps:
            step()

    return issue


def _incast(end: Endpoint) -> Issue:
    if end.index != end.case.root:
        return _batch(end, [(dist.isend, end.send, end.case.root)])
    parts = end.recv.chunk(len(end.others))
    return _batch(
        end,
        [(dist.irecv, part, peer) for part, peer in zip(parts, end.others, strict=True)],
    )


def _multicast(end: Endpoint) -> Issue:
    if end.index != end.case.root:
        return _batch(end, [(dist.irecv, end.recv, end.case.root)])
    parts = end.send.chunk(len(end.others))
    return _batch(
        end,
        [(dist.isend, part, peer) for part, peer in zip(parts, end.others, strict=True)],
    )


def _barrier(end: Endpoint) -> Issue:
    if end.send.device.type == "cuda":
        places = [end.send.device.index]
        return functools.partial(dist.barrier, group=end.group, device_ids=places)
    return functools.partial(dist.barrier, group=end.group)


_BINDERS: dict[Collective, Callable[[Endpoint], Issue]] = {
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
