"""Norms, activations and the dense MLP of a block.

Before an FP8 product every number is read several times: for the scale, for the cast, for the
gradient of a bias. Inductor computes what it can anew for each of them, and three times an
activation's gradient is more arithmetic than an H200 does in the time it reads its inputs.
`settled` gradients are written once, by an operator that Inductor does not look into.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

from stepmark.bench.environment import HAS_TRITON
from stepmark.core import model as core_model
from stepmark.core.model import Activation

EPS = 1e-5


class Norm(nn.Module):
    """Over the last dimension, in fp32 inside the kernel, out in the input's dtype.

    Autocast alone would return fp32 and double what the next layer reads.
    """

    def __init__(self, kind: core_model.Norm, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        with torch.autocast(x.device.type, enabled=False):
            # Fused kernels take one dtype for all; a mixed call would run in parts.
            weight = self.weight.to(x.dtype)
            if self.bias is None:
                return functional.rms_norm(x, shape, weight, EPS)
            return functional.layer_norm(x, shape, weight, self.bias.to(x.dtype), EPS)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        is_gated = activation == "swiglu"
        self.settles_gradients = False  # True: worth it where they are cast to FP8
        self.gate = nn.Linear(hidden_size, width, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias)
        self.down = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        y: Tensor = self.down(activate(gate, self.up(x), settled=self.settles_gradients))
        return y


# GELU's tanh form is 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), and
# 0.5 (1 + tanh(u)) = sigmoid(2 u): 2 u = x (LINEAR + CUBIC x^2).
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def activate(gate: Tensor | None, up: Tensor, *, settled: bool = False) -> Tensor:
    """silu(gate) * up, or where gate is None gelu(up)."""
    if gate is None:
        return _settled_gelu(up) if settled else gelu(up)
    return _settled_swiglu(gate, up) if settled else functional.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return functional.gelu(x, approximate="tanh")
    # One exponential. Inductor's tanh is the device library's, with so many instructions that
    # kernels wait for it instead of memory.
    x_fp32 = x.float()
    twice_u = x_fp32 * (LINEAR + CUBIC * x_fp32 * x_fp32)
    return (x_fp32 * torch.sigmoid(twice_u)).to(x.dtype)


@torch.library.custom_op("stepmark::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of gelu's input."""
    if x.is_cuda and HAS_TRITON:
        from stepmark.bench.training import triton_kernels  # noqa: PLC0415

        return triton_kernels.gelu_backward(grad.contiguous(), x.contiguous())
    dx: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return dx.contiguous()


@gelu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("stepmark::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of silu(gate) * up."""
    if gate.is_cuda and HAS_TRITON:
        from stepmark.bench.training import triton_kernels  # noqa: PLC0415

        return triton_kernels.swiglu_backward(
            grad.contiguous(), gate.contiguous(), up.contiguous()
        )
    of_gate: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
    return of_gate.contiguous(), (grad * functional.silu(gate)).contiguous()


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


class _SettledGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = gelu_backward(grads[0], x)
        return dx


class _SettledSwiglu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dx: tuple[Tensor, Tensor] = swiglu_backward(grads[0], gate, up)
        return dx


_settled_gelu: Callable[[Tensor], Tensor] = _SettledGelu.apply
_settled_swiglu: Callable[[Tensor, Tensor], Tensor] = _SettledSwiglu.apply
