"""y_MN = a_MK @ b_KN by cuBLAS, hipBLASLt or oneDNN, through torch; in batches, or per expert.

fp8_e5m2 stands for a gradient: A is e5m2 and B e4m3, as in a backward pass (cuBLAS has no
product of two e5m2). In any layout, fp8 operands are stored as _scaled_mm needs them: A row
major, B column major; the layout is that of the bf16 sources of a timed cast.

M rows, K contracted, N columns. For experts: T tokens sorted by expert, G experts, N output and
K input features of the forward product; weights are [G, N, K], as a linear layer stores them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.cases.record import Check
from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import (
    TORCH_DTYPE,
    compare,
    finite,
    merge,
    poison,
    poisoned_result,
    product_check,
    sample,
    select_index,
    tolerance,
)
from stepmark.model.ops import Bmm, Cast, Gemm, GroupedGemm, Layout, Phase, Scaling, backends
from stepmark.model.ops.backends import Capabilities
from stepmark.operators.bench.block_formats import make_block_format
from stepmark.operators.bench.call import Call, Impl, normal, set_matmul_precision


def operands(
    layout: Layout, m: int, n: int, k: int, dtype: DType, device: torch.device, *batch: int
) -> tuple[Tensor, Tensor]:
    """Return a [*batch, m, k] and b [*batch, k, n], stored in `layout`."""
    a_rows = layout in (Layout.NN, Layout.NT)
    b_rows = layout in (Layout.NN, Layout.TN)
    a = normal(*batch, *((m, k) if a_rows else (k, m)), dtype=dtype, device=device)
    b = normal(*batch, *((k, n) if b_rows else (n, k)), dtype=dtype, device=device)
    return (a if a_rows else a.mT), (b if b_rows else b.mT)


def make_gemm(op: Gemm, device: torch.device) -> Call:
    if op.dtype.is_block_format:
        return make_block_format(op, device)
    if op.dtype.is_fp8:
        return _make_fp8(op, device)
    set_matmul_precision(op.dtype)
    a_MK, b_KN = operands(op.layout, op.m, op.n, op.k, op.dtype, device)
    y_MN = torch.empty(op.m, op.n, dtype=TORCH_DTYPE[op.result_dtype], device=device)
    wider = torch.ops.aten.mm.dtype_out

    def run() -> Tensor:
        return torch.mm(a_MK, b_KN, out=y_MN)

    def run_wider() -> object:
        return wider(a_MK, b_KN, y_MN.dtype, out=y_MN)

    timed: Callable[[], object] = run if y_MN.dtype == a_MK.dtype else run_wider

    def verify() -> Check:
        poison(y_MN)
        timed()
        rounded = op.dtype if op.dtype is DType.TF32 else op.result_dtype
        return product_check(a_MK, b_KN, y_MN, tolerance(rounded, length=op.k))

    return Call(run=timed, verify=verify, backend_run="torch.mm")


class _Cast:
    """One operand: its bf16 source, its fp8 copy with K innermost, its scale.

    `source_RK` has a scale per row or one in all. A dynamic scale maps the largest magnitude to
    the largest fp8 value.
    """

    def __init__(self, source_RK: Tensor, dtype: DType, scaling: Scaling) -> None:
        self.source_RK: Tensor | None = source_RK
        self.cast_RK = torch.empty(
            source_RK.shape, dtype=TORCH_DTYPE[dtype], device=source_RK.device
        )
        self.dim = -1 if scaling is Scaling.ROWWISE else None
        self.limit = torch.finfo(self.cast_RK.dtype).max
        shape = (source_RK.shape[0], 1) if self.dim else ()
        self.scale = torch.empty(shape, dtype=torch.float32, device=source_RK.device)

    def run(self) -> None:
        """Scale and cast into the fp8 copy."""
        assert self.source_RK is not None
        amax = torch.linalg.vector_norm(
            self.source_RK, torch.inf, dim=self.dim, keepdim=self.dim is not None
        )
        torch.div(amax.float(), self.limit, out=self.scale)
        self.cast_RK.copy_(self.source_RK * self.scale.reciprocal())

    def rows_scale(self) -> Tensor:
        """Return the scale as a column, fp64."""
        return self.scale.double().expand(self.cast_RK.shape[0], 1)

    def check(self) -> Check:
        assert self.source_RK is not None
        rows = sample(self.cast_RK.shape[0], self.cast_RK.device)
        out = select_index(self.cast_RK, 0, rows) * self.rows_scale()[rows]
        allowed = tolerance(_DTYPE_OF[self.cast_RK.dtype])
        return compare(out, select_index(self.source_RK, 0, rows), allowed, "the bf16 source")

    def poison(self) -> None:
        poison(self.cast_RK)
        poison(self.scale)


_DTYPE_OF = {TORCH_DTYPE[dtype]: dtype for dtype in DType if dtype.is_fp8}


def _make_fp8(op: Gemm, device: torch.device) -> Call:
    a_MK, b_KN = operands(op.layout, op.m, op.n, op.k, DType.BF16, device)
    a = _Cast(a_MK, op.dtype, op.scaling)
    b = _Cast(b_KN.t(), DType.FP8_E4M3, op.scaling)
    a.run()
    b.run()
    if op.cast is Cast.NONE:
        a.source_RK = b.source_RK = None
    del a_MK, b_KN
    scale_b = b.scale.t() if b.dim else b.scale
    out_dtype = TORCH_DTYPE[op.result_dtype]
    rows = op.m if op.cast is not Cast.ONLY else 0
    y_MN = torch.empty(rows, op.n, dtype=out_dtype, device=device)
    scaled_mm = torch.ops.aten._scaled_mm.out
    b_KN = b.cast_RK.t()

    def cast() -> None:
        a.run()
        b.run()

    def product() -> None:
        scaled_mm(
            a.cast_RK,
            b_KN,
            a.scale,
            scale_b,
            out_dtype=out_dtype,
            use_fast_accum=True,
            out=y_MN,
        )

    def cast_and_product() -> None:
        cast()
        product()

    run = {Cast.NONE: product, Cast.ONLY: cast, Cast.INCLUDED: cast_and_product}[op.cast]

    def verify() -> Check:
        poison(y_MN)
        if op.cast is not Cast.NONE:
            a.poison()
            b.poison()
        run()
        checks = [] if op.cast is Cast.NONE else [a.check(), b.check()]
        if op.cast is not Cast.ONLY:
            allowed = tolerance(op.dtype, length=op.k)
            scales = {"scale_M1": a.rows_scale(), "scale_1N": b.rows_scale().t()}
            checks.insert(0, product_check(a.cast_RK, b_KN, y_MN, allowed, **scales))
        return merge(checks)

    names = f"{a.cast_RK.dtype} x {b.cast_RK.dtype}".replace("torch.", "")
    return Call(run=run, verify=verify, backend_run=f"torch._scaled_mm {names}, {op.scaling}")


GEMM = Impl(make=make_gemm, unsupported=backends.gemm)


NUM_CHECKED = 4  # products compared; the others are only checked to be finite


def make_bmm(op: Bmm, device: torch.device) -> Call:
    set_matmul_precision(op.dtype)
    a_BMK, b_BKN = operands(op.layout, op.m, op.n, op.k, op.dtype, device, op.batch)
    y_BMN = torch.empty(op.batch, op.m, op.n, dtype=TORCH_DTYPE[op.dtype], device=device)

    def run() -> Tensor:
        return torch.bmm(a_BMK, b_BKN, out=y_BMN)

    def verify() -> Check:
        poison(y_BMN)
        run()
        allowed = tolerance(op.dtype, length=op.k)
        checks = [
            product_check(a_BMK[i], b_BKN[i], y_BMN[i], allowed)
            for i in sample(op.batch, torch.device("cpu"), NUM_CHECKED).tolist()
        ]
        return merge([*checks, finite(y_BMN, allowed)])

    return Call(run=run, verify=verify, backend_run="torch.bmm")


BMM = Impl(make=make_bmm, unsupported=backends.tf32)


NUM_EXPERTS = 8  # experts compared; the others are only checked to be finite
_GROUPED_MM: Callable[..., Tensor] | None = getattr(
    functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The two factors of one phase, and the bounds of each expert's rows."""

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
        rows = self.a.shape[0]
        columns = self.b.shape[-1]
        return (len(self.bounds), rows, columns) if self.is_wgrad else (rows, columns)


def _grouped_operands(op: GroupedGemm, device: torch.device) -> _Operands:
    set_matmul_precision(op.dtype)
    bounds = []
    end = 0
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


def _check_groups(op: GroupedGemm, operands: _Operands, y: Tensor) -> Check:
    groups = sample(op.num_groups, torch.device("cpu"), NUM_EXPERTS).tolist()
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
    operands = _grouped_operands(op, device)
    ends_G = torch.tensor([end for _, end in operands.bounds], dtype=torch.int32, device=device)

    def run() -> Tensor:
        return grouped_mm(operands.a, operands.b, offs=ends_G)

    def verify() -> Check:
        (y,) = poisoned_result(run)
        return _check_groups(op, operands, y)

    return Call(run=run, verify=verify, backend_run="grouped_mm")


def make_loop(op: GroupedGemm, device: torch.device) -> Call:
    operands = _grouped_operands(op, device)
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
        return _check_groups(op, operands, y)

    return Call(run=run, verify=verify, backend_run=f"{len(products)} x torch.mm")


GROUPED = Impl(make=make_grouped, unsupported=unsupported_grouped)
LOOP = Impl(make=make_loop, unsupported=backends.grouped_loop)
