"""Causal self-attention with grouped heads, rotary positions and a choice of kernels.

B batch, T tokens, S tokens of keys, C hidden width, H query heads, K key and value heads,
G = H / K, D head width, E head width of values.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalVariant

from stepmark.model.layers import DENSE, Layer, MlaConfig
from stepmark.model.model import ModelConfig
from stepmark.training.layers import EPS, Norm, linear_layers
from stepmark.training.masked_attention import masked_attention
from stepmark.training.scores import scores_of

ROPE_BASE = 500_000.0  # Llama 3's

KERNELS = {
    "auto": None,  # torch's own order
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_WIDEST = 256  # head that the flash kernel takes

# (q_BTHD, k_BTKD, v_BTKE, name of a kernel, scale) -> y_BTHE, causal
Attend = Callable[[Tensor, Tensor, Tensor, str, float | None], Tensor]


def rope_tables(num_positions: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos_TD and sin_TD in fp32 with two equal halves, in Hugging Face's order."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    positions_T = torch.arange(num_positions, dtype=torch.float64, device=device)
    half = torch.outer(positions_T, ROPE_BASE**-exponents)
    angles_TD = torch.cat((half, half), dim=-1)
    return angles_TD.cos().float(), angles_TD.sin().float()


def rotate(x_BTxD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate x by its position in dimension 1, in fp32; any dimensions between T and D.

    Tables that are narrower than x rotate its first part.
    """
    num_tokens = x_BTxD.shape[1]
    width = cos_TD.shape[-1]
    if width < x_BTxD.shape[-1]:
        rotated, rest = x_BTxD.split((width, x_BTxD.shape[-1] - width), dim=-1)
        return torch.cat((rotate(rotated, cos_TD, sin_TD), rest), dim=-1)
    shape = (num_tokens, *(1,) * (x_BTxD.dim() - 3), width)
    cos = cos_TD[:num_tokens].view(shape)
    sin = sin_TD[:num_tokens].view(shape)
    x = x_BTxD.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BTxD.dtype)


def _rotated(x_BTxD: Tensor, cos_TD: Tensor | None, sin_TD: Tensor | None) -> Tensor:
    """Return x rotated, or as it is where the layer has no rotary positions."""
    return x_BTxD if cos_TD is None or sin_TD is None else rotate(x_BTxD, cos_TD, sin_TD)


def causal_attention(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, kernel: str, scale: float | None = None
) -> Tensor:
    """Return softmax(scale q @ k.T, causal) @ v as y_BTHE, by the kernel of that name.

    scale: None is 1 / sqrt(D). The last query is aligned with the last key: fewer queries
    than keys are the last ones.
    """
    q = q_BTHD.transpose(1, 2)
    k = k_BSKD.transpose(1, 2)
    v = v_BSKE.transpose(1, 2)
    width = v.shape[-1]
    prefix = prefix_kernel(q, v, kernel) if q.shape[2] < k.shape[2] else ""
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and kernel == "efficient":  # it does not support grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    if "flash" in (kernel, prefix) and width < q.shape[-1]:  # it supports one width only
        v = functional.pad(v, (0, q.shape[-1] - width))
    if prefix:
        return _attend_prefix(q, k, v, prefix, scale)[..., :width].transpose(1, 2)
    is_square = q.shape[2] == k.shape[2]
    backend = KERNELS[kernel]
    with nullcontext() if backend is None else sdpa_kernel(backend):
        y = functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=None if is_square else _aligned_last(q, k),
            is_causal=is_square,
            scale=scale,
            enable_gqa=is_grouped,
        )
    return y[..., :width].transpose(1, 2)


def prefix_kernel(q: Tensor, v: Tensor, kernel: str) -> str:
    """Return the kernel for the last queries and all keys: "flash", "efficient", or "".

    "" is any kernel with a mask: it reads the mask and computes masked products nevertheless.
    The two others skip these. Only their own operators align the last query with the last key;
    is_causal of scaled_dot_product_attention aligns the first.
    """
    if not q.is_cuda or torch.version.hip or q.shape[-1] % 8 or v.shape[-1] % 8:
        return ""
    if kernel == "efficient":
        return kernel
    takes = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _WIDEST
    return "flash" if takes and kernel in ("auto", "flash") else ""


def _attend_prefix(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, kernel: str, scale: float | None = None
) -> Tensor:
    if kernel == "flash":
        y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHTD, k_BKSD, v_BKSE, is_causal=True, scale=scale
        )[0]
        return y
    q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BKSD, v_BKSE))
    y = torch.ops.aten._efficient_attention_forward(
        *(q, k, v),
        bias=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dropout_p=0.0,
        custom_mask_type=int(CausalVariant.LOWER_RIGHT),
        compute_log_sumexp=True,
        scale=scale,
    )[0]
    return y.transpose(1, 2)


