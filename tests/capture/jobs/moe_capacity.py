"""Experts with a capacity: tokens are placed in buffers of equal size by masks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

EXPERTS, TOP_K, TOKENS = 8, 2, 16


def evenly(scores: torch.Tensor) -> torch.Tensor:
    """Prefer experts by turns, as a router that is balanced does."""
    turns = (torch.arange(TOKENS * TOP_K) % EXPERTS).view(TOKENS, TOP_K)
    return scores + 100 * fn.one_hot(turns, EXPERTS).sum(1)


CAPACITY = 6


def build() -> Callable[[], None]:
    router = nn.Linear(8, EXPERTS)

    def step() -> None:
        x = torch.randn(TOKENS, 8)
        gates, chosen = evenly(router(x)).softmax(-1).topk(TOP_K)
        mask = fn.one_hot(chosen, EXPERTS).view(-1, EXPERTS)
        places = (mask.cumsum(0) - 1).mul(mask).sum(-1)
        kept = places < CAPACITY
        buffer = torch.zeros(EXPERTS * CAPACITY, 8)
        slots = (chosen.view(-1) * CAPACITY + places)[kept]
        buffer = buffer.index_copy(0, slots, x.repeat_interleave(TOP_K, 0)[kept])
        received = torch.empty_like(buffer)
        dist.all_to_all_single(received, buffer.contiguous())
        dropped = (~kept).sum()
        dist.all_reduce(dropped)
        if dropped.item() > 0:
            dist.barrier()
        (gates.sum() + received.sum()).backward()

    return step
