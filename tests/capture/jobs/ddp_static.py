"""DDP with a static graph, gradients as views of buckets, small buckets."""

from collections.abc import Callable

import torch
from torch import nn

WARM_UPS = 2


def build() -> Callable[[], None]:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = nn.parallel.DistributedDataParallel(
        layers, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0005
    )

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
