"""Parts of a model with smaller widths: a share of them, or tiny ones for tests."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from stepmark.model.layers import (
    DeltaConfig,
    IndexerConfig,
    Layer,
    MambaConfig,
    MlaConfig,
    MoeConfig,
)

# Widths stay multiples of this when a model is scaled: FP8 matrix units need 16.
GRAIN = 16


@dataclass(frozen=True, slots=True)
class Scale:
    """Widths times a factor, divisible by tp. narrower: factor of a head's width."""

    factor: Fraction
    tp: int
    narrower: Fraction = Fraction(1)

    def width(self, value: int) -> int:
        return _times(value, self.factor, GRAIN * self.tp)

    def heads(self, count: int, multiple: int = 1) -> int:
        return _times(count, self.factor, math.lcm(multiple, self.tp))

    def rank(self, value: int) -> int:
        """Return a latent width, which tp does not divide."""
        return _times(value, self.factor, GRAIN)

    def head_width(self, value: int) -> int:
        return value if self.narrower == 1 else _times(value, self.narrower, GRAIN)

    def layer(self, layer: Layer) -> Layer:
        kv_heads = self.heads(layer.num_kv_heads)
        ratio = layer.num_heads // (layer.num_kv_heads or layer.num_heads or 1)
        return replace(
            layer,
            num_kv_heads=kv_heads,
            num_heads=kv_heads * ratio or self.heads(layer.num_heads, kv_heads or 1),
            head_dim=layer.head_dim and self.head_width(layer.head_dim),
            rotary_dim=layer.rotary_dim and self.head_width(layer.rotary_dim),
            ffn_hidden_size=self.width(layer.ffn_hidden_size),
        )

    def moe(self, moe: MoeConfig) -> MoeConfig:
        return replace(
            moe,
            ffn_hidden_size=self.width(moe.ffn_hidden_size),
            shared_ffn_hidden_size=self.width(moe.shared_ffn_hidden_size),
            latent_size=self.width(moe.latent_size),
        )

    def mla(self, mla: MlaConfig) -> MlaConfig:
        return replace(
            mla,
            q_lora_rank=mla.q_lora_rank and self.rank(mla.q_lora_rank),
            kv_lora_rank=self.rank(mla.kv_lora_rank),
            qk_nope_head_dim=self.head_width(mla.qk_nope_head_dim),
            qk_rope_head_dim=self.head_width(mla.qk_rope_head_dim),
            v_head_dim=self.head_width(mla.v_head_dim),
        )

    def delta(self, delta: DeltaConfig) -> DeltaConfig:
        keys = self.heads(delta.num_key_heads)
        per_key = delta.num_value_heads // delta.num_key_heads
        return replace(delta, num_key_heads=keys, num_value_heads=keys * per_key)

    def mamba(self, mamba: MambaConfig) -> MambaConfig:
        return replace(mamba, num_heads=self.heads(mamba.num_heads, mamba.num_groups))


def _times(value: int, share: Fraction, grain: int) -> int:
    return max(1, round(value * share / grain)) * grain if value else 0


@dataclass(frozen=True, slots=True)
class TinyScale:
    """Widths of a model that a CPU trains. hidden, full_hidden: tiny and full hidden width."""

    hidden: int
    full_hidden: int

    def width(self, value: int) -> int:
        share = Fraction(self.hidden, self.full_hidden)
        return max(1, round(value * share / GRAIN)) * GRAIN

    def layer(self, layer: Layer, head_dim: int) -> Layer:
        """head_dim: of the full model's other layers."""
        return replace(
            layer,
            window=min(layer.window, 16),
            chunk=min(layer.chunk, 32),
            num_heads=0,
            num_kv_heads=0,
            head_dim=layer.head_dim and (32 if layer.head_dim > head_dim else 16),
            rotary_dim=layer.rotary_dim and 8,
            ffn_hidden_size=layer.ffn_hidden_size and self.width(layer.ffn_hidden_size),
        )

    def moe(self, moe: MoeConfig) -> MoeConfig:
        shared = min(1, moe.num_shared_experts)
        return replace(
            moe,
            num_experts=4,
            top_k=min(2, moe.top_k),
            ffn_hidden_size=self.width(moe.ffn_hidden_size),
            num_shared_experts=shared,
            shared_ffn_hidden_size=shared * self.width(moe.ffn_hidden_size),
            first_dense_layers=min(1, moe.first_dense_layers),
            num_groups=min(2, moe.num_groups),
            top_groups=min(2, moe.num_groups, moe.top_groups),
            latent_size=moe.latent_size and 32,
        )

    def mla(self, mla: MlaConfig) -> MlaConfig:
        return MlaConfig(
            q_lora_rank=mla.q_lora_rank and 32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            indexer=mla.indexer and IndexerConfig(num_heads=2, head_dim=32, top_k=16),
        )

    def delta(self, delta: DeltaConfig) -> DeltaConfig:
        return replace(delta, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)

    def mamba(self, mamba: MambaConfig) -> MambaConfig:
        return replace(mamba, num_heads=4, head_dim=16, num_groups=2, state_dim=16, chunk=16)
