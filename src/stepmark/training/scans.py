"""Mixers that carry a state from token to token: Gated DeltaNet, Mamba-2, Lightning.

Each is a sum over earlier tokens, computed in chunks: products within a chunk, and with the
state that the chunks before it leave (model/scans.py names the sources). They are plain torch
in fp32, whose backward pass is autograd's.

B batch, T tokens, C hidden width, H heads, N chunks, L tokens of a chunk, D width of keys,
E width of values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepmark.model.layers import DENSE, DeltaConfig, Layer, MambaConfig
from stepmark.model.model import ModelConfig
from stepmark.model.scans import DELTA_CHUNK, LIGHTNING_BLOCK
from stepmark.training.attention import Attention
from stepmark.training.layers import EPS, Norm, linear_layers

_UNIT_EPS = 1e-6  # of the unit queries and keys of DeltaNet


def _chunks(x_BTH: Tensor, length: int) -> Tensor:
    """Return x_BHNL in fp32, filled up with zeros; a last dimension of width stays."""
    missing = -x_BTH.shape[1] % length
    padding = (0, 0) * (x_BTH.dim() - 2) + (0, missing)
    filled = functional.pad(x_BTH.float(), padding)
    by_chunk: Tensor = filled.unflatten(1, (-1, length))
    return by_chunk.movedim(3, 1)


def _decays(sums_BHNL: Tensor) -> Tensor:
    """Return decays_BHNLL from each token to later ones of its chunk; 0 to earlier ones."""
    length = sums_BHNL.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=sums_BHNL.device).tril()
    exponents = sums_BHNL[..., :, None] - sums_BHNL[..., None, :]
    return exponents.masked_fill(~later, float("-inf")).exp()


def decayed_scan(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHE: Tensor, log_decay_BTH: Tensor, length: int
) -> Tensor:
    """Return y_t = q_t S_t with S_t = exp(log_decay_t) S_t-1 + k_t.T v_t, in fp32."""
    num_tokens = q_BTHD.shape[1]
    length = min(length, num_tokens)
    q, k, v, log_decay = (_chunks(x, length) for x in (q_BTHD, k_BTHD, v_BTHE, log_decay_BTH))
    sums = log_decay.cumsum(-1)
    within = (q @ k.mT * _decays(sums)) @ v
    reached = q * sums.exp()[..., None]
    leaving = k * (sums[..., -1:] - sums).exp()[..., None]
    added = leaving.mT @ v
    last = sums[..., -1, None, None].exp()
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for chunk in range(added.shape[2]):
        states.append(state)
        state = state * last[:, :, chunk] + added[:, :, chunk]
    y = within + reached @ torch.stack(states, dim=2)
    return y.movedim(1, 3).flatten(1, 2)[:, :num_tokens]


def delta_scan(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHE: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    length: int,
) -> Tensor:
    """Return y_t = q_t S_t of the gated delta rule, in fp32.

    S_t = exp(log_decay_t) S_t-1 + k_t.T beta_t (v_t - k_t exp(log_decay_t) S_t-1).
    """
    num_tokens = q_BTHD.shape[1]
    length = min(length, num_tokens)
    q, k, v, log_decay, beta = (
        _chunks(x, length) for x in (q_BTHD, k_BTHD, v_BTHE, log_decay_BTH, beta_BTH)
    )
    sums = log_decay.cumsum(-1)
    decays = _decays(sums)
    scaled = k * beta[..., None]
    # What earlier tokens of the chunk change of a token's value: a triangular system.
    triangle = (scaled @ k.mT * decays).tril(-1)
    right = torch.cat((v * beta[..., None], scaled * sums.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = q @ k.mT * decays
    reached = q * sums.exp()[..., None]
    leaving = k * (sums[..., -1:] - sums).exp()[..., None]
    last = sums[..., -1, None, None].exp()
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    parts = []
    for chunk in range(q.shape[2]):
        new = values[:, :, chunk] - keys[:, :, chunk] @ state
        parts.append(reached[:, :, chunk] @ state + within[:, :, chunk] @ new)
        state = state * last[:, :, chunk] + leaving[:, :, chunk].mT @ new
    y = torch.stack(parts, dim=2)
    return y.movedim(1, 3).flatten(1, 2)[:, :num_tokens]


class CausalConv(nn.Module):
    """SiLU of a convolution of each channel over a token and those before it."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        channels, width = self.weight.shape
        x_BCT = functional.pad(x_BTC.mT, (width - 1, 0))
        weight = self.weight.unsqueeze(1).to(x_BTC.dtype)
        bias = None if self.bias is None else self.bias.to(x_BTC.dtype)
        y_BCT = functional.conv1d(x_BCT, weight, bias, groups=channels)
        return functional.silu(y_BCT).mT


