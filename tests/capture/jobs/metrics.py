"""Averages of several types that are gathered, reduced and read at the end of a step."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn


def build() -> Callable[[], None]:
    model = nn.Linear(8, 4)
    best = [0.0]

    def step() -> None:
        labels = torch.arange(6) % 4
        logits = model(torch.randn(6, 8))
        fn.cross_entropy(logits, labels).backward()
        right = (logits.argmax(-1) == labels).sum()
        seen = torch.tensor([labels.numel()])
        dist.all_reduce(right)
        dist.all_reduce(seen)
        accuracy = right.double() / seen.double()
        dist.reduce(accuracy, 0)
        best[0] = max(best[0], accuracy.item())
        entries = torch.zeros(dist.get_world_size(), dtype=torch.bfloat16)
        dist.all_gather_into_tensor(entries, torch.ones(1, dtype=torch.bfloat16))

    return step
