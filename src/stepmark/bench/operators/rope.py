"""Rotary position embedding of q and k [B, S, heads, D], halves rotated as in Llama."""

import functools

import torch
from torch import Tensor

from stepmark.bench.operators.activation import rows_call
from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.dtypes import normal
from stepmark.core.ops import Rope, backends

BASE = 10_000.0


def tables(seq: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [S, 1, D] in fp32, computed in fp64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    positions = torch.arange(seq, dtype=torch.float64, device=device)
    angles_SD = torch.outer(positions, BASE ** (-half / head_dim)).repeat(1, 2)
    return angles_SD.cos().float().unsqueeze(1), angles_SD.sin().float().unsqueeze(1)


def rotate(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    first, second = x_BSHD.chunk(2, dim=-1)
    turned_BSHD = torch.cat((-second, first), dim=-1)
    return x_BSHD * cos_S1D.to(x_BSHD.dtype) + turned_BSHD * sin_S1D.to(x_BSHD.dtype)


def rope(q_BSHD: Tensor, k_BSHD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q_BSHD, cos, sin), rotate(k_BSHD, cos, sin)


def make(op: Rope, device: torch.device, *, is_compiled: bool = False) -> Call:
    q_BSHD, k_BSHD = (
        normal(op.batch, op.seq, heads, op.head_dim, dtype=op.dtype, device=device)
        for heads in (op.heads, op.kv_heads)
    )
    constants = tables(op.seq, op.head_dim, device)
    return rows_call(
        op, rope, (q_BSHD, k_BSHD), (), is_compiled=is_compiled, constants=constants
    )


TORCH = Impl(make=make)
COMPILE = Impl(
    make=functools.partial(make, is_compiled=True), unsupported=backends.needs_compiler
)
