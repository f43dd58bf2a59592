"""A recorder of messages that keeps their order and ranks, for comparisons with rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stepmark.training.messages import (
    BATCH_P2P,
    PAIRS,
    MessageKind,
    MessageRecorder,
    group_of,
    kinds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One call on this rank. members: world ranks of its group, in the order of group ranks."""

    kind: MessageKind
    members: tuple[int, ...] = ()
    peer: int | None = None  # of send and recv: group rank
    in_backward: bool = False  # issued by autograd


class OrderedRecorder(MessageRecorder):
    """Records messages in order, with their ranks. Memory grows with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: list[Message] = []

    def note(self, name: str, values: Sequence[Any], result: Any) -> None:
        super().note(name, values, result)
        group = next(filter(None, map(group_of, values)), None)
        members = tuple(dist.get_process_group_ranks(group)) if group else ()
        in_backward = torch._C._current_graph_task_id() != -1
        messages = list(kinds(name, values, result, self.phase))
        self.ordered.extend(
            Message(kind=kind, members=members, peer=peer, in_backward=in_backward)
            for kind, peer in zip(messages, _peers(name, values, len(messages)), strict=True)
        )


def _peers(name: str, values: Sequence[Any], count: int) -> Sequence[int | None]:
    if name == BATCH_P2P:
        return list(values[1])
    return [int(values[2])] if name in PAIRS else [None] * count
