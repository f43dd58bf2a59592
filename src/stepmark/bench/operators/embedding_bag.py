"""Sum of table rows per bag. All operand sets of a case share one table.

A table fills most of a GPU, so a copy per operand set is out of the question; what keeps caches
cold is that every call uses other indices, from a ring drawn beforehand.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.bench.operators.call import Call, Impl, generator, normal
from stepmark.bench.verify import compare, finite, merge, poison, sample, tolerance
from stepmark.core.ops import EmbeddingBag, Phase
from stepmark.core.record import Check

RING = 16


class _Table:
    """Weights [rows, dim], and the law of the indices: which rows are popular."""

    def __init__(self, op: EmbeddingBag, device: torch.device) -> None:
        self.weight_RD = normal(op.rows, op.dim, dtype=op.dtype, device=device)
        self.weight_RD.requires_grad_(op.phase is Phase.BWD)
        self.num_rows, self.device = op.rows, device
        self.cdf_R: Tensor | None = None
        if op.alpha:
            ranks = torch.arange(1, op.rows + 1, dtype=torch.float64, device=device)
            cdf = ranks.pow_(-op.alpha).cumsum_(0)
            self.cdf_R = cdf.div_(cdf[-1].clone())
            self.row_of_rank_R = torch.randperm(
                op.rows, device=device, generator=generator(device)
            )

    def draw(self, count: int) -> Tensor:
        """Row numbers: uniform, or Zipf by its inverse CDF with popular rows anywhere."""
        source = generator(self.device)
        if self.cdf_R is None:
            return torch.randint(self.num_rows, (count,), device=self.device, generator=source)
        uniform = torch.rand(count, dtype=torch.float64, device=self.device, generator=source)
        ranks = torch.searchsorted(self.cdf_R, uniform).clamp_max_(self.num_rows - 1)
        return self.row_of_rank_R[ranks]


_tables: weakref.WeakValueDictionary[tuple[EmbeddingBag, str], _Table] = (
    weakref.WeakValueDictionary()
)


def _table(op: EmbeddingBag, device: torch.device) -> _Table:
    """The table of a case: kept as long as one of its operand sets lives."""
    key = (op, str(device))
    table = _tables.get(key)
    if table is None:
        table = _Table(op, device)
        _tables[key] = table
    return table


def extra_bytes(op: EmbeddingBag) -> int:
    """The ring of indices (and, for bwd, of kept graphs) and the Zipf law's two vectors."""
    indices = op.batch * op.pooling * 8
    law = 2 * 8 * op.rows if op.alpha else 0
    graph = indices + op.batch * (16 + op.dim * op.dtype.itemsize)
    return law + RING * (indices + (graph if op.phase is Phase.BWD else 0))


class _Bags:
    """Table, offsets, the ring, and whose turn it is."""

    def __init__(self, op: EmbeddingBag, device: torch.device) -> None:
        self.op, self.turn = op, 0
        self.table = _table(op, device)
        self.ring = [self.table.draw(op.batch * op.pooling) for _ in range(RING)]
        ends = op.batch * op.pooling
        self.offsets_B = torch.arange(0, ends, op.pooling, device=device)
        self.dy_BD = normal(op.batch, op.dim, dtype=op.dtype, device=device)
        is_bwd = op.phase is Phase.BWD
        self.kept = [self._bag(indices) for indices in self.ring] if is_bwd else []

    def _bag(self, indices: Tensor) -> Tensor:
        weight = self.table.weight_RD
        return functional.embedding_bag(
            indices, weight, self.offsets_B, mode="sum", sparse=weight.requires_grad
        )

    def _next(self) -> int:
        self.turn = (self.turn + 1) % RING
        return self.turn

    def fwd(self) -> Tensor:
        return self._bag(self.ring[self._next()])

    def bwd(self) -> Tensor:
        kept, weight = self.kept[self._next()], self.table.weight_RD
        return torch.autograd.grad(kept, weight, self.dy_BD, retain_graph=True)[0]


def _check_fwd(bags: _Bags) -> Check:
    op = bags.op
    poison(bags.fwd())  # freed at once: the next result likely gets its memory
    y_BD = bags.fwd()
    at = sample(op.batch, y_BD.device)
    rows = bags.ring[bags.turn].view(op.batch, op.pooling)[at]
    ref = bags.table.weight_RD.detach()[rows].double().sum(1)
    allowed = tolerance(op.dtype, length=op.pooling)
    name = f"fp64, {len(at)} bags"
    return merge([compare(y_BD[at], ref, allowed, name), finite(y_BD, allowed)])


def _check_bwd(bags: _Bags) -> Check:
    """A sparse gradient lists rows with values; a row may be listed more than once."""
    op = bags.op
    grad = bags.bwd()
    listed, values = grad._indices()[0], grad._values()
    indices = bags.ring[bags.turn]
    rows = indices[sample(indices.numel(), indices.device)]
    out = [values[listed == row].double().sum(0) for row in rows]
    ref = [bags.dy_BD[(indices == row).nonzero()[:, 0] // op.pooling] for row in rows]
    refs = torch.stack([part.double().sum(0) for part in ref])
    allowed = tolerance(op.dtype, length=op.pooling)
    check = compare(torch.stack(out), refs, allowed, f"fp64, {len(rows)} rows")
    return merge([check, finite(values, allowed)])


def make(op: EmbeddingBag, device: torch.device) -> Call:
    bags = _Bags(op, device)
    is_fwd = op.phase is Phase.FWD
    run: Callable[[], Tensor] = bags.fwd if is_fwd else bags.bwd

    def verify() -> Check:
        return _check_fwd(bags) if is_fwd else _check_bwd(bags)

    return Call(run=run, verify=verify, backend_run="functional.embedding_bag")


TORCH = Impl(make=make, extra_bytes=extra_bytes)
