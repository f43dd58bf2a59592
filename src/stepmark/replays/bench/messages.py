"""Messages of a replay as calls of torch.distributed, on buffers that operations share."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.cases.message import RECV, SEND
from stepmark.collectives.bench.communicators import REDOPS, all_gather, reduce_scatter
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.collectives import FACTS, Collective, RedOp
from stepmark.step.rank_program import Step
from stepmark.step.workload import CommOp

Work = Any


def elements(op: CommOp, size: int) -> tuple[int, int]:
    """Return the elements that a rank sends and receives, in a group of this size."""
    if op.collective in (SEND, RECV):
        return op.count, op.count
    match Collective(op.collective):
        case Collective.ALL_GATHER | Collective.GATHER:
            return op.count, op.count * size
        case Collective.REDUCE_SCATTER | Collective.SCATTER:
            return op.count * size, op.count
        case Collective.ALL_TO_ALL | Collective.ALL_TO_ALL_V:
            return op.count * size, op.count * size
        case _:
            return op.count, op.count


class Buffers(Protocol):
    """Tensors of messages."""

    def pair(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the tensors that a message sends and receives."""


class SharedBuffers:
    """A send and a receive buffer per stream, as large as its largest message; all zeros."""

    def __init__(self, steps: Iterable[Step], device: torch.device) -> None:
        self._buffers = {
            key: torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            for key, num_bytes in sizes(steps).items()
        }

    def pair(self, step: Step) -> tuple[Tensor, Tensor]:
        op = message(step)
        dtype = TORCH_DTYPE[op.dtype]
        size = op.dtype.itemsize
        counts = elements(op, len(step.members))
        send, recv = (
            self._buffers[op.stream, place][: count * size].view(dtype)
            for place, count in enumerate(counts)
        )
        return send, recv


def message(step: Step) -> CommOp:
    """Return the message that a step is."""
    assert isinstance(step.op, CommOp)
    return step.op


def redop_of(op: CommOp, backend: str) -> RedOp:
    """Return the reduction that runs: a sum where the file names none.

    gloo has no average; in its place it sums.
    """
    if op.collective in (SEND, RECV) or not FACTS[Collective(op.collective)].reduces:
        return RedOp.NONE
    has_it = op.redop is not RedOp.NONE and (op.redop is not RedOp.AVG or backend == "nccl")
    return op.redop if has_it else RedOp.SUM


def peer_of(step: Step, rank: int) -> int:
    """Return the world rank that a rank sends to or receives from."""
    op = message(step)
    members = step.members
    assert op.peer is not None
    return members[(members.index(rank) + op.peer) % len(members)]


def sizes(steps: Iterable[Step]) -> Mapping[tuple[str, int], int]:
    """Return the bytes of the buffers that a program needs, by stream and direction."""
    result: dict[tuple[str, int], int] = defaultdict(int)
    for step in steps:
        if isinstance(step.op, CommOp):
            for place, count in enumerate(elements(step.op, len(step.members))):
                key = (step.op.stream, place)
                num_bytes = count * step.op.dtype.itemsize
                result[key] = max(result[key], num_bytes, 8)
    return result


class Messenger:
    """Issues messages in the communicators of a workload, each a process group of its own."""

    def __init__(
        self,
        communicators: Mapping[str, Iterable[tuple[int, ...]]],
        rank: int,
        backend: str,
    ) -> None:
        """Make the groups; every rank calls it with the same communicators."""
        self._rank = rank
        self._backend = backend
        self._groups: dict[str, Any] = {}
        for name, parts in communicators.items():
            for members in parts:
                group = dist.new_group(list(members), backend=backend)
                if rank in members:
                    self._groups[name] = group

    def issue(self, steps: list[Step], buffers: Buffers) -> list[Work]:
        """Begin messages that are one call; return what has to be waited for."""
        if message(steps[0]).collective not in (SEND, RECV):
            return [self._collective(step, buffers) for step in steps]
        operations = []
        for step in steps:
            op = message(step)
            peer = peer_of(step, self._rank)
            send, recv = buffers.pair(step)
            kind, tensor = (dist.isend, send) if op.collective == SEND else (dist.irecv, recv)
            operations.append(dist.P2POp(kind, tensor, peer, self._groups[op.group]))
        return list(dist.batch_isend_irecv(operations))

    def abort(self) -> None:
        """End blocked messages; called from another thread."""
        for group in self._groups.values():
            if stop := getattr(group, "abort", None):
                stop()

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}

    def _collective(self, step: Step, buffers: Buffers) -> Work:  # noqa: PLR0911, one each
        op = message(step)
        send, recv = buffers.pair(step)
        group = self._groups[op.group]
        root = step.members[op.root or 0]
        more: dict[str, Any] = {"group": group, "async_op": True}
        redop = REDOPS.get(redop_of(op, self._backend))
        match Collective(op.collective):
            case Collective.ALL_REDUCE:
                return dist.all_reduce(recv, op=redop, **more)
            case Collective.ALL_GATHER:
                return all_gather(recv, send, **more)
            case Collective.REDUCE_SCATTER:
                return reduce_scatter(recv, send, op=redop, **more)
            case Collective.BROADCAST:
                return dist.broadcast(recv, src=root, **more)
            case Collective.REDUCE:
                return dist.reduce(recv, dst=root, op=redop, **more)
            case Collective.ALL_TO_ALL | Collective.ALL_TO_ALL_V:
                return dist.all_to_all_single(recv, send, **more)
            case Collective.GATHER:
                parts = list(recv.chunk(len(step.members))) if root == self._rank else None
                return dist.gather(send, parts, dst=root, **more)
            case Collective.SCATTER:
                parts = list(send.chunk(len(step.members))) if root == self._rank else None
                return dist.scatter(recv, parts, src=root, **more)
            case Collective.BARRIER:
                return dist.barrier(**more)
            case _:
                raise ValueError(f"{op.collective} is no message of a training step")
