"""Context parallelism: heads against positions, by all-to-all."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as fn


def exchanged(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    world = dist.get_world_size()
    parts = torch.stack(x.chunk(world, scatter)).contiguous()
    received = funcol.all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return torch.cat(received.unbind(0), gather)


def build() -> Callable[[], None]:
    qkv, out = nn.Linear(8, 24), nn.Linear(8, 8)

    def step() -> None:
        x = torch.randn(2, 4, 8)
        parts = (part.view(2, 4, 4, 2) for part in qkv(x).chunk(3, -1))
        q, k, v = (exchanged(part, 2, 1).transpose(1, 2) for part in parts)
        attended = fn.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out(exchanged(attended, 1, 2).flatten(2)).sum().backward()

    return step
