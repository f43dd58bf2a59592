"""Logits that stay sharded over the vocabulary, and a loss of labels."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as fn


def build() -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        tokens = torch.randint(16, (2, 4))
        with loss_parallel():
            logits = model(tokens)
            fn.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
