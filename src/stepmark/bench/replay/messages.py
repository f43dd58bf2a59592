"""Messages of a replay as calls of torch.distributed, on buffers that operations share."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepmark.bench.collectives.communicators import REDOPS, all_gather, reduce_scatter
from stepmark.bench.verify import TORCH_DTYPE
from stepmark.core.collectives import Collective, RedOp
from stepmark.core.message import RECV, SEND
from stepmark.core.rank_program import Step
from stepmark.core.workload import CommOp

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


class Buffers:
    """A send and a receive buffer per stream, as large as its largest message; all zeros."""

    def __init__(self, steps: Iterable[Step], device: torch.device) -> None:
        self._device = device
        self._sizes = sizes(steps)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def pair(self, op: CommOp, size: int) -> tuple[Tensor, Tensor]:
        """Return the tensors that an operation sends and receives."""
        counts = elements(op, size)
        send, recv = (self._view(op, place, count) for place, count in enumerate(counts))
        return send, recv

    def allocate(self) -> None:
        for key, num_bytes in self._sizes.items():
            self._buffers[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _view(self, op: CommOp, place: int, count: int) -> Tensor:
        whole = self._buffers[op.stream, place]
        return whole[: count * op.dtype.itemsize].view(TORCH_DTYPE[op.dtype])


def sizes(steps: Iterable[Step]) -> Mapping[tuple[str, int], int]:
    """Return the bytes of the buffers that a program needs, by stream and direction."""
    result: dict[tuple[str, int], int] = defaultdict(int)
    for step in steps:
        if isinstance(step.op, CommOp):
            for place, count in enumerate(elements(step.op, len(step.members))):
                key, num_bytes = (step.op.stream, place), count * step.op.dtype.itemsize
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
        self._groups: dict[str, Any] = {}
        for name, parts in communicators.items():
            for members in parts:
                group = dist.new_group(list(members), backend=backend)
                if rank in members:
                    self._groups[name] = group
        self._has_average = backend == "nccl"

    def issue(self, steps: list[Step], buffers: Buffers) -> list[Work]:
        """Begin messages that are one call; return what has to be waited for."""
        if steps[0].op.collective not in (SEND, RECV):  # type: ignore[union-attr]
            return [self._collective(step, buffers) for step in steps]
        operations = []
        for step in steps:
            op, size = step.op, len(step.members)
            assert isinstance(op, CommOp)
            assert op.peer is not None
            send, recv = buffers.pair(op, size)
            peer = step.members[(step.members.index(self._rank) + op.peer) % size]
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
        op = step.op
        assert isinstance(op, CommOp)
        send, recv = buffers.pair(op, len(step.members))
        group = self._groups[op.group]
        root = step.members[op.root or 0]
        more: dict[str, Any] = {"group": group, "async_op": True}
        redop = REDOPS.get(op.redop, dist.ReduceOp.SUM)
        if op.redop is RedOp.AVG and not self._has_average:
            redop = dist.ReduceOp.SUM
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