def _aligned_last(q_BHTD: Tensor, k_BKSD: Tensor) -> Tensor:
    """Return mask_TS, in which the last query is aligned with the last key."""
    num_queries = q_BHTD.shape[2]
    num_keys = k_BKSD.shape[2]
    mask_TS = torch.ones((num_queries, num_keys), dtype=torch.bool, device=q_BHTD.device)
    return mask_TS.tril(num_keys - num_queries)


@torch.library.custom_op("stepmark::join", mutates_args=())
def join(parts: list[Tensor], dim: int) -> Tensor:
    """Return torch.cat along a negative dim from -3 on, never fused with its consumers."""
    # Above four dimensions CUDA copies the parts one by one, at half the rate.
    rows = torch.cat([part.flatten(0, -4) for part in parts], dim).contiguous()
    joined: Tensor = rows.unflatten(0, parts[0].shape[:-3])
    return joined


@join.register_fake
def _(parts: list[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


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
    """Return torch.split with a gradient that is written to memory before it is used.

    Inductor would recompute it in each kernel that reads it: the search for its largest value
    then took 8 times as long as reading memory does (H200, GPT-2 1.5B in FP8).
    """
    return _split(x, sizes, dim)


_split: Callable[[Tensor, tuple[int, ...], int], tuple[Tensor, ...]] = _Split.apply


class Attention(nn.Module):
    """Grouped-query attention.

    Rows of qkv: per KV head its G queries, the gates of their elements, its key, its value.
    """

    def __init__(self, model: ModelConfig, layer: Layer, kernel: str) -> None:
        super().__init__()
        self.add_attention(model, layer, kernel)

    def add_attention(self, model: ModelConfig, layer: Layer, kernel: str) -> None:
        """model: with the widths of the layer."""
        self.kernel = kernel
        self.scores = scores_of(model, layer)
        self.attend: Attend = causal_attention  # replaced under context parallelism
        self.joins_gradients = False  # True pays off where qkv's gradient is cast to FP8
        self.head_dim = model.head_dim
        group = model.num_heads // model.num_kv_heads
        gates = group if model.gate == "element" else 0
        self.row_heads = (group, gates, 1, 0 if model.shares_kv else 1)
        linears = linear_layers(model, layer, "attention.")
        self.qkv = linears["qkv"]
        self.gate = linears.get("gate")
        self.q_norm = _head_norm(model, model.num_heads)
        self.k_norm = _head_norm(model, model.num_kv_heads)
        self.sinks = nn.Parameter(torch.empty(model.num_heads)) if model.has_sinks else None
        self.out = linears["out"]

    def forward(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        return self.attended(x_BTC, cos_TD, sin_TD)

    def attended(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        q_BTKGD, gate_BTKGD, k_BTKD, v_BTKD = self._projected(x_BTC)
        q_BTKGD = _normed(self.q_norm, q_BTKGD)
        k_BTKD = _normed(self.k_norm, k_BTKD)
        q_BTKGD = _rotated(q_BTKGD, cos_TD, sin_TD)
        k_BTKD = _rotated(k_BTKD, cos_TD, sin_TD)
        q, k, v = (part.flatten(2, 3) for part in (q_BTKGD, k_BTKD, v_BTKD))
        if self.scores.is_plain:
            y_BTHD = self.attend(q, k, v, self.kernel, self.scores.scale)
        else:
            y_BTHD = masked_attention(q, k, v, self.scores, self.sinks, self.kernel)
        if gate_BTKGD is not None:
            y_BTHD = y_BTHD * gate_BTKGD.flatten(2, 3).sigmoid()
        if self.gate is not None:
            y_BTHD = y_BTHD * self.gate(x_BTC).sigmoid().unsqueeze(-1)
        out_BTC: Tensor = self.out(y_BTHD.flatten(2))
        return out_BTC

    def _projected(self, x_BTC: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return queries, gates, keys and values; without values of their own the keys."""
        # The number of heads is inferred: under tensor parallelism it is this rank's.
        heads = (-1, sum(self.row_heads), self.head_dim)
        qkv = self.qkv(x_BTC).unflatten(-1, heads)
        sizes = tuple(filter(None, self.row_heads))
        parts = split_joined(qkv, sizes, -2) if self.joins_gradients else qkv.split(sizes, -2)
        has_gates = self.row_heads[1] > 0
        key = 2 if has_gates else 1
        return parts[0], parts[1] if has_gates else None, parts[key], parts[-1]


def _head_norm(model: ModelConfig, num_heads: int) -> Norm | None:
    """Return the norm of queries or keys: over a head, or over all heads together."""
    if not model.qk_norm:
        return None
    if model.qk_norm_kind in ("unit", "layernorm"):
        return Norm(model.qk_norm_kind, model.head_dim)
    if model.qk_norm_kind == "layernorm_each":
        return HeadNorms(num_heads, model.head_dim)
    is_whole = model.qk_norm_kind == "all"
    return Norm("rmsnorm", model.head_dim * (num_heads if is_whole else 1))


class HeadNorms(Norm):
    """LayerNorm of each head with a weight of its own, without biases (Cohere)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__("layernorm_no_weight", head_dim)
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim))

    def forward(self, x_BTxD: Tensor) -> Tensor:
        assert self.weight is not None
        with torch.autocast(x_BTxD.device.type, enabled=False):
            y = functional.layer_norm(x_BTxD, (x_BTxD.shape[-1],), eps=EPS)
            return y * self.weight.to(y.dtype).view(x_BTxD.shape[2:])


def _normed(norm: Norm | None, x_BTxD: Tensor) -> Tensor:
    if norm is None:
        return x_BTxD
    weight = norm.weight
    is_whole = weight is not None and weight.ndim == 1 and len(weight) > x_BTxD.shape[-1]
    y: Tensor = norm(x_BTxD.flatten(2)).view_as(x_BTxD) if is_whole else norm(x_BTxD)
    return y


class LatentAttention(nn.Module):
    """Keys and values are projected up from a latent; one rotary key serves all heads."""

    def __init__(
        self, model: ModelConfig, mla: MlaConfig, kernel: str, layer: Layer = DENSE
    ) -> None:
        super().__init__()
        self.mla = mla
        self.kernel = kernel
        self.scores = scores_of(model, layer)
        self.attend: Attend = causal_attention  # replaced under context parallelism
        hidden = model.hidden_size
        heads = model.num_heads
        q_width = heads * model.d_qk
        self.q: nn.Module = (
            _compressed_query(hidden, mla.q_lora_rank, q_width, bias=model.attention_bias)
            if mla.q_lora_rank
            else nn.Linear(hidden, q_width, bias=False)
        )
        kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_down = nn.Linear(hidden, down, bias=model.attention_bias)
        self.kv_norm = Norm("rmsnorm", mla.kv_lora_rank)
        self.kv_up = nn.Linear(mla.kv_lora_rank, kv_width, bias=False)
        self.out = nn.Linear(heads * mla.v_head_dim, hidden, bias=model.attention_bias)

    def forward(
        self, x_BTC: Tensor, cos_TR: Tensor | None = None, sin_TR: Tensor | None = None
    ) -> Tensor:
        nope = self.mla.qk_nope_head_dim
        rope = self.mla.qk_rope_head_dim
        value = self.mla.v_head_dim
        q_BTHD = self.q(x_BTC).unflatten(-1, (-1, nope + rope))
        q_BTHN, q_BTHR = q_BTHD.split((nope, rope), dim=-1)
        q_BTHD = torch.cat((q_BTHN, _rotated(q_BTHR, cos_TR, sin_TR)), dim=-1)

        latent_BTL, k_BTR = self.kv_down(x_BTC).split((self.mla.kv_lora_rank, rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, nope + value))
        k_BTHN, v_BTHE = kv.split((nope, value), dim=-1)
        k_BT1R = _rotated(k_BTR, cos_TR, sin_TR).unsqueeze(2)
        k_BTHD = torch.cat((k_BTHN, k_BT1R.expand(-1, -1, k_BTHN.shape[2], -1)), dim=-1)

        if self.scores.is_plain:
            y_BTHE = self.attend(q_BTHD, k_BTHD, v_BTHE, self.kernel, self.scores.scale)
        else:
            y_BTHE = masked_attention(q_BTHD, k_BTHD, v_BTHE, self.scores, None, self.kernel)
        out_BTC: Tensor = self.out(y_BTHE.flatten(2))
        return out_BTC


def _compressed_query(hidden_size: int, rank: int, width: int, *, bias: bool) -> nn.Sequential:
    """Return a projection of queries through a latent vector of their own."""
    return nn.Sequential(
        OrderedDict(
            down=nn.Linear(hidden_size, rank, bias=bias),
            norm=Norm("rmsnorm", rank),
            up=nn.Linear(rank, width, bias=False),
        )
    )
