"""Scripts in which a value that depends on weights reaches what it must not."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as fn

Step = Callable[[], object]


def value() -> Tensor:
    """Return the number of outputs above zero, which depends on weights."""
    return (nn.Linear(4, 4)(torch.ones(2, 4)) > 0).sum()


def from_others() -> Tensor:
    """Return the numbers of all ranks, which this rank does not know."""
    numbers = torch.zeros(4, dtype=torch.int64)
    dist.all_gather_into_tensor(numbers, torch.tensor([dist.get_rank()]))
    return numbers


def overwritten() -> Tensor:
    """Return a constant of which one element is overwritten through a view."""
    numbers = torch.arange(4)
    numbers.view(2, 2)[0].copy_(value())
    return numbers


def caught() -> None:
    try:
        torch.ones(int(value()))
    except Exception:  # noqa: BLE001  the job goes on
        torch.ones(1)


USES: dict[str, Callable[[], Any]] = {
    "size": lambda: torch.ones(value().item()),
    "size_of_int": lambda: torch.ones(int(value())),
    "size_of_float": lambda: torch.ones(int(value().float().item())),
    "size_by_float": lambda: torch.ones(int(float(value()))),
    "size_by_sqrt": lambda: torch.ones(int(math.sqrt(value().float().item()))),
    "size_rounded": lambda: torch.ones(math.ceil(value().float().item() / 2)),
    "size_of_sum": lambda: torch.ones(2 + 3 * value().item() // 2),
    "slice": lambda: torch.ones(8)[: value()],
    "list": lambda: [0] * value().item(),
    "loop": lambda: list(range(value())),
    "min": lambda: torch.ones(min(8, value().item())),
    "min_float": lambda: torch.ones(int(min(8, value().float().item()))),
    "sorted": lambda: torch.ones(sorted([3, value().item()])[0]),
    "random": lambda: torch.ones(torch.randint(10, 100, (1,)).item()),
    "index": lambda: [1, 2, 3][value()],
    "split": lambda: torch.ones(8).split([value().item(), 4]),
    "splits": lambda: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [1, 1, 1, 1], value().repeat(4).tolist()
    ),
    "ranks": lambda: dist.new_group([0, value().item()]),
    "rank_set": lambda: dist.new_group(sorted({0, value().item()})),
    "mesh": lambda: DeviceMesh("cpu", torch.stack([value(), value() + 1])),
    "root": lambda: dist.broadcast(torch.ones(2), value().item()),
    "mask": lambda: torch.ones(2, 4)[nn.Linear(4, 4)(torch.ones(2, 4)) > 0],
    "finite": lambda: torch.ones(4)[torch.isfinite(nn.Linear(4, 4)(torch.ones(4)))],
    "repeats": lambda: torch.ones(2).repeat_interleave(value().repeat(2)),
    "one_hot": lambda: fn.one_hot(value().repeat(2)),
    "other_ranks": lambda: torch.ones(int(from_others().sum())),
    "overwritten": lambda: torch.ones(int(overwritten()[0])),
    "caught": caught,
}


def build(name: str) -> Callable[[], Step]:
    def make() -> Step:
        return lambda: (torch.ones(2).sum(), USES[name]())

    return make


def waits() -> Step:
    def step() -> None:
        done = value()
        while not (done > 3):
            done = done + 1

    return step


def spins() -> Step:
    def step() -> None:
        while True:
            if value().item() > 3:
                break

    return step


def sleeps() -> Step:
    def step() -> None:
        torch.ones(2).sum()
        while True:
            try:
                time.sleep(10)
            except Exception:  # noqa: BLE001  loops of jobs catch all errors
                continue

    return step


DTYPES: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.bfloat16)),
    "matmul": lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
    "bmm": lambda: torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2).half()),
    "embedding": lambda: nn.Embedding(4, 4)(torch.ones(2)),
    "index_add": lambda: torch.zeros(4).index_add_(0, torch.arange(2), torch.ones(2).half()),
    "scatter": lambda: torch.zeros(4).scatter_(0, torch.arange(2), torch.ones(2).double()),
    "conv": lambda: nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 4).bfloat16()),
    "target": lambda: fn.cross_entropy(torch.ones(2, 4), torch.ones(2, dtype=torch.int32)),
    "gather": lambda: torch.ones(4).gather(0, torch.ones(2)),
}
BUFFERS: dict[str, Callable[[], Any]] = {
    "gathered types": lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(2).half()),
    "gathered size": lambda: dist.all_gather_into_tensor(torch.ones(6), torch.ones(2)),
    "scattered size": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6)),
    "rows": lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)),
    "splits": lambda: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [1] * 4, [1, 1, 1, 0]
    ),
    "exchanged types": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4).double()),
}
LEGAL: Sequence[Callable[[], Any]] = (
    lambda: nn.LayerNorm(4)(torch.ones(2, 4).bfloat16()),
    lambda: torch.addmm(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4)),
    lambda: fn.conv1d(torch.ones(1, 4, 9), torch.ones(4, 2, 3), stride=2, padding=1, groups=2),
    lambda: torch.zeros(4, 3).index_put((torch.arange(2),), torch.ones(2, 3)),
    lambda: torch.zeros(4)[torch.arange(4) > 1] + torch.ones(2, dtype=torch.float64),
    lambda: fn.cross_entropy(torch.ones(2, 4), torch.full((2, 4), 0.25)),
    lambda: fn.grouped_mm(
        torch.ones(8, 4), torch.ones(2, 4, 4), offs=torch.tensor([3, 8], dtype=torch.int32)
    ),
)
