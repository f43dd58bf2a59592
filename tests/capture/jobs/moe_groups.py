"""Groups of experts are chosen first; counts go over a group of two ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as fn

TOKENS, EXPERTS, GROUPS, TOP_K = 8, 8, 4, 2


def build() -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    group = mesh["ep"].get_group()
    router = nn.Linear(8, EXPERTS)
    turns = (torch.arange(TOKENS * TOP_K) % EXPERTS).view(TOKENS, TOP_K)

    def step() -> None:
        x = torch.randn(TOKENS, 8)
        scores = router(x).sigmoid() + 100 * fn.one_hot(turns, EXPERTS).sum(1)
        best = scores.view(TOKENS, GROUPS, -1).amax(-1).topk(2, dim=-1).indices
        mask = torch.zeros(TOKENS, GROUPS).scatter_(1, best, 1).repeat_interleave(2, 1)
        chosen = scores.masked_fill(~mask.bool(), 0.0).topk(TOP_K, dim=-1).indices
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        parts = [torch.empty_like(counts) for _ in range(2)]
        dist.all_gather(parts, counts, group=group)
        mine = torch.stack(parts).view(2, 2, -1)[:, dist.get_rank(group)].sum(-1)
        sends = counts.view(2, -1).sum(-1)
        tokens = x[chosen.flatten().argsort() // TOP_K]
        out = tokens.new_empty(int(mine.sum()), 8)
        dist.all_to_all_single(out, tokens, mine.tolist(), sends.tolist(), group=group)

    return step
