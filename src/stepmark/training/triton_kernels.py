"""Triton kernels for operations in which torch and Inductor reach half of memory bandwidth."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepmark.training.layers import CUBIC, LINEAR

# The fastest of ten on an H200 for layers of GPT-2 and Llama: 2.9 to 3.9 TB/s.
_ROWS = 64
_COLUMNS = 256
_WARPS = 8
_ELEMENTS = 2048


def transpose(x: Tensor) -> Tensor:
    """Return x.t(), contiguous as x is; one-byte numbers."""
    rows, columns = x.shape
    y = x.new_empty((columns, rows))
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    _transpose[grid](
        x.view(torch.uint8),
        y.view(torch.uint8),
        rows,
        columns,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return y


def add_into(total: Tensor, x: Tensor) -> None:
    """Add x to total in total's dtype, which may differ. Both contiguous, of one size."""
    count = total.numel()
    _add_into[(triton.cdiv(count, _ELEMENTS),)](total, x, count, ELEMENTS=_ELEMENTS)


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the input x of GELU's tanh form. Both contiguous, of one size."""
    out = torch.empty_like(x)
    count = x.numel()
    _gelu_backward[(triton.cdiv(count, _ELEMENTS),)](
        grad, x, out, count, LINEAR=LINEAR, CUBIC=CUBIC, ELEMENTS=_ELEMENTS
    )
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of silu(gate) * up. All contiguous, of one size."""
    gate_grad = torch.empty_like(gate)
    up_grad = torch.empty_like(up)
    count = up.numel()
    _swiglu_backward[(triton.cdiv(count, _ELEMENTS),)](
        grad, gate, up, gate_grad, up_grad, count, ELEMENTS=_ELEMENTS
    )
    return gate_grad, up_grad


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(src, dst, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    # 64 bits: a head's gradient has more than 2**31 elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_src = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    tile = tl.load(src + row[:, None] * num_columns + column[None, :], mask=in_src)
    in_dst = (column[:, None] < num_columns) & (row[None, :] < num_rows)
    tl.store(dst + column[:, None] * num_rows + row[None, :], tl.trans(tile), mask=in_dst)


@triton.jit  # type: ignore[untyped-decorator]
def _add_into(total, x, count, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < count
    before = tl.load(total + index, mask=inside)
    more = tl.load(x + index, mask=inside)
    tl.store(total + index, before + more.to(before.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward(  # type: ignore[no-untyped-def]
    grad, x, out, count, LINEAR: tl.constexpr, CUBIC: tl.constexpr, ELEMENTS: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < count
    g = tl.load(grad + index, mask=inside).to(tl.float32)
    v = tl.load(x + index, mask=inside).to(tl.float32)
    square = v * v
    s = tl.sigmoid(v * (LINEAR + CUBIC * square))
    slope = s * (1.0 + v * (1.0 - s) * (LINEAR + 3.0 * CUBIC * square))
    tl.store(out + index, (g * slope).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(grad, gate, up, gate_grad, up_grad, count, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < count
    g = tl.load(grad + index, mask=inside).to(tl.float32)
    a = tl.load(gate + index, mask=inside).to(tl.float32)
    b = tl.load(up + index, mask=inside).to(tl.float32)
    s = tl.sigmoid(a)
    gate_slope = g * b * s * (1.0 + a * (1.0 - s))
    tl.store(gate_grad + index, gate_slope.to(gate_grad.dtype.element_ty), mask=inside)
    tl.store(up_grad + index, (g * a * s).to(up_grad.dtype.element_ty), mask=inside)
