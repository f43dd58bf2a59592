"""Flat gradients are scattered, a part is updated, parameters are gathered."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn


def build() -> Callable[[], None]:
    model = nn.Linear(8, 7)
    world = dist.get_world_size()

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        flat = torch.cat(grads)
        padded = fn.pad(flat, (0, -flat.numel() % world))
        part = padded.new_empty(padded.numel() // world)
        dist.reduce_scatter_tensor(part, padded)
        whole = torch.empty_like(padded)
        dist.all_gather_into_tensor(whole, part * -0.1)
        with torch.no_grad():
            sizes = [p.numel() for p in model.parameters()]
            deltas = whole[: flat.numel()].split(sizes)
            for p, delta in zip(model.parameters(), deltas, strict=True):
                p.add_(delta.view_as(p))
                p.grad = None

    return step
