"""Dropless experts: counts are exchanged, read, and become the splits of tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

EXPERTS, TOP_K, TOKENS = 8, 2, 16


class Experts(nn.Module):
    """wanted: the experts that the router of real ranks prefers for each token."""

    def __init__(self, wanted: torch.Tensor) -> None:
        super().__init__()
        self.wanted = 100 * fn.one_hot(wanted, EXPERTS).sum(1)
        self.router = nn.Linear(8, EXPERTS)
        self.local = EXPERTS // dist.get_world_size()
        self.weights = nn.Parameter(torch.randn(self.local, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = dist.get_world_size()
        gates, chosen = torch.topk((self.router(x) + self.wanted).softmax(-1), TOP_K)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sends = counts.view(world, -1).sum(1).tolist()
        receives = received.view(world, -1).sum(1).tolist()
        tokens = Exchange.apply(x[order // TOP_K], sends, receives)
        experts = torch.arange(self.local).repeat(world).repeat_interleave(received)
        out = torch.empty_like(tokens)
        for expert in range(self.local):
            mine = experts == expert
            out[mine] = tokens[mine] @ self.weights[expert]
        back = Exchange.apply(out, receives, sends)
        weighted = back * gates.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // TOP_K, weighted)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sends: list[int], receives: list[int]) -> Any:
        ctx.splits = sends, receives
        out = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receives, sends)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        sends, receives = ctx.splits
        out = grad.new_empty(sum(sends), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sends, receives)
        return out, None, None


def build() -> Callable[[], None]:
    return routed((torch.arange(TOKENS * TOP_K) % EXPERTS).view(TOKENS, TOP_K))


def routed(wanted: torch.Tensor) -> Callable[[], None]:
    model = Experts(wanted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(TOKENS, 8)).sum().backward()
        for parameter in model.router.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step
