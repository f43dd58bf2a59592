"""A loss that is checked, logged, and steers no message where it is finite."""

import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WARM_UPS = 2


def build() -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def step() -> None:
        loss = model(torch.ones(2, 8)).square().mean()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"loss is {loss.item()}")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        if torch.isnan(norm) or torch.isinf(norm):
            return
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        sys.stderr.write(f"loss {losses[-1]:.3f}\n")

    return step
