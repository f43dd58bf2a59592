"""Your own kernels in `stepmark op custom`, timed and checked as its built-in operators are.

stepmark op custom examples/custom_op.py:eager_norm,compiled_norm --arg tokens=8192,16384

A function gets a device, a dtype and what --arg names, and returns one operand set with the
call that is timed. Edit a kernel, run again, and `stepmark compare RUN RUN` says what changed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stepmark import CustomOp

EPS = 1e-6


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm: the kernel under test."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def library_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The same by other means: a kernel that is its own reference would always be right."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def eager_norm(
    device: torch.device, dtype: torch.dtype, tokens: int = 8192, hidden: int = 4096
) -> CustomOp:
    return _norm(norm, device, dtype, tokens, hidden)


def compiled_norm(
    device: torch.device, dtype: torch.dtype, tokens: int = 8192, hidden: int = 4096
) -> CustomOp:
    return _norm(torch.compile(norm), device, dtype, tokens, hidden)


def _norm(
    kernel: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
) -> CustomOp:
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    return CustomOp(
        call=kernel,  # kernel(x, weight) is timed
        operands=(x, weight),
        reference=library_norm,  # of x and weight in fp64: what the result is compared with
        flops=0,  # of matrix products: none
        bytes_moved=2 * x.nbytes + weight.nbytes,  # x in, the result out
    )
