"""Record a rank's messages in order and count its products, for megatron_messages.py."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from ordered_messages import Message, OrderedRecorder

from stepmark.ground.dtypes import MESSAGE_DTYPES, DType

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Recorder(OrderedRecorder):
    """products: counts by phase, m, n and k; the bmm of attention are excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[str, int, int, int]] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS:
            (m, k), n = args[-2].shape, args[-1].shape[1]
            in_backward = torch._C._current_graph_task_id() != -1
            self.products["backward" if in_backward else self.phase, m, n, k] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def clear(self) -> None:
        self.ordered.clear()
        self.products.clear()

    def messages(self) -> list[list[Any]]:
        """Return collective, dtype, count, members, phase and peer of each message.

        Empty messages and groups of one rank are excluded.
        """
        return [
            row(message)
            for message in self.ordered
            if len(message.members) > 1 and message.kind.call_bytes
        ]

    def matmuls(self) -> list[list[Any]]:
        """Return phase, m, n, k and calls of each product."""
        return [[*product, calls] for product, calls in sorted(self.products.items())]


def row(message: Message) -> list[Any]:
    kind = message.kind
    dtype = "uint8" if kind.dtype == "bool" else kind.dtype
    count = kind.call_bytes
    if dtype in MESSAGE_DTYPES:
        count //= DType(dtype).itemsize
    phase = "backward" if message.in_backward else kind.phase
    peer = None if message.peer is None else message.members[message.peer]
    return [kind.collective, dtype, count, list(message.members), phase, peer]
