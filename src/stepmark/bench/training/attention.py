"""Causal self-attention with grouped heads, rotary positions and a choice of kernel.

B batch, T tokens, C hidden width, H query heads, K key and value heads, G = H / K,
D head width, E head width of values.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepmark.bench.training.norm import Norm
from stepmark.core.model import ModelConfig

ROPE_BASE = 500_000.0  # Llama 3's

KERNELS = {
    "auto": None,  # torch's own order
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def rope_tables(num_positions: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_TD and sin_TD in fp32, both halves alike, as Hugging Face orders them."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    positions_T = torch.arange(num_positions, dtype=torch.float64, device=device)
    half = torch.outer(positions_T, ROPE_BASE**-exponents)
    angles_TD = torch.cat((half, half), dim=-1)
    return angles_TD.cos().float(), angles_TD.sin().float()


def rotate(x_BTxD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """x turned by its position in dimension 1, in fp32; any dimensions between T and D."""
    num_tokens, width = x_BTxD.shape[1], x_BTxD.shape[-1]
    shape = (num_tokens, *(1,) * (x_BTxD.dim() - 3), width)
    cos, sin = cos_TD[:num_tokens].view(shape), sin_TD[:num_tokens].view(shape)
    x = x_BTxD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BTxD.dtype)


def causal_attention(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, kernel: str) -> Tensor:
    """softmax(q @ k.T / sqrt(D), causal) @ v as y_BTHE, by the kernel of that name."""
    q, k, v = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKE.transpose(1, 2)
    width = v.shape[-1]
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and kernel == "efficient":  # it knows no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    if kernel == "flash" and width < q.shape[-1]:  # it knows one width only
        v = functional.pad(v, (0, q.shape[-1] - width))
    with _only(kernel):
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=is_grouped
        )
    return y[..., :width].transpose(1, 2)


@torch.library.custom_op("stepmark::join", mutates_args=())
def join(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat along a negative dim from -3 on, but never fused with what reads its result."""
    # Of more than four dimensions CUDA copies the parts one by one, at half the rate.
    rows = torch.cat([one.flatten(0, -4) for one in parts], dim)
    return rows.unflatten(0, parts[0].shape[:-3])


@join.register_fake
def _(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        parts: tuple[Tensor, ...] = x.split(sizes, dim)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return join(list(grads), ctx.dim), None, None


def split_joined(x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """torch.split whose gradient is laid out in memory before anything is made of it.

    Inductor would build it anew inside each kernel that reads it: the search for its largest
    value then took 8 times as long as reading memory does (H200, GPT-2 1.5B in FP8).
    """
    return _split(x, sizes, dim)


_split: Callable[[Tensor, tuple[int, ...], int], tuple[Tensor, ...]] = _Split.apply


def _only(kernel: str) -> AbstractContextManager[None]:
    backend = KERNELS[kernel]
    return nullcontext() if backend is None else sdpa_kernel(backend)


class Attention(nn.Module):
    """Grouped-query attention. Rows of qkv: per KV head its G queries, its key, its value."""

    def __init__(self, model: ModelConfig, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.joins_gradients = False  # True: worth it where qkv's gradient is cast to FP8
        self.head_dim = model.head_dim
        self.group_size = model.num_heads // model.num_kv_heads
        width = model.num_heads * model.head_dim
        rows = width + 2 * model.num_kv_heads * model.head_dim
        self.qkv = nn.Linear(model.hidden_size, rows, bias=model.qkv_bias or model.linear_bias)
        self.q_norm = Norm("rmsnorm", model.head_dim) if model.qk_norm else None
        self.k_norm = Norm("rmsnorm", model.head_dim) if model.qk_norm else None
        self.out = nn.Linear(width, model.hidden_size, bias=model.linear_bias)

    def forward(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        # The number of heads is inferred: under tensor parallelism it is this rank's.
        heads = (-1, self.group_size + 2, self.head_dim)
        qkv = self.qkv(x_BTC).unflatten(-1, heads)
        sizes = (self.group_size, 1, 1)
        parts = split_joined(qkv, sizes, -2) if self.joins_gradients else qkv.split(sizes, -2)
        q_BTKGD, k_BTKD, v_BTKD = parts
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGD, k_BTKD = self.q_norm(q_BTKGD), self.k_norm(k_BTKD)
        if cos_TD is not None and sin_TD is not None:
            q_BTKGD = rotate(q_BTKGD, cos_TD, sin_TD)
            k_BTKD = rotate(k_BTKD, cos_TD, sin_TD)
        y_BTHD = causal_attention(
            q_BTKGD.flatten(2, 3), k_BTKD.flatten(2, 3), v_BTKD.flatten(2, 3), self.kernel
        )
        out_BTC: Tensor = self.out(y_BTHD.flatten(2))
        return out_BTC
