"""Weights of a truncated normal distribution; decay rates of a linspace."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as fn


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.inner = rate, nn.Linear(8, int(8 * (1 + 10 * rate)))
        self.outer = nn.Linear(self.inner.out_features, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + fn.dropout(self.outer(self.inner(x)), self.rate)


def build() -> Callable[[], None]:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    model = nn.Sequential(*(Block(rate) for rate in rates))
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
