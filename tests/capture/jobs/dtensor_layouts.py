"""A distributed tensor that changes its layout, also unevenly divided."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def build() -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    table = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])

    def step() -> None:
        columns = table.redistribute(mesh, [Shard(1)])
        whole = columns.redistribute(mesh, [Replicate()])
        (whole.to_local() @ torch.randn(16, 2)).sum()
        uneven = torch.randn(8, 6)
        distribute_tensor(uneven, mesh, [Shard(1)]).full_tensor()

    return step
