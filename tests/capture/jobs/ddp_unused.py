"""DDP with a parameter that no step uses."""

from collections.abc import Callable

import torch
from torch import nn

WARM_UPS = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def build() -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
