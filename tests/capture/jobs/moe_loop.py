"""Experts one after the other, each with the tokens that chose it, as Mixtral's."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

EXPERTS, TOP_K, TOKENS = 8, 2, 16


def evenly(scores: torch.Tensor) -> torch.Tensor:
    """Prefer experts by turns, as a router that is balanced does."""
    turns = (torch.arange(TOKENS * TOP_K) % EXPERTS).view(TOKENS, TOP_K)
    return scores + 100 * fn.one_hot(turns, EXPERTS).sum(1)


def build() -> Callable[[], None]:
    router = nn.Linear(8, EXPERTS)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
    parameters = [*router.parameters(), *experts.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        x = torch.randn(TOKENS, 8)
        gates, chosen = torch.topk(evenly(router(x)).softmax(-1), TOP_K)
        out = torch.zeros_like(x)
        mask = fn.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in (mask.sum((-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[number].squeeze(0))
            made = experts[int(number)](x[token]) * gates[token, slot, None]
            out.index_add_(0, token, made)
            sent = made.detach().contiguous()
            dist.all_reduce(sent)
        out.sum().backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        optimizer.step()

    return step
