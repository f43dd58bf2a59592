"""Spellings in which an unknown integer, a list of them, or a tensor reaches what is a size.

n, b, t: a number, a list and a tensor that other ranks determine; x: rows of activations.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as fn

Use = Callable[[Any, Any, Any, Any, Any], object]


def build(use: Use) -> Callable[[], Callable[[], object]]:
    def step() -> object:
        sent = torch.arange(4) + dist.get_rank()
        t = torch.empty_like(sent)
        dist.all_to_all_single(t, sent)
        n = t.sum().item()
        return use(n, t.tolist(), t, nn.Linear(4, 4)(torch.ones(8, 4)), {"rows": n})

    return lambda: step


USES: tuple[Use, ...] = (
    lambda n, b, t, x, sizes: torch.empty(n, 32),
    lambda n, b, t, x, sizes: torch.empty(32, n),
    lambda n, b, t, x, sizes: torch.empty((n, 32)),
    lambda n, b, t, x, sizes: torch.empty(sum(b), 32),
    lambda n, b, t, x, sizes: torch.empty(sum(b[:2]), sum(b[2:])),
    lambda n, b, t, x, sizes: torch.empty(*b),
    lambda n, b, t, x, sizes: torch.empty(b),
    lambda n, b, t, x, sizes: torch.empty(n // 2, 4),
    lambda n, b, t, x, sizes: torch.empty(n, 2, device="cpu"),
    lambda n, b, t, x, sizes: torch.empty(t[0].item(), 2),
    lambda n, b, t, x, sizes: torch.empty(t.tolist()[0], 2),
    lambda n, b, t, x, sizes: torch.empty(t.sum(), 2),
    lambda n, b, t, x, sizes: torch.empty(int(t[0]), 2),
    lambda n, b, t, x, sizes: torch.empty(int(x.sum()), 2),
    lambda n, b, t, x, sizes: torch.empty((x > 0).sum().item(), 2),
    lambda n, b, t, x, sizes: torch.empty(sum(v.item() for v in t), 3),
    lambda n, b, t, x, sizes: torch.empty(sizes["rows"], 2),
    lambda n, b, t, x, sizes: torch.full((2, n), 0),
    lambda n, b, t, x, sizes: torch.rand(n, 2),
    lambda n, b, t, x, sizes: torch.randint(0, n, (4,)),
    lambda n, b, t, x, sizes: torch.arange(0, n),
    lambda n, b, t, x, sizes: torch.eye(n),
    lambda n, b, t, x, sizes: torch.Tensor(n, 2),
    lambda n, b, t, x, sizes: torch.Size([n, 2]),
    lambda n, b, t, x, sizes: torch.tensor([n]),
    lambda n, b, t, x, sizes: x.new_empty(n, 2),
    lambda n, b, t, x, sizes: x.view(n, -1),
    lambda n, b, t, x, sizes: x.reshape(n, 2),
    lambda n, b, t, x, sizes: x[:1].expand(n, 4),
    lambda n, b, t, x, sizes: x.repeat(n, 1),
    lambda n, b, t, x, sizes: x.narrow(0, 0, n),
    lambda n, b, t, x, sizes: x.split(n),
    lambda n, b, t, x, sizes: x.split(b),
    lambda n, b, t, x, sizes: x.chunk(n),
    lambda n, b, t, x, sizes: x.unflatten(0, (n, -1)),
    lambda n, b, t, x, sizes: x.topk(n),
    lambda n, b, t, x, sizes: x[:n],
    lambda n, b, t, x, sizes: x[n:],
    lambda n, b, t, x, sizes: x[n],
    lambda n, b, t, x, sizes: x[: t[0]],
    lambda n, b, t, x, sizes: x[t[0] : t[1]],
    lambda n, b, t, x, sizes: [1, 2, 3][n],
    lambda n, b, t, x, sizes: [0] * n,
    lambda n, b, t, x, sizes: range(n),
    lambda n, b, t, x, sizes: list(range(t[0])),
    lambda n, b, t, x, sizes: list(itertools.islice(x, n)),
    lambda n, b, t, x, sizes: random.sample(range(10), n),
    lambda n, b, t, x, sizes: divmod(n, 2),
    lambda n, b, t, x, sizes: int(n),
    lambda n, b, t, x, sizes: math.floor(n),
    lambda n, b, t, x, sizes: math.ceil(n / 2),
    lambda n, b, t, x, sizes: max(b),
    lambda n, b, t, x, sizes: sorted(b),
    lambda n, b, t, x, sizes: {n: 1},
    lambda n, b, t, x, sizes: np.zeros(n),
    lambda n, b, t, x, sizes: nn.Linear(n, 4),
    lambda n, b, t, x, sizes: fn.pad(x, (0, n)),
    lambda n, b, t, x, sizes: fn.one_hot(t),
    lambda n, b, t, x, sizes: x[x > 0],
    lambda n, b, t, x, sizes: x.masked_select(x > 0),
    lambda n, b, t, x, sizes: torch.nonzero(x),
    lambda n, b, t, x, sizes: torch.where(x > 0),
    lambda n, b, t, x, sizes: x.unique(),
    lambda n, b, t, x, sizes: torch.bincount(t),
    lambda n, b, t, x, sizes: torch.repeat_interleave(t),
    lambda n, b, t, x, sizes: t.numpy(),
    lambda n, b, t, x, sizes: dist.all_to_all_single(torch.empty(8, 4), x, b, [2, 2, 2, 2]),
    lambda n, b, t, x, sizes: dist.all_to_all_single(torch.empty(8, 4), x, [2, 2, 2, 2], b),
    lambda n, b, t, x, sizes: dist.broadcast(x, n),
    lambda n, b, t, x, sizes: dist.new_group(b),
)
# Errors of the user's own, near a value that is unknown.
OTHERS: tuple[tuple[Use, str], ...] = (
    (lambda n, b, t, x, sizes: torch.empty(2.5, 3), "TypeError: empty()"),  # type: ignore[call-overload]
    (lambda n, b, t, x, sizes: x.repeat_interleave(t, 0), "RuntimeError: repeats"),
    (lambda n, b, t, x, sizes: (f"{n}", x @ x), "RuntimeError"),
    (lambda n, b, t, x, sizes: sizes["columns"], "KeyError"),
)
