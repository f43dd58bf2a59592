"""A generator and a critic, each under DDP."""

from collections.abc import Callable

import torch
from torch import nn

WARM_UPS = 2


def build() -> Callable[[], None]:
    wrap = nn.parallel.DistributedDataParallel
    maker, critic = wrap(nn.Linear(4, 8)), wrap(nn.Linear(8, 1), broadcast_buffers=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, critic)]

    def step() -> None:
        fake = maker(torch.randn(2, 4))
        critic(fake.detach()).mean().backward()
        optimizers[1].step()
        critic(maker(torch.randn(2, 4))).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return step
