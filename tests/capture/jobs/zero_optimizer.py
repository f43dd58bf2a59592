"""DDP with an optimizer whose state is divided among ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

WARM_UPS = 2


def build() -> Callable[[], None]:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
