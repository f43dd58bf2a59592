"""Experts that get different numbers of tokens, which are gathered."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

EXPERTS = 4
TOKENS_PER_EXPERT = COUNTS = 7, 1, 3, 5  # tokens of a rank to each expert


def build() -> Callable[[], None]:
    router, expert = nn.Linear(8, EXPERTS), nn.Linear(8, 8)
    wanted = torch.arange(EXPERTS).repeat_interleave(torch.tensor(COUNTS))
    rank = dist.get_rank()

    def step() -> None:
        x = torch.randn(sum(COUNTS), 8)
        scores = router(x) + 100 * fn.one_hot(wanted, EXPERTS)
        chosen = scores.argmax(-1)
        counts = torch.stack([(chosen == number).sum() for number in range(EXPERTS)])
        everyone = torch.zeros(dist.get_world_size(), EXPERTS, dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, counts[None])
        sends, receives = counts.tolist(), everyone[:, rank].tolist()
        tokens = x.new_empty(sum(receives), 8)
        dist.all_to_all_single(tokens, x[chosen.argsort(stable=True)], receives, sends)
        expert(tokens).sum().backward()

    return step
