"""Experts whose tokens are counted by a histogram, as in torchtitan."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as fn

EXPERTS, TOP_K, TOKENS = 8, 2, 16


def evenly(scores: torch.Tensor) -> torch.Tensor:
    """Prefer experts by turns, as a router that is balanced does."""
    turns = (torch.arange(TOKENS * TOP_K) % EXPERTS).view(TOKENS, TOP_K)
    return scores + 100 * fn.one_hot(turns, EXPERTS).sum(1)


def build() -> Callable[[], None]:
    router = nn.Linear(8, EXPERTS)
    weights = nn.Parameter(torch.randn(EXPERTS // dist.get_world_size(), 8, 8))
    world = dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()

    def step() -> None:
        x = torch.randn(TOKENS, 8)
        _, chosen = torch.topk(evenly(router(x)).sigmoid(), k=TOP_K, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = torch.argsort(chosen.view(-1), stable=True)
        with torch.no_grad():
            received = funcol.all_to_all_single(counts, None, None, group)
            received = funcol.wait_tensor(received)
            sends = counts.view(world, -1).sum(dim=1).to(torch.device("cpu")).tolist()
            receives = received.view(world, -1).sum(dim=1).tolist()
        sends, receives = list(map(int, sends)), list(map(int, receives))
        routed = funcol.all_to_all_single_autograd(x[order // TOP_K], receives, sends, group)
        ends = received.view(world, -1).sum(0).cumsum(0).int().tolist()
        parts = [
            part @ weight
            for part, weight in zip(routed.tensor_split(ends[:-1]), weights, strict=True)
        ]
        funcol.all_to_all_single_autograd(
            torch.cat(parts), sends, receives, group
        ).sum().backward()

    return step
