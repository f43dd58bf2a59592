"""Newton-Schulz iterations as torch runs them: products, FLOPs and what addmm copies."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _zeropower_via_newtonschulz,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stepmark.model.ops import Gemm
from stepmark.step.newton_schulz import iterations, orthogonalization, repeated
from stepmark.step.workload import Block, ComputeOp, Kernel

SHAPES = ((24, 40), (40, 24), (16, 16), (1, 8))


class Products(TorchDispatchMode):
    """Counts of m, n and k."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            (m, k), n = args[-2].shape, args[-1].shape[1]
            self.counts[m, n, k] += 1
        return func(*args, **(kwargs or {}))


def orthogonalize(rows: int, columns: int, steps: int) -> None:
    grad = torch.randn(rows, columns)
    _zeropower_via_newtonschulz(grad, (DEFAULT_A, DEFAULT_B, DEFAULT_C), steps, EPS)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_that_torch_counts(shape: tuple[int, int], steps: int) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(*shape, steps)
    assert orthogonalization(*shape, steps).flops == counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_torch(shape: tuple[int, int]) -> None:
    work = orthogonalization(*shape)
    ours: Counter[tuple[int, int, int]] = Counter()
    for item in work.iteration():
        assert isinstance(item, ComputeOp)
        if isinstance(item.op, Gemm):
            ours[item.op.m, item.op.n, item.op.k] += work.steps
    with Products() as real:
        orthogonalize(*shape, work.steps)
    assert ours == real.counts


def test_the_addends_are_copied() -> None:
    """b A of [24, 24] and a X of [24, 40], read and written in bf16."""
    kernels = [
        item.op
        for item in orthogonalization(40, 24).iteration()
        if isinstance(item, ComputeOp) and isinstance(item.op, Kernel)
    ]
    assert [kernel.bytes_moved for kernel in kernels] == [4 * 24 * 24, 4 * 24 * 40]


def test_equal_layers_are_one_run() -> None:
    blocks: dict[str, Block] = {}
    wide, tall = (iterations(orthogonalization(*shape), blocks) for shape in SHAPES[:2])
    other = iterations(orthogonalization(16, 16), blocks)
    assert wide == tall  # A is of the smaller dimension
    runs = repeated([(wide, other), (wide, other), (), (wide,)], blocks, "layer")
    assert [(run.block, run.times) for run in runs] == [("layer0", 2), ("layer1", 1)]
    assert blocks["layer0"] == (wide, other)
