"""DDP that broadcasts the statistics of a batch norm."""

from collections.abc import Callable

import torch
from torch import nn

WARM_UPS = 2


def build() -> Callable[[], None]:
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.parallel.DistributedDataParallel(layers)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
