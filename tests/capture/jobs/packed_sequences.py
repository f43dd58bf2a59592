"""Sequences of several lengths in one batch, from constants that are read."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

LENGTHS = 3, 5, 1, 7


def build() -> Callable[[], None]:
    model = nn.Linear(8, 8)

    def step() -> None:
        ends = torch.tensor(LENGTHS).cumsum(0)
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        starts = (positions == 0).nonzero().flatten()
        assert starts.numel() == len(LENGTHS)
        x = model(torch.randn(int(ends[-1]), 8))
        longest = int((ends - starts).max())
        padded = torch.zeros(len(LENGTHS), longest, 8)
        for row, part in enumerate(x.tensor_split(ends[:-1].tolist())):
            padded[row, : part.size(0)] = part
        valid = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
        kept = padded[valid].detach()
        dist.all_reduce(kept)
        padded.sum().backward()
        dist.all_reduce(torch.tensor([valid.sum().item()]))

    return step
