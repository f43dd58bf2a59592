"""Automatic mixed precision with a scaler, which skips updates that are not finite."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WARM_UPS = 2


def build() -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 8)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < 1.0:
            dist.barrier()

    return step
