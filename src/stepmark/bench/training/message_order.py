"""Every message that this rank sends, one after the other: what a workload is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stepmark.bench.training.messages import MessageRecorder, group_of, kinds
from stepmark.core.message import MessageKind

_PAIRS = ("send", "recv_", "isend", "irecv")
_BATCH = "batch_p2p_ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One call on this rank. members: world ranks of its group, in the order of group ranks."""

    kind: MessageKind
    members: tuple[int, ...] = ()
    peer: int | None = None  # of send and recv: group rank
    in_backward: bool = False  # issued by autograd


class OrderedRecorder(MessageRecorder):
    """Keeps the order, and who takes part. Its memory grows with the number of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: list[Message] = []

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        super().note(name, values, result)
        group = next((found for value in values if (found := group_of(value))), None)
        members = tuple(dist.get_process_group_ranks(group)) if group else ()
        in_backward = torch._C._current_graph_task_id() != -1
        found = list(kinds(name, values, result, self.phase))
        self.ordered.extend(
            Message(kind=kind, members=members, peer=peer, in_backward=in_backward)
            for kind, peer in zip(found, _peers(name, values, len(found)), strict=True)
        )


def _peers(name: str, values: Sequence[Any], count: int) -> Sequence[int | None]:
    if name == _BATCH:
        return list(values[1])
    return [int(values[2])] if name in _PAIRS else [None] * count
