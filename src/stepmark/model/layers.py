"""Layers of a model: what each mixes tokens with, and its feed-forward part.

A model is a pattern of layers (model.py). Widths that a layer does not state are the model's.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from stepmark.ground.errors import ConfigError, not_one_of

# Attention is softmax over keys; the others carry a state from token to token: conv, a short
# convolution between two gates (LFM2), that of a few tokens.
Mixer = Literal["attention", "delta", "mamba", "lightning", "conv", "attention+mamba", ""]
FeedForward = Literal["model", "dense", "experts", ""]

_TOO_LARGE = 2**31


def check_int(field: str, value: object, low: int = 1, high: int = _TOO_LARGE - 1) -> None:
    """Raise ConfigError for anything but a whole number in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, value, f"an integer from {low} to {high}")


def check_kinds(config: Any, prefix: str, flags: tuple[str, ...] = (), **kinds: Any) -> None:
    """Raise ConfigError for a flag that is no boolean, or a value of no such kind."""
    for name in flags:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(prefix + name, getattr(config, name), "true or false")
    for name, kind in kinds.items():
        if getattr(config, name) not in get_args(kind):
            raise not_one_of(prefix + name, getattr(config, name), get_args(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What tells a layer from the others of its model. A width of 0 is the model's.

    mixer: "" is none. ffn: "model" is experts if the model has them, else dense; "" is none.
    window: keys that a query attends to, its own included; chunk: tokens attend to those of
    their chunk; 0: to all earlier ones.
    """

    mixer: Mixer = "attention"
    ffn: FeedForward = "model"
    window: int = 0
    chunk: int = 0
    has_rope: bool = True
    has_indexer: bool = True  # of a model with one; False: the keys of an earlier layer's
    has_sinks: bool = True  # of a model with sinks
    has_qk_norm: bool = True  # of a model with qk_norm
    has_kv: bool = True  # False: keys and values of the last earlier layer of the same window
    shares_kv: bool = False  # values are the keys, as in all layers of a model that shares_kv
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    ffn_hidden_size: int = 0  # of the dense part

    def __post_init__(self) -> None:
        flags = "has_rope", "has_indexer", "has_sinks", "has_qk_norm", "has_kv", "shares_kv"
        check_kinds(self, "layer.", flags, mixer=Mixer, ffn=FeedForward)
        for name in _LAYER_SIZES:
            check_int(f"layer.{name}", getattr(self, name), low=0)
        if self.window and self.chunk:
            raise ConfigError("layer.chunk", self.chunk, f"0 with a window ({self.window})")
        if (self.window or self.chunk) and not self.has_attention:
            name = "window" if self.window else "chunk"
            raise ConfigError(f"layer.{name}", getattr(self, name), "0 without attention")
        if not self.mixer and not self.ffn:
            raise ConfigError("layer.ffn", self.ffn, "not empty where the mixer is")

    @property
    def has_attention(self) -> bool:
        return self.mixer.startswith("attention")

    @property
    def scan(self) -> str:
        """The mixer that carries a state; empty: none."""
        return self.mixer.rpartition("attention+")[2] if self.mixer != "attention" else ""

    @property
    def has_experts(self) -> bool:
        """Whether it has experts, if it is one of model.layers."""
        return self.ffn == "experts"


_LAYER_SIZES = (
    *("window", "chunk", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    "ffn_hidden_size",
)
DENSE = Layer(ffn="dense")
EXPERTS = Layer(ffn="experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The feed-forward part of a mixture-of-experts layer."""

    num_experts: int  # routed
    top_k: int  # routed experts per token
    ffn_hidden_size: int  # of one routed expert
    num_shared_experts: int = 0  # every token uses them
    shared_ffn_hidden_size: int = 0  # all shared experts together
    first_dense_layers: int = 0  # leading layers with an ordinary MLP
    router_bias: bool = False  # one per expert: DeepSeek-V3's e_score_correction_bias
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # of experts, of which a token uses top_groups
    top_groups: int = 1
    shared_gate: bool = False  # a sigmoid of the token weighs the shared experts
    latent_size: int = 0  # width that tokens are projected to for routed experts; 0: none
    # Gemma 4: norms before and after routed experts and after shared ones, which have the norm
    # before the FFN; the router's own has no weight, but scales of its input and of experts.
    has_norms: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_hidden_size", "num_groups", "top_groups"):
            check_int(f"moe.{name}", getattr(self, name))
        for name in (
            *("num_shared_experts", "shared_ffn_hidden_size", "first_dense_layers"),
            "latent_size",
        ):
            check_int(f"moe.{name}", getattr(self, name), low=0)
        flags = ("router_bias", "shared_gate", "has_norms")
        check_kinds(self, "moe.", flags, scoring=Literal["softmax", "sigmoid"])
        if self.top_k > self.num_experts:
            raise ConfigError(
                "moe.top_k", self.top_k, f"at most num_experts={self.num_experts}"
            )
        if self.num_experts % self.num_groups:
            rule = f"a divisor of num_experts={self.num_experts}"
            raise ConfigError("moe.num_groups", self.num_groups, rule)
        if self.top_groups > self.num_groups:
            rule = f"at most num_groups={self.num_groups}"
            raise ConfigError("moe.top_groups", self.top_groups, rule)
        if bool(self.num_shared_experts) != bool(self.shared_ffn_hidden_size):
            raise ConfigError(
                "moe.shared_ffn_hidden_size",
                self.shared_ffn_hidden_size,
                f"positive with shared experts, else 0 (num_shared_experts="
                f"{self.num_shared_experts})",
            )
        for name in ("shared_gate", "has_norms"):
            if getattr(self, name) and not self.num_shared_experts:
                raise ConfigError(f"moe.{name}", True, "false without shared experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """DeepSeek's sparse attention: each query attends to the top_k keys of the best score.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        for each in fields(self):
            check_int(f"indexer.{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "indexer" or (each.name == "q_lora_rank" and value is None):
                continue
            check_int(f"mla.{each.name}", value)
        if self.indexer and self.q_lora_rank is None:
            raise ConfigError("mla.q_lora_rank", None, "a width: the indexer multiplies it")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next: a state of key_dim x value_dim."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        for each in fields(self):
            check_int(f"delta.{each.name}", getattr(self, each.name))
        if self.num_value_heads % self.num_key_heads:
            rule = f"a multiple of num_key_heads={self.num_key_heads}"
            raise ConfigError("delta.num_value_heads", self.num_value_heads, rule)

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba-2 (arXiv:2405.21060): heads of head_dim with a state of state_dim each."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share B and C
    state_dim: int
    conv_width: int = 4
    chunk: int = 256  # tokens that are multiplied at once
    conv_bias: bool = True
    has_bias: bool = False  # of the input's projection
    has_out_bias: bool = False
    has_norm: bool = True  # gated RMSNorm before the output projection

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type is int:
                check_int(f"mamba.{each.name}", getattr(self, each.name))
        check_kinds(self, "mamba.", ("conv_bias", "has_bias", "has_out_bias", "has_norm"))
        if self.num_heads % self.num_groups:
            rule = f"a divisor of num_heads={self.num_heads}"
            raise ConfigError("mamba.num_groups", self.num_groups, rule)

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [out, width] that every token is multiplied with, or `active` of `copies`."""

    name: str  # of the module within a block, e.g. "ffn.gate"
    out: int
    width: int
    split: Literal["out", "in", ""] = ""  # what tensor parallelism divides
    has_bias: bool = False
    copies: int = 1  # routed experts
    active: int = 1
    is_routed: bool = False
    has_input_grad: bool = True

    @property
    def num_weights(self) -> int:
        return self.copies * self.out * self.width

    @property
    def num_active(self) -> int:
        return self.active * self.out * self.width


@dataclass(frozen=True, slots=True)
class Vector:
    """A parameter that is no factor of a matrix product, such as a norm's weight."""

    name: str  # within a block, e.g. "attention_norm.weight"
    shape: tuple[int, ...]
    is_divided: bool = False  # by tensor parallelism
    is_trained: bool = True