class GroupedNorm(nn.Module):
    """RMSNorm over each of several groups of a row, with a weight for all of them."""

    def __init__(self, width: int, num_groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.num_groups = num_groups

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1))
        normed = functional.rms_norm(groups, groups.shape[-1:], eps=EPS)
        return normed.flatten(-2) * self.weight.to(x.dtype)


class Mamba(nn.Module):
    """Mamba-2: out(norm(scan(x) * silu(z))). Rows of ssm_in: z, x, B, C, and steps of heads."""

    def __init__(self, model: ModelConfig, mamba: MambaConfig, layer: Layer) -> None:
        super().__init__()
        self.add_mamba(model, mamba, layer)

    def add_mamba(self, model: ModelConfig, mamba: MambaConfig, layer: Layer) -> None:
        self.mamba = mamba
        linears = linear_layers(model, layer, "attention.ssm_")
        channels = mamba.conv_channels
        self.ssm_in = linears["in"]
        self.ssm_conv = CausalConv(channels, mamba.conv_width, bias=mamba.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(mamba.num_heads))
        self.A_log = nn.Parameter(torch.empty(mamba.num_heads))
        self.D = nn.Parameter(torch.empty(mamba.num_heads))
        self.ssm_norm = GroupedNorm(mamba.inner, mamba.num_groups) if mamba.has_norm else None
        self.ssm_out = linears["out"]

    def forward(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        return self.scanned(x_BTC)

    def scanned(self, x_BTC: Tensor) -> Tensor:
        mamba = self.mamba
        sizes = (mamba.inner, mamba.conv_channels, mamba.num_heads)
        z_BTC, mixed_BTC, dt_BTH = self.ssm_in(x_BTC).split(sizes, dim=-1)
        state = mamba.num_groups * mamba.state_dim
        x, b, c = self.ssm_conv(mixed_BTC).split((mamba.inner, state, state), dim=-1)
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHE = self._scan(x, b, c, dt_BTH.float())
        y_BTC = y_BTHE.flatten(2).to(x_BTC.dtype) * functional.silu(z_BTC)
        if self.ssm_norm is not None:
            y_BTC = self.ssm_norm(y_BTC)
        out_BTC: Tensor = self.ssm_out(y_BTC)
        return out_BTC

    def _scan(self, x: Tensor, b: Tensor, c: Tensor, dt_BTH: Tensor) -> Tensor:
        mamba = self.mamba
        per_group = mamba.num_heads // mamba.num_groups
        x_BTHE = x.unflatten(-1, (mamba.num_heads, -1)).float()
        b_BTHD, c_BTHD = (
            part.unflatten(-1, (mamba.num_groups, -1)).repeat_interleave(per_group, dim=2)
            for part in (b, c)
        )
        dt_BTH = functional.softplus(dt_BTH + self.dt_bias.float())
        log_decay_BTH = -self.A_log.float().exp() * dt_BTH
        scaled_BTHE = x_BTHE * dt_BTH[..., None]
        y_BTHE = decayed_scan(c_BTHD, b_BTHD, scaled_BTHE, log_decay_BTH, mamba.chunk)
        skipped: Tensor = self.D.float()[:, None] * x_BTHE
        return y_BTHE + skipped


class AttentionWithMamba(Attention, Mamba):
    """The sum of attention and Mamba-2 of the same input (Falcon-H1)."""

    def __init__(
        self, model: ModelConfig, mamba: MambaConfig, layer: Layer, kernel: str
    ) -> None:
        nn.Module.__init__(self)
        self.add_mamba(model, mamba, layer)
        self.add_attention(model, layer, kernel)

    def forward(
        self, x_BTC: Tensor, cos_TD: Tensor | None = None, sin_TD: Tensor | None = None
    ) -> Tensor:
        return self.attended(x_BTC, cos_TD, sin_TD) + self.scanned(x_BTC)


class DeltaNet(nn.Module):
    """Gated DeltaNet: out(norm(scan(q, k, v)) * silu(z)).

    Rows of qkvz: per key head its query, its key, its values, their z; of ba: per key head the
    beta of each value head, and its step.
    """

    def __init__(self, model: ModelConfig, delta: DeltaConfig, layer: Layer = DENSE) -> None:
        super().__init__()
        self.delta = delta
        linears = linear_layers(model, layer, "attention.")
        self.qkvz = linears["qkvz"]
        self.ba = linears["ba"]
        channels = 2 * delta.keys + delta.values
        self.conv = CausalConv(channels, delta.conv_width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(delta.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(delta.num_value_heads))
        self.gate_norm = Norm("rmsnorm", delta.value_dim)
        self.out = linears["out"]

    def forward(self, x_BTC: Tensor, *_tables: Tensor | None) -> Tensor:
        delta = self.delta
        per_key = delta.num_value_heads // delta.num_key_heads
        values = per_key * delta.value_dim
        grouped = self.qkvz(x_BTC).unflatten(-1, (delta.num_key_heads, -1))
        sizes = (delta.key_dim, delta.key_dim, values, values)
        *mixed, z = (part.flatten(2) for part in grouped.split(sizes, dim=-1))
        beta, step = self.ba(x_BTC).unflatten(-1, (delta.num_key_heads, 2, -1)).unbind(-2)
        qkv = self.conv(torch.cat(mixed, dim=-1))
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHE = self._scan(qkv, beta.flatten(2).float(), step.flatten(2).float())
        y_BTHE = self.gate_norm(y_BTHE.to(x_BTC.dtype))
        out_BTC: Tensor = self.out(y_BTHE.flatten(2) * functional.silu(z))
        return out_BTC

    def _scan(self, qkv_BTC: Tensor, beta_BTH: Tensor, step_BTH: Tensor) -> Tensor:
        delta = self.delta
        per_key = delta.num_value_heads // delta.num_key_heads
        sizes = (delta.keys, delta.keys, delta.values)
        q, k, v = qkv_BTC.float().split(sizes, dim=-1)
        q, k = (
            _unit(part.unflatten(-1, (-1, delta.key_dim))).repeat_interleave(per_key, dim=2)
            for part in (q, k)
        )
        v = v.unflatten(-1, (-1, delta.value_dim))
        step_BTH = functional.softplus(step_BTH + self.dt_bias.float())
        log_decay_BTH = -self.A_log.float().exp() * step_BTH
        q = q * delta.key_dim**-0.5
        return delta_scan(q, k, v, log_decay_BTH, beta_BTH.sigmoid(), DELTA_CHUNK)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + _UNIT_EPS).rsqrt()


class Lightning(nn.Module):
    """Lightning attention: out(norm(scan(silu(q, k, v))) * sigmoid(gate)).

    Rows of scan_in: per head its query, its key, its value. The decay of a head is a constant,
    which shrinks from head to head and from layer to layer (MiniMax-01, arXiv:2501.08313).
    """

    def __init__(self, model: ModelConfig, index: int, layer: Layer) -> None:
        super().__init__()
        linears = linear_layers(model, layer, "attention.")
        self.num_heads = model.num_heads
        self.depth = index / (model.num_layers - 1 + 1e-5)
        self.scan_in = linears["scan_in"]
        self.gate = linears["gate"]
        self.gate_norm = Norm("rmsnorm", model.num_heads * model.head_dim)
        self.out = linears["out"]

    def forward(self, x_BTC: Tensor, *_tables: Tensor | None) -> Tensor:
        qkv = functional.silu(self.scan_in(x_BTC)).unflatten(-1, (self.num_heads, 3, -1))
        q, k, v = qkv.unbind(-2)
        heads_H = torch.arange(1, self.num_heads + 1, device=x_BTC.device)
        slopes_H = 2 ** (-8 / self.num_heads * heads_H) * (1 - self.depth + 1e-5)
        log_decay_BTH = -slopes_H.expand(*q.shape[:3])
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHE = decayed_scan(q, k, v, log_decay_BTH, LIGHTNING_BLOCK)
        y_BTC = self.gate_norm(y_BTHE.flatten(2).to(x_BTC.dtype))
        out_BTC: Tensor = self.out(y_BTC * self.gate(x_BTC).sigmoid())
        return out_BTC
