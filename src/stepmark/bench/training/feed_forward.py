"""The dense MLP of a block: SwiGLU, or GELU in its tanh form as GPT-2 has it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark.core.model import Activation

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        is_gated = activation == "swiglu"
        self.gate = nn.Linear(hidden_size, width, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias)
        self.down = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        y: Tensor = self.down(activate(gate, self.up(x)))
        return y


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into the down projection; gate is None for GELU."""
    if gate is None:
        return _gelu(up)
    return functional.silu(gate) * up


def _gelu(x: Tensor) -> Tensor:
    """GELU's tanh form: 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if not torch.compiler.is_compiling():
        return functional.gelu(x, approximate="tanh")
    # The same in one exponential, as 0.5 (1 + tanh(u)) = sigmoid(2 u). Inductor's tanh is the
    # device library's, with so many instructions that fused kernels wait for it.
    x_fp32 = x.float()
    twice_u = x_fp32 * (_GELU_LINEAR + _GELU_CUBIC * x_fp32 * x_fp32)
    return (x_fp32 * torch.sigmoid(twice_u)).to(x.dtype)
