"""A gradient norm that is read and compared; both branches send the same."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def build() -> Callable[[], None]:
    model = fully_shard(nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        total = nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        norm = total.full_tensor() if hasattr(total, "full_tensor") else total
        if norm.item() > 1.0:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / float(norm))
        optimizer.step()
        optimizer.zero_grad()

    return step
