"""An embedding and a loss divided over the vocabulary, by hand."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

VOCAB = 16


def build() -> Callable[[], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    width = VOCAB // world
    table = nn.Parameter(torch.randn(width, 8))

    def step() -> None:
        tokens = torch.randint(VOCAB, (2, 4))
        outside = (tokens < rank * width) | (tokens >= (rank + 1) * width)
        local = (tokens - rank * width).masked_fill(outside, 0)
        embedded = fn.embedding(local, table).masked_fill(outside[..., None], 0.0).detach()
        dist.all_reduce(embedded)
        logits = embedded @ table.T
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total = (logits - largest[..., None]).exp().sum(-1)
        dist.all_reduce(total.detach())
        total.log().mean().backward()

    return step
