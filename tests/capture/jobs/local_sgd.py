"""Parameters that are averaged every second step, which a counter on the device tells."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def build() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counter.add_(1)
            if counter % 2 == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        dist.all_reduce(parameter)
                        parameter.div_(dist.get_world_size())

    return step
