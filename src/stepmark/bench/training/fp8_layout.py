"""FP8 operands laid out as tensor cores read them: transposed copies at the speed of memory.

Tensor cores of the Hopper generation read both FP8 operands along the summed dimension, so
the backward products need transposed ones. torchao leaves that to a copy: alone it moves 0.3
TB/s on an H200, fused by Inductor with the cast 1.4 TB/s. This kernel moves 2.9 to 3.9 TB/s,
and leaves Inductor casts that write as they read.
"""

from typing import Any

import torch
from torch import Tensor

from stepmark.bench.environment import HAS_TRITON


@torch.library.custom_op("stepmark::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """x.t() with rows in one piece; x is a matrix of one-byte numbers."""
    if x.is_cuda and HAS_TRITON:
        from stepmark.bench.training.triton_kernels import transpose  # noqa: PLC0415

        return transpose(x.contiguous())
    return x.t().clone(memory_format=torch.contiguous_format)  # never x itself


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def lay_out(float8_ops: Any) -> None:
    """Let torchao's products take their transposed operands from here.

    float8_ops: the module torchao.float8.float8_ops. Its preprocess_addmm copies operands that
    lie the wrong way; it now gets them the right way. Twice is once.
    """
    before = float8_ops.preprocess_addmm
    if getattr(before, "lays_out", False):
        return

    def preprocess_addmm(a: Any, b: Any) -> Any:
        if not float8_ops.is_row_major(a._data.stride()):
            a = _with_data(a, transposed(a._data.t()))
        if float8_ops.is_row_major(b._data.stride()):
            b = _with_data(b, transposed(b._data).t())
        return before(a, b)

    preprocess_addmm.lays_out = True  # type: ignore[attr-defined]
    float8_ops.preprocess_addmm = preprocess_addmm


def _with_data(tensor: Any, data: Tensor) -> Any:
    return type(tensor)(
        data,
        tensor._scale,
        tensor._orig_dtype,
        tensor._linear_mm_config,
        tensor._gemm_input_role,
        tensor._axiswise_dim,
    )
