"""RMSNorm and LayerNorm of x [tokens, hidden]."""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.bench.operators.activation import rows_call
from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.dtypes import normal
from stepmark.core.ops import Norm, backends

EPS = 1e-5


def rmsnorm(x_TH: Tensor, weight_H: Tensor) -> Tensor:
    return functional.rms_norm(x_TH, weight_H.shape, weight_H, EPS)


def layernorm(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor) -> Tensor:
    return functional.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, EPS)


def make(op: Norm, device: torch.device, *, is_compiled: bool = False) -> Call:
    x_TH = normal(op.tokens, op.hidden, dtype=op.dtype, device=device)
    vectors = 1 if op.kind == "rmsnorm" else 2
    shared = tuple(normal(op.hidden, dtype=op.dtype, device=device) for _ in range(vectors))
    function = rmsnorm if op.kind == "rmsnorm" else layernorm
    return rows_call(op, function, (x_TH,), shared, is_compiled=is_compiled)


TORCH = Impl(make=make)
COMPILE = Impl(
    make=functools.partial(make, is_compiled=True), unsupported=backends.needs_compiler
)
