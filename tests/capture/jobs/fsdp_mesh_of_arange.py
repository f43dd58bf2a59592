"""A mesh of a tensor of ranks; sharded in rows, replicated in columns."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def build() -> Callable[[], None]:
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
