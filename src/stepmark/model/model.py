"""Unsharded transformer: widths and parameter counts.

A model is a pattern of layers (layers.py) over common widths.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.layers import (
    DENSE,
    DeltaConfig,
    Layer,
    Linear,
    MambaConfig,
    MlaConfig,
    MoeConfig,
    Vector,
    check_int,
    check_kinds,
)
from stepmark.model.packing import Packing
from stepmark.model.scale import Scale, TinyScale

# gate and up: swiglu, geglu, and clamped_swiglu of gpt-oss; up alone: the others. xielu
# (arXiv:2411.13010) has two trained numbers per MLP.
Activation = Literal[
    "swiglu", "geglu", "clamped_swiglu", "gelu", "silu", "relu", "relu2", "xielu"
]
Norm = Literal["rmsnorm", "layernorm", "layernorm_no_bias", "layernorm_no_weight"]
# shared: one before attention and FFN, which are parallel; both: before and after each.
NormPlacement = Literal["pre", "post", "both", "shared"]
# RMSNorm over a head, over all heads, or without a weight; LayerNorm over a head, or with a
# weight for each head and no bias.
QkNorm = Literal["head", "all", "unit", "layernorm", "layernorm_each"]
Gate = Literal["", "element", "head"]
_Rule = tuple[str, object, bool, str]  # field, value, whether it is valid, what is allowed
Bias = Literal["out", "mlp", "experts", "router", "head"]

# Fields that say where a model is from, not what it computes.
NO_IDENTITY = (
    *("source", "aliases", "published_params", "published_active_params"),
    *("unmodelled", "max_context"),
)
# Fields that were added later: without effect at their defaults, identities of published runs
# stay.
LATER = frozenset(
    {
        *("attention_bias", "pattern", "delta", "mamba", "norm_placement", "is_parallel"),
        *("biases", "qk_norm_kind", "rotary_dim", "gate", "has_sinks", "softcap"),
        *("logit_softcap", "attention_scale", "embedding_multiplier", "embedding_norm"),
        *("residual_multiplier", "logit_multiplier", "num_mtp_layers", "shares_kv"),
        *("scoring", "num_groups", "top_groups", "shared_gate", "latent_size", "indexer"),
        *("v_norm", "layer_scale", "has_norms", "per_layer_width", "value_head_dim"),
        *("conv_width", "conv_bias", "value_multiplier", "packing"),
        # of a layer, whose other later fields have names of the model's
        *("has_kv", "has_qk_norm"),
    }
)


def identity_of(config: Any) -> dict[str, object]:
    """Return the fields of a model or of a part of it that tell what it computes."""
    return {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name not in NO_IDENTITY
        and not (each.name in LATER and getattr(config, each.name) == each.default)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, unsharded. Counts are of parameters, not bytes."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # with mla: num_heads
    head_dim: int  # with mla: qk_nope_head_dim + qk_rope_head_dim
    ffn_hidden_size: int  # of a dense layer; 0 where every layer is MoE
    vocab_size: int
    seq_len: int  # length in benchmarks of this model, not the longest possible
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    tied_embeddings: bool = False  # the input table is also the output head
    qkv_bias: bool = False
    attention_bias: bool = False  # q, k, v and out; with mla: its down projections and out
    linear_bias: bool = False  # every linear layer but the head, those of attention included
    qk_norm: bool = False  # over head_dim, one weight for q and one for k (qk_norm_kind)
    max_positions: int = 0  # rows of a learned position table; 0 = rope
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    # Layers in order, again and again; leading layers of moe.first_dense_layers are dense.
    pattern: tuple[Layer, ...] = (Layer(),)
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    conv_width: int = 0  # tokens of short convolutions, as wide as the hidden state
    conv_bias: bool = False  # of these and of their projections
    norm_placement: NormPlacement = "pre"
    is_parallel: bool = False  # attention and FFN have the same input, and are added together
    biases: tuple[Bias, ...] = ()  # of linear layers that the three flags above leave out
    qk_norm_kind: QkNorm = "head"
    rotary_dim: int = 0  # rotated width of a head; 0: all of it
    gate: Gate = ""  # sigmoid that attention's output is multiplied with, per element or head
    shares_kv: bool = False  # values are the keys
    value_head_dim: int = 0  # 0: head_dim, or that of mla
    v_norm: bool = False  # RMSNorm over each head's value, without a weight
    has_sinks: bool = False  # a learned logit of each head in attention's softmax
    softcap: float = 0.0  # of attention's scores; 0: none
    logit_softcap: float = 0.0
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False  # a norm follows the embedding
    value_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    # Gemma 4: a second embedding has this width for each layer, which gates its hidden state.
    per_layer_width: int = 0
    layer_scale: bool = False  # a layer's result is scaled by a number that is not trained
    logit_multiplier: float = 1.0
    num_mtp_layers: int = 0  # multi-token prediction (DeepSeek-V3, section 2.2)
    packing: Packing | None = None  # of sequences in benchmarks; None: each is one piece
    source: str = ""
    published_params: int | None = None  # exact where a checkpoint tells, else as announced
    published_active_params: int | None = None
    aliases: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = field(default=(), compare=False)  # notes for the reader
    max_context: int = field(default=0, compare=False)  # tokens; 0: its file has none

    def __post_init__(self) -> None:
        self._check_fields()
        rules = (
            *self._width_rules(),
            *self._layer_rules(),
            *self._mtp_rules(),
            *self._packing_rules(),
        )
        for name, value, is_valid, allowed in rules:
            if not is_valid:
                raise ConfigError(name, value, allowed)

    def _width_rules(self) -> Iterator[_Rule]:
        mla = self.mla
        yield (
            "num_heads",
            self.num_heads,
            self.num_heads % self.num_kv_heads == 0,
            f"a multiple of num_kv_heads={self.num_kv_heads}",
        )
        yield (
            "seq_len",
            self.seq_len,
            not self.max_positions or self.seq_len <= self.max_positions,
            f"at most max_positions={self.max_positions}",
        )
        yield (
            "num_kv_heads",
            self.num_kv_heads,
            not mla or self.num_kv_heads == self.num_heads,
            f"num_heads={self.num_heads} with mla",
        )
        yield (
            "head_dim",
            self.head_dim,
            not mla or self.head_dim == mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "qk_nope_head_dim + qk_rope_head_dim with mla",
        )
        yield (
            "rotary_dim",
            self.rotary_dim,
            self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
            f"an even number up to head_dim={self.head_dim}",
        )
        for name in ("qkv_bias", "linear_bias", "qk_norm", "gate", "has_sinks", "v_norm"):
            value = getattr(self, name)
            yield name, value, not (mla and value), "false with mla"
        width = self.value_head_dim
        yield "value_head_dim", width, not (mla and width), "0 with mla"

    def _mtp_rules(self) -> Iterator[_Rule]:
        last = self.mtp_layer
        is_valid = not self.num_mtp_layers or bool(last.mixer and last.ffn)
        allowed = "0: its layer is like the last one, which lacks attention or an FFN"
        yield "num_mtp_layers", self.num_mtp_layers, is_valid, allowed

    def _packing_rules(self) -> Iterator[_Rule]:
        """Yield what packed sequences cannot be with, whose work would depend on more."""
        packing = self.packing
        if packing is None:
            return
        longest = f"pieces of at most seq_len ({self.seq_len})"
        yield "packing", packing.text, packing.longest <= self.seq_len, longest
        has_scan = any(layer.scan for layer in self.pattern)
        # Chunks begin at positions of the whole sequence, wherever pieces do.
        has_chunk = any(0 < layer.chunk < self.seq_len for layer in self.pattern)
        has_indexer = self.mla is not None and self.mla.indexer is not None
        for what, is_there in (
            ("layers that carry a state", has_scan),
            ("attention in chunks", has_chunk),
            ("sparse attention", has_indexer),
        ):
            yield "packing", packing.text, not is_there, f"left out with {what} ({self.name})"

    def _layer_rules(self) -> Iterator[_Rule]:
        moe = self.moe
        num_leading = moe.first_dense_layers if moe else 0
        allowed = f"at most num_layers={self.num_layers}"
        yield "moe.first_dense_layers", num_leading, num_leading <= self.num_layers, allowed
        is_valid = self.ffn_hidden_size > 0 or not self.num_dense_layers
        allowed = "positive where a layer is dense"
        yield "ffn_hidden_size", self.ffn_hidden_size, is_valid, allowed
        is_valid = not (moe and self.linear_bias)
        yield "linear_bias", self.linear_bias, is_valid, "false for MoE models"
        is_valid = not moe or self.activation != "xielu"
        yield "activation", self.activation, is_valid, "one without parameters, with experts"
        yield "moe", None, moe is not None or not self.num_moe_layers, "given with experts"
        scans = {layer.scan for layer in self.pattern}
        for name in ("delta", "mamba"):
            is_given = getattr(self, name) is not None
            yield name, None, is_given or name not in scans, f"given with layers of {name}"
        has_conv = "conv" in scans
        yield (
            "conv_width",
            0,
            self.conv_width > 0 or not has_conv,
            "positive with layers of conv",
        )
        is_masked = any(layer.window or layer.chunk for layer in self.pattern)
        has_indexer = self.mla is not None and self.mla.indexer is not None
        allowed = "left out with windows or chunks"
        yield "mla.indexer", "given", not (has_indexer and is_masked), allowed
        yield (
            "is_parallel",
            self.is_parallel,
            not self.is_parallel or self.norm_placement in ("pre", "shared"),
            "false where norms come after",
        )
        allowed = "0 where an activation has no gate, or with multi-token prediction"
        is_valid = self.is_gated and not self.num_mtp_layers
        yield (
            "per_layer_width",
            self.per_layer_width,
            not self.per_layer_width or is_valid,
            allowed,
        )
        allowed = "true without an earlier layer of the same window and heads, and with mla"
        yield "layer.has_kv", False, self._keys_are_there(), allowed
        for layer in self.pattern:
            own = self.of_layer(layer)
            yield (
                "layer.num_heads",
                own.num_heads,
                own.num_heads % own.num_kv_heads == 0,
                f"a multiple of num_kv_heads={own.num_kv_heads}",
            )
            rotates = layer.has_rope and layer.has_attention and not self.max_positions
            name, width = "head_dim", own.rotary_dim or own.head_dim
            if own.mla:
                name, width = "mla.qk_rope_head_dim", own.mla.qk_rope_head_dim
            allowed = "an even number, as rotary positions turn pairs"
            yield name, width, not rotates or width % 2 == 0, allowed
            is_valid = not (own.value_head_dim and own.shares_kv)
            yield "value_head_dim", own.value_head_dim, is_valid, "0 where values are the keys"

    def _keys_are_there(self) -> bool:
        """Return whether layers without keys follow one whose keys and values fit."""
        if all(layer.has_kv for layer in self.pattern):
            return True
        there = set()
        for layer in self.layers:
            kind = (layer.window, layer.chunk, layer.num_kv_heads, layer.head_dim)
            if layer.has_attention and layer.has_kv:
                there.add(kind)
            elif layer.has_attention and kind not in there:
                return False
        return self.mla is None

    def _check_fields(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("name", self.name, "a name")
        for name in _SIZES:
            check_int(name, getattr(self, name))
        for name in _COUNTS:
            check_int(name, getattr(self, name), low=0)
        check_kinds(self, "", _FLAGS, **_KINDS)
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ConfigError(name, value, "a number from 0")
        for bias in self.biases:
            if bias not in get_args(Bias):
                raise not_one_of("biases", bias, get_args(Bias))
        if not self.pattern:
            raise ConfigError("pattern", "()", "at least one layer")

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer in order, each with a dense FFN, experts or none."""
        moe = self.moe
        num_dense = moe.first_dense_layers if moe else 0
        cycle = [self._resolved(layer) for layer in self.pattern]
        length = len(cycle)
        layers = [cycle[index % length] for index in range(self.num_layers)]
        for index in range(min(num_dense, self.num_layers)):
            if layers[index].ffn:
                layers[index] = replace(layers[index], ffn="dense")
        return tuple(layers)

    def _resolved(self, layer: Layer) -> Layer:
        if layer.ffn != "model":
            return layer
        return replace(layer, ffn="experts" if self.moe else "dense")

    @property
    def layer_counts(self) -> "Counter[Layer]":
        """Number of layers of each kind, in the order in which kinds first come."""
        return Counter(self.layers)

    def layer_runs(self, start: int, stop: int) -> Iterator[tuple[int, int, Layer]]:
        """Yield (first, end, layer) of equal layers in a row, within this range."""
        layers = self.layers
        first = start
        for index in range(start, stop):
            if index + 1 == stop or layers[index + 1] != layers[index]:
                yield first, index + 1, layers[index]
                first = index + 1

    def of_layer(self, layer: Layer) -> "ModelConfig":
        """Return the model with the widths and the values of a layer."""
        own = {name: value for name in _OF_LAYER if (value := getattr(layer, name))}
        for name, is_there in (("has_sinks", layer.has_sinks), ("qk_norm", layer.has_qk_norm)):
            if getattr(self, name) and not is_there:
                own[name] = False
        return replace(self, **own, pattern=(Layer(),)) if own else self

    @property
    def d_qk(self) -> int:
        """Width of one query and one key head."""
        return self.head_dim

    @property
    def d_v(self) -> int:
        """Width of one value head."""
        return self.mla.v_head_dim if self.mla else self.value_head_dim or self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return sum(layer.has_experts for layer in self.layers)

    @property
    def num_dense_layers(self) -> int:
        return sum(layer.ffn == "dense" for layer in self.layers)

    @property
    def is_gated(self) -> bool:
        """Whether the FFN multiplies two products, gate and up."""
        return "glu" in self.activation

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden width."""
        return self.hidden_size * NORM_VECTORS[self.norm]

    def linears(self, layer: Layer = DENSE) -> tuple[Linear, ...]:
        """Return the weights of a layer in the order of their products.

        Names are those of the step that `stepmark train` runs, which has q, k and v in one.
        """
        own = self.of_layer(layer)
        own_linears = (*own._mixer_linears(layer), *own._ffn_linears(layer))
        if not (width := self.per_layer_width):
            return own_linears
        gate = Linear("per_layer.gate", width, self.hidden_size)
        return (*own_linears, gate, Linear("per_layer.out", self.hidden_size, width))

    def _mixer_linears(self, layer: Layer) -> Iterator[Linear]:
        hidden = self.hidden_size
        if layer.scan == "mamba":
            assert self.mamba is not None
            mamba = self.mamba
            rows = mamba.inner + mamba.conv_channels + mamba.num_heads
            yield Linear("attention.ssm_in", rows, hidden, "out", mamba.has_bias)
            yield Linear("attention.ssm_out", hidden, mamba.inner, "in", mamba.has_out_bias)
        elif layer.scan == "delta":
            assert self.delta is not None
            delta = self.delta
            rows = 2 * (delta.keys + delta.values)
            yield Linear("attention.qkvz", rows, hidden, "out")
            yield Linear("attention.ba", 2 * delta.num_value_heads, hidden, "out")
            yield Linear("attention.out", hidden, delta.values, "in")
        elif layer.scan == "conv":
            yield Linear("attention.conv_in", 3 * hidden, hidden, "out", self.conv_bias)
            yield Linear("attention.out", hidden, hidden, "in", self.conv_bias)
        elif layer.scan == "lightning":
            width = self.num_heads * self.head_dim
            yield Linear("attention.scan_in", 3 * width, hidden, "out")
            yield Linear("attention.gate", width, hidden, "out")
            yield Linear("attention.out", hidden, width, "in")
        if layer.has_attention:
            yield from self._attention_linears(layer)

    def _attention_linears(self, layer: Layer) -> Iterator[Linear]:
        hidden = self.hidden_size
        heads = self.num_heads
        has_bias = self.attention_bias or self.linear_bias
        has_out_bias = has_bias or "out" in self.biases
        out = Linear("attention.out", hidden, heads * self.d_v, "in", has_out_bias)
        if self.mla is None:
            rows = heads * (self.d_qk + (self.d_v if self.gate == "element" else 0))
            if layer.has_kv:
                rows += self.num_kv_heads * (self.d_qk + (0 if self.shares_kv else self.d_v))
            name = "attention.qkv" if layer.has_kv else "attention.q"
            yield Linear(name, rows, hidden, "out", has_bias or self.qkv_bias)
            if self.gate == "head":
                yield Linear("attention.gate", heads, hidden, "out")
            yield out
            return
        mla = self.mla
        if mla.q_lora_rank is None:
            yield Linear("attention.q", heads * self.d_qk, hidden, "out")
        else:
            yield Linear("attention.q.down", mla.q_lora_rank, hidden, has_bias=has_bias)
            yield Linear("attention.q.up", heads * self.d_qk, mla.q_lora_rank, "out")
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        yield Linear("attention.kv_down", latent, hidden, has_bias=has_bias)
        rows = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield Linear("attention.kv_up", rows, mla.kv_lora_rank, "out")
        if (indexer := mla.indexer) and mla.q_lora_rank and layer.has_indexer:
            index_width = indexer.num_heads * indexer.head_dim
            for name, index_rows, width in (
                ("q", index_width, mla.q_lora_rank),
                ("k", indexer.head_dim, hidden),
                ("weights", indexer.num_heads, hidden),
            ):
                full = f"attention.index_{name}"
                yield Linear(full, index_rows, width, has_input_grad=False)
        yield out

    def _ffn_linears(self, layer: Layer) -> Iterator[Linear]:
        hidden = self.hidden_size
        moe = self.moe
        mlp_bias = self.linear_bias or "mlp" in self.biases
        if not layer.has_experts or moe is None:
            if layer.ffn:
                yield from self._mlp("ffn.", self.ffn_hidden_size, hidden, mlp_bias)
            return
        latent = moe.latent_size or hidden
        yield Linear("ffn.router", moe.num_experts, hidden, has_bias="router" in self.biases)
        if moe.latent_size:
            yield Linear("ffn.to_latent", latent, hidden, has_bias=mlp_bias)
        has_bias = "experts" in self.biases
        for linear in self._mlp("ffn.held.", moe.ffn_hidden_size, latent, has_bias):
            yield replace(linear, copies=moe.num_experts, active=moe.top_k, is_routed=True)
        if moe.latent_size:
            yield Linear("ffn.from_latent", hidden, latent, has_bias=mlp_bias)
        if moe.num_shared_experts:
            width = moe.shared_ffn_hidden_size
            yield from self._mlp("ffn.shared.", width, hidden, "mlp" in self.biases)
            if moe.shared_gate:
                yield Linear("ffn.shared_weight", 1, hidden)

    def _mlp(self, prefix: str, width: int, hidden: int, has_bias: bool) -> Iterator[Linear]:
        for name in ("gate", "up") if self.is_gated else ("up",):
            yield Linear(prefix + name, width, hidden, "out", has_bias)
        yield Linear(f"{prefix}down", hidden, width, "in", has_bias)

    def vectors(self, layer: Layer = DENSE) -> tuple[Vector, ...]:
        """Return the parameters of a layer that are no factor of a product, in forward order.

        Biases of linear layers are those of `linears`.
        """
        own = self.of_layer(layer)
        has_norm = bool(layer.mixer) and self.norm_placement == "shared"
        return (
            *own._norm_vectors("attention_norm" if layer.mixer else ""),
            *own._scan_vectors(layer),
            *(own._attention_vectors(layer) if layer.has_attention else ()),
            *own._norm_vectors("ffn_norm" if layer.ffn and not has_norm else ""),
            *(own._experts_vectors() if layer.has_experts else ()),
            *(own.activation_vectors if layer.ffn == "dense" else ()),
            *(own._vectors_of_norm("per_layer_norm") if self.per_layer_width else ()),
        )

    def _norm_vectors(self, name: str) -> Iterator[Vector]:
        if not name:
            return
        names = (name, f"{name}_after") if self.norm_placement == "both" else (name,)
        for each in names:
            yield from self._vectors_of_norm(each)

    def _vectors_of_norm(self, name: str) -> Iterator[Vector]:
        for kind in ("weight", "bias")[: NORM_VECTORS[self.norm]]:
            yield Vector(f"{name}.{kind}", (self.hidden_size,))

    def _attention_vectors(self, layer: Layer) -> Iterator[Vector]:
        if self.qk_norm and self.qk_norm_kind != "unit":
            norm_kind = self.qk_norm_kind
            for name, heads in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
                if name == "k_norm" and not layer.has_kv:
                    continue
                shape: tuple[int, ...] = (self.head_dim,)
                if norm_kind == "all":
                    shape = (heads * self.head_dim,)
                elif norm_kind == "layernorm_each":
                    shape = (heads, self.head_dim)
                is_divided = norm_kind in ("all", "layernorm_each")
                yield Vector(f"attention.{name}.weight", shape, is_divided=is_divided)
                if norm_kind == "layernorm":
                    yield Vector(f"attention.{name}.bias", shape)
        if self.mla:
            if self.mla.q_lora_rank:
                yield Vector("attention.q.norm.weight", (self.mla.q_lora_rank,))
            yield Vector("attention.kv_norm.weight", (self.mla.kv_lora_rank,))
            if (indexer := self.mla.indexer) and layer.has_indexer:
                for kind in ("weight", "bias"):
                    yield Vector(f"attention.index_norm.{kind}", (indexer.head_dim,))
        if self.has_sinks:
            yield Vector("attention.sinks", (self.num_heads,), is_divided=True)

    def _scan_vectors(self, layer: Layer) -> Iterator[Vector]:
        if layer.scan == "mamba" and (mamba := self.mamba):
            channels = mamba.conv_channels
            yield Vector("attention.ssm_conv.weight", (channels, mamba.conv_width), True)
            if mamba.conv_bias:
                yield Vector("attention.ssm_conv.bias", (channels,), True)
            for name in ("dt_bias", "A_log", "D"):
                yield Vector(f"attention.{name}", (mamba.num_heads,), True)
            if mamba.has_norm:
                yield Vector("attention.ssm_norm.weight", (mamba.inner,), True)
        elif layer.scan == "delta" and (delta := self.delta):
            channels = 2 * delta.keys + delta.values
            yield Vector("attention.conv.weight", (channels, delta.conv_width), True)
            for name in ("dt_bias", "A_log"):
                yield Vector(f"attention.{name}", (delta.num_value_heads,), True)
            yield Vector("attention.gate_norm.weight", (delta.value_dim,))
        elif layer.scan == "conv":
            yield Vector("attention.conv.weight", (self.hidden_size, self.conv_width), True)
            if self.conv_bias:
                yield Vector("attention.conv.bias", (self.hidden_size,), True)
        elif layer.scan == "lightning":
            width = self.num_heads * self.head_dim
            yield Vector("attention.gate_norm.weight", (width,), True)

    @property
    def activation_vectors(self) -> tuple[Vector, ...]:
        """Parameters of a dense MLP's activation."""
        names = ("alpha_p", "alpha_n") if self.activation == "xielu" else ()
        return tuple(Vector(f"ffn.activation.{name}", (1,)) for name in names)

    def _experts_vectors(self) -> Iterator[Vector]:
        moe = self.moe
        if moe and moe.router_bias:
            yield Vector("ffn.router_bias", (moe.num_experts,), is_trained=False)
        if moe and moe.has_norms:
            yield Vector("ffn.router_scale", (self.hidden_size,))
            yield Vector("ffn.expert_scale", (moe.num_experts,))
            for name in EXPERT_NORMS:
                yield from self._vectors_of_norm(f"ffn.{name}")

    def layer_matmul_params(self, layer: Layer = DENSE, *, active: bool = False) -> int:
        """Return the multiplied weights of a layer: no norms, no biases.

        active: of the routed experts only the top_k that one token meets; 2 FLOPs each
        per token forward.
        """
        return sum(
            linear.num_active if active else linear.num_weights
            for linear in self.linears(layer)
        )

    def layer_params(self, layer: Layer = DENSE, *, active: bool = False) -> int:
        """Return the parameters of a layer, including its norms."""
        total = sum(math.prod(vector.shape) for vector in self.vectors(layer))
        for linear in self.linears(layer):
            total += linear.num_active if active else linear.num_weights
            if linear.has_bias:
                total += linear.out * (linear.active if active else linear.copies)
        return total

    @property
    def mtp_layer(self) -> Layer:
        """The layer of a module of multi-token prediction: like the last one."""
        return self.layers[-1]

    @property
    def mtp_projection(self) -> Linear:
        """Product of the normed hidden state and the next token's normed embedding, joined."""
        return Linear("projection", self.hidden_size, 2 * self.hidden_size, "out")

    def mtp_params(self, *, active: bool = False) -> int:
        """Return the parameters of one module of multi-token prediction, three norms included.

        Embedding and head are the model's.
        """
        layer = self.layer_params(self.mtp_layer, active=active)
        return layer + self.mtp_projection.num_weights + 3 * self.norm_params

    @property
    def per_layer_projection(self) -> Linear:
        """Product of the embedding that is added to the second one; a norm follows it."""
        width = self.num_layers * self.per_layer_width
        return Linear("embedding.per_layer_projection", width, self.hidden_size)

    @property
    def head(self) -> Linear:
        """The output projection."""
        has_bias = "head" in self.biases
        return Linear("head", self.vocab_size, self.hidden_size, "out", has_bias)

    @property
    def head_params(self) -> int:
        """Weights of the output projection, whether separate or tied to the input table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_embedding_params(self) -> int:
        """Parameters that are only looked up: all tables, but the tokens' if it is tied."""
        table = 0 if self.tied_embeddings else self.head_params
        per_layer = self.vocab_size * self.num_layers * self.per_layer_width
        return table + self.max_positions * self.hidden_size + per_layer

    @property
    def num_params(self) -> int:
        """Return all stored parameters. A tied table counts once."""
        return self._count(active=False)

    @property
    def num_active_params(self) -> int:
        """Return the parameters of top_k and shared experts, and the whole embedding table."""
        return self._count(active=True)

    @property
    def num_active_matmul_params(self) -> int:
        """Weights that one token is multiplied with, the head included; FLOPs = 2 x this."""
        total = self.head_params * (1 + self.num_mtp_layers)
        for layer, count in self.all_layer_counts.items():
            total += count * self.layer_matmul_params(layer, active=True)
        total += self.per_layer_projection.num_weights
        return total + self.num_mtp_layers * self.mtp_projection.num_weights

    @property
    def all_layer_counts(self) -> "Counter[Layer]":
        """Number of layers of each kind, with those of multi-token prediction."""
        counts = self.layer_counts
        if self.num_mtp_layers:
            counts[self.mtp_layer] += self.num_mtp_layers
        return counts

    def _count(self, *, active: bool) -> int:
        total = self.num_embedding_params + self.norm_params + self.head_params
        total += self.norm_params * self.embedding_norm
        total += self.per_layer_projection.num_weights + self.per_layer_width  # its norm's
        total += self.vocab_size * ("head" in self.biases)
        for layer, count in self.layer_counts.items():
            total += count * self.layer_params(layer, active=active)
        return total + self.num_mtp_layers * self.mtp_params(active=active)

    def scaled(self, factor: Fraction, *, tp: int = 1) -> "ModelConfig":
        """Return the architecture with hidden, ffn, heads and vocabulary times `factor`.

        Layers, sequence length, experts and top_k stay. Heads keep the GQA ratio and divide
        by `tp`; where that needs more heads than the factor leaves, heads get narrower.
        """
        if not 0 < factor <= 1:
            raise ConfigError("scale", factor, "a fraction above 0 and at most 1")
        check_int("tp", tp)
        if factor == 1:
            return self
        scale = Scale(factor, tp)
        kv_heads = scale.heads(self.num_kv_heads)
        heads = kv_heads * (self.num_heads // self.num_kv_heads)
        scale = replace(scale, narrower=min(Fraction(1), self.num_heads * factor / heads))
        mla = self.mla and scale.mla(self.mla)
        head_dim = scale.head_width(self.head_dim)
        if mla:
            head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        square = self.hidden_size == self.num_heads * self.head_dim
        return replace(
            self._renamed(f"{self.name}@{factor}"),
            hidden_size=heads * head_dim if square else scale.width(self.hidden_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=self.value_head_dim and scale.head_width(self.value_head_dim),
            rotary_dim=self.rotary_dim and min(head_dim, scale.head_width(self.rotary_dim)),
            ffn_hidden_size=scale.width(self.ffn_hidden_size),
            vocab_size=scale.width(self.vocab_size),
            per_layer_width=scale.width(self.per_layer_width),
            pattern=tuple(map(scale.layer, self.pattern)),
            moe=self.moe and scale.moe(self.moe),
            mla=mla,
            delta=self.delta and scale.delta(self.delta),
            mamba=self.mamba and scale.mamba(self.mamba),
        )

    def _renamed(self, name: str) -> "ModelConfig":
        """Return the model under a name that has no published facts."""
        return replace(
            self, name=name, published_params=None, published_active_params=None, aliases=()
        )

    def with_layers(self, count: int) -> "ModelConfig":
        """Return the model with this many layers, one of experts at least if it has any."""
        if count == self.num_layers:
            return self
        moe = self.moe
        if moe and moe.first_dense_layers:
            if count == 1:
                allowed = f"at least 2, since {self.name} has both dense and MoE layers"
                raise ConfigError("num-layers", count, allowed)
            moe = replace(moe, first_dense_layers=min(moe.first_dense_layers, count - 1))
        renamed = self._renamed(f"{self.name}@{count}-layers")
        return replace(renamed, num_layers=count, moe=moe)

    def tiny(self) -> "ModelConfig":
        """Return the same architecture, small enough for a test on CPU: `--scale tiny`.

        It has two layers, or one of each kind.
        """
        scale = TinyScale(64, self.hidden_size)
        layers = (scale.layer(layer, self.head_dim) for layer in self.pattern)
        pattern = tuple(dict.fromkeys(layers))
        has_leading = self.moe is not None and self.moe.first_dense_layers > 0
        heads = 4
        return replace(
            self._renamed(f"{self.name}@tiny"),
            hidden_size=scale.hidden,
            num_layers=max(2, len(pattern) + (has_leading and len(pattern) > 1)),
            num_heads=heads,
            num_kv_heads=heads if self.mla else 2,
            head_dim=32 if self.mla else 16,
            value_head_dim=self.value_head_dim and 8,
            rotary_dim=self.rotary_dim and 8,
            ffn_hidden_size=self.ffn_hidden_size and scale.width(self.ffn_hidden_size),
            vocab_size=512,
            per_layer_width=self.per_layer_width and 16,
            seq_len=64,
            packing=self.packing and self.packing.scaled(64 / self.seq_len),
            max_positions=self.max_positions and 64,
            pattern=pattern,
            moe=self.moe and scale.moe(self.moe),
            mla=self.mla and scale.mla(self.mla),
            delta=self.delta and scale.delta(self.delta),
            mamba=self.mamba and scale.mamba(self.mamba),
        )


_FLAGS = (
    *("tied_embeddings", "qkv_bias", "attention_bias", "linear_bias", "qk_norm"),
    *(
        "conv_bias",
        "is_parallel",
        "shares_kv",
        "has_sinks",
        "embedding_norm",
        "v_norm",
        "layer_scale",
    ),
)
_KINDS = {
    "activation": Activation,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "qk_norm_kind": QkNorm,
    "gate": Gate,
}
_NUMBERS = (
    *("softcap", "logit_softcap", "attention_scale", "embedding_multiplier"),
    *("value_multiplier", "residual_multiplier", "logit_multiplier"),
)
_SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "seq_len",
)
_COUNTS = (
    *("ffn_hidden_size", "max_positions", "rotary_dim", "num_mtp_layers", "per_layer_width"),
    *("value_head_dim", "conv_width"),
)
# Fields of a layer that stand for the model's.
_OF_LAYER = (
    *("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "ffn_hidden_size", "shares_kv"),
)
EXPERT_NORMS = ("routed_norm", "routed_norm_after", "shared_norm_after")
# Weight and bias of a norm.
NORM_VECTORS: dict[str, int] = {
    "rmsnorm": 1,
    "layernorm": 2,
    "layernorm_no_bias": 1,
    "layernorm_no_weight": 0,
}
