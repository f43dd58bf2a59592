"""One product per expert: torch's grouped kernel in one call, or a loop of torch.mm.

T tokens sorted by expert, G experts, N output and K input features of the forward product.
The weight is stored [G, N, K], as a linear layer stores it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.bench.operators.call import (
    TORCH_DTYPE,
    Call,
    Impl,
    normal,
    set_matmul_precision,
)
from stepmark.bench.verify import (
    finite,
    merge,
    poison,
    poisoned_result,
    product_check,
    sample,
    tolerance,
)
from stepmark.core.ops import GroupedGemm, Phase, backends
from stepmark.core.ops.backends import Capabilities
from stepmark.core.record import Check

NUM_CHECKED = 8  # experts compared; of the others only that they are finite
_GROUPED_MM: Callable[..., Tensor] | None = getattr(
    functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The two factors of one phase, and where each expert's rows end."""

    a: Tensor  # [T, K], [T, N] or [K, T]
    b: Tensor  # [G, K, N], [G, N, K] or [T, N]
    bounds: tuple[tuple[int, int], ...]
    is_wgrad: bool

    def pair(self, group: int) -> tuple[Tensor, Tensor]:
        start, end = self.bounds[group]
        if self.is_wgrad:
            return self.a[:, start:end], self.b[start:end]
        return self.a[start:end], self.b[group]

    def result(self, y: Tensor, group: int) -> Tensor:
        start, end = self.bounds[group]
        return y[group] if self.is_wgrad else y[start:end]

    @property
    def result_shape(self) -> tuple[int, ...]:
        rows, columns = self.a.shape[0], self.b.shape[-1]
        return (len(self.bounds), rows, columns) if self.is_wgrad else (rows, columns)


def _operands(op: GroupedGemm, device: torch.device) -> _Operands:
    set_matmul_precision(op.dtype)
    bounds, end = [], 0
    for size in op.group_sizes():
        bounds.append((end, end + size))
        end += size
    is_wgrad = op.phase is Phase.WGRAD
    if is_wgrad:
        x_TK = normal(op.tokens, op.k, dtype=op.dtype, device=device)
        dy_TN = normal(op.tokens, op.n, dtype=op.dtype, device=device)
        # dw as the weight is stored: [G, N, K] = dy.T @ x per expert.
        return _Operands(dy_TN.t(), x_TK, tuple(bounds), is_wgrad)
    w_GNK = normal(op.num_groups, op.n, op.k, dtype=op.dtype, device=device)
    is_fwd = op.phase is Phase.FWD
    a = normal(op.tokens, op.k if is_fwd else op.n, dtype=op.dtype, device=device)
    return _Operands(a, w_GNK.mT if is_fwd else w_GNK, tuple(bounds), is_wgrad)


def _check(op: GroupedGemm, operands: _Operands, y: Tensor) -> Check:
    groups = sample(op.num_groups, torch.device("cpu"), NUM_CHECKED).tolist()
    allowed = tolerance(op.dtype, length=op.tokens if operands.is_wgrad else max(op.k, op.n))
    checks = [
        product_check(*operands.pair(group), operands.result(y, group), allowed)
        for group in groups
        if operands.result(y, group).numel()
    ]
    return merge([*checks, finite(y, allowed)])


def unsupported_grouped(op: GroupedGemm, capabilities: Capabilities) -> str | None:
    if _GROUPED_MM is None:
        return "this torch has no grouped_mm"
    return backends.grouped_gemm(op, capabilities)


def make_grouped(op: GroupedGemm, device: torch.device) -> Call:
    assert _GROUPED_MM is not None
    grouped_mm = _GROUPED_MM
    operands = _operands(op, device)
    ends = [end for _, end in operands.bounds]
    ends_G = torch.tensor(ends, dtype=torch.int32, device=device)

    def run() -> Tensor:
        return grouped_mm(operands.a, operands.b, offs=ends_G)

    def verify() -> Check:
        (y,) = poisoned_result(run)
        return _check(op, operands, y)

    return Call(run=run, verify=verify, backend_run="grouped_mm")


def make_loop(op: GroupedGemm, device: torch.device) -> Call:
    operands = _operands(op, device)
    y = torch.empty(operands.result_shape, dtype=TORCH_DTYPE[op.dtype], device=device)
    # An expert without tokens has a zero wgrad, which the loop also writes.
    products = [
        (*operands.pair(group), operands.result(y, group))
        for group, (start, end) in enumerate(operands.bounds)
        if operands.is_wgrad or end > start
    ]

    def run() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)

    def verify() -> Check:
        poison(y)
        run()
        return _check(op, operands, y)

    return Call(run=run, verify=verify, backend_run=f"{len(products)} x torch.mm")


TORCH = Impl(make=make_grouped, unsupported=unsupported_grouped)
LOOP = Impl(make=make_loop)
