"""Norms and the dense MLP of a block."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark.bench.training.activation import activate
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
