"""RMSNorm and LayerNorm that neither leave the residual stream's dtype nor compute in it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark.core import model as core_model

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
