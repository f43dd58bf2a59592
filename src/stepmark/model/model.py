"""Unsharded transformer: widths, parameter counts, and the built-in models.

Facts of named models lie in `data/models/*.toml`, one file each, with their source.
`find_model` reads one of them; nothing is read on import.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from stepmark.ground.errors import ConfigError, nearest, not_one_of

Activation = Literal["swiglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]

MODELS_DIR = Path(__file__).parents[1] / "data" / "models"

# Widths stay multiples of this when a model is scaled: FP8 matrix units need 16.
_GRAIN = 16
_TOO_LARGE = 2**31
# Fields that say where a model is from, not what it computes.
NO_IDENTITY = (
    *("source", "aliases", "published_params", "published_active_params"),
    "unmodelled",
)


def _check_int(field: str, value: object, low: int = 1, high: int = _TOO_LARGE - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, value, f"an integer from {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The feed-forward part of a mixture-of-experts layer. Experts have no biases."""

    num_experts: int  # routed
    top_k: int  # routed experts per token
    ffn_hidden_size: int  # of one routed expert
    num_shared_experts: int = 0  # every token uses them
    shared_ffn_hidden_size: int = 0  # all shared experts together
    first_dense_layers: int = 0  # leading layers with an ordinary MLP
    router_bias: bool = False  # one per expert: DeepSeek-V3's e_score_correction_bias

    def __post_init__(self) -> None:
        _check_int("moe.num_experts", self.num_experts)
        _check_int("moe.top_k", self.top_k)
        _check_int("moe.ffn_hidden_size", self.ffn_hidden_size)
        for name in ("num_shared_experts", "shared_ffn_hidden_size", "first_dense_layers"):
            _check_int(f"moe.{name}", getattr(self, name), low=0)
        if not isinstance(self.router_bias, bool):
            raise ConfigError("moe.router_bias", self.router_bias, "true or false")
        if self.top_k > self.num_experts:
            raise ConfigError(
                "moe.top_k", self.top_k, f"at most num_experts={self.num_experts}"
            )
        if bool(self.num_shared_experts) != bool(self.shared_ffn_hidden_size):
            raise ConfigError(
                "moe.shared_ffn_hidden_size",
                self.shared_ffn_hidden_size,
                f"positive with shared experts, else 0 (num_shared_experts="
                f"{self.num_shared_experts})",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "q_lora_rank" or value is not None:
                _check_int(f"mla.{each.name}", value)


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

    @property
    def num_weights(self) -> int:
        return self.copies * self.out * self.width

    @property
    def num_active(self) -> int:
        return self.active * self.out * self.width


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
    qk_norm: bool = False  # RMSNorm over head_dim, one weight for q and one for k
    max_positions: int = 0  # rows of a learned position table; 0 = rope
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    source: str = ""
    published_params: int | None = None  # exact where a checkpoint tells, else as announced
    published_active_params: int | None = None
    aliases: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = field(default=(), compare=False)  # notes for the reader

    def __post_init__(self) -> None:
        self._check_fields()
        num_dense = self.moe.first_dense_layers if self.moe else self.num_layers
        mla = self.mla
        latent_dim = 0
        if mla:
            latent_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        rules: tuple[tuple[str, int, bool, str], ...] = (
            (
                "num_heads",
                self.num_heads,
                self.num_heads % self.num_kv_heads == 0,
                f"a multiple of num_kv_heads={self.num_kv_heads}",
            ),
            (
                "seq_len",
                self.seq_len,
                not self.max_positions or self.seq_len <= self.max_positions,
                f"at most max_positions={self.max_positions}",
            ),
            (
                "moe.first_dense_layers",
                num_dense,
                num_dense <= self.num_layers,
                f"at most num_layers={self.num_layers}",
            ),
            (
                "ffn_hidden_size",
                self.ffn_hidden_size,
                self.ffn_hidden_size > 0 or not num_dense,
                "positive where a layer is dense",
            ),
            (
                "linear_bias",
                self.linear_bias,
                not (self.moe and self.linear_bias),
                "false for MoE models",
            ),
            (
                "num_kv_heads",
                self.num_kv_heads,
                not mla or self.num_kv_heads == self.num_heads,
                f"num_heads={self.num_heads} with mla",
            ),
            (
                "head_dim",
                self.head_dim,
                not mla or self.head_dim == latent_dim,
                "qk_nope_head_dim + qk_rope_head_dim with mla",
            ),
            *(
                (name, getattr(self, name), not (mla and getattr(self, name)), "false with mla")
                for name in ("qkv_bias", "linear_bias", "qk_norm")
            ),
        )
        for name, value, is_valid, allowed in rules:
            if not is_valid:
                raise ConfigError(name, value, allowed)

    def _check_fields(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("name", self.name, "a name")
        for name in _SIZES:
            _check_int(name, getattr(self, name))
        for name in ("ffn_hidden_size", "max_positions"):
            _check_int(name, getattr(self, name), low=0)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "true or false")
        for name, kind in (("activation", Activation), ("norm", Norm)):
            value = getattr(self, name)
            allowed = get_args(kind)
            if value not in allowed:
                raise not_one_of(name, value, allowed)

    @property
    def d_qk(self) -> int:
        """Width of one query and one key head."""
        return self.head_dim

    @property
    def d_v(self) -> int:
        """Width of one value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.moe.first_dense_layers if self.moe else 0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def norm_params(self) -> int:
        """One RMSNorm (weight) or LayerNorm (weight and bias) over the hidden width."""
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    def linears(self, moe: bool = False) -> tuple[Linear, ...]:
        """Return the weights of one dense or MoE layer in the order of their products.

        Names are those of the step that `stepmark train` runs, which has q, k and v in one.
        """
        return (*self._attention_linears(), *self._ffn_linears(moe))

    def _attention_linears(self) -> Iterator[Linear]:
        hidden = self.hidden_size
        heads = self.num_heads
        has_bias = self.attention_bias or self.linear_bias
        out = Linear("attention.out", hidden, heads * self.d_v, "in", has_bias)
        if self.mla is None:
            rows = self.head_dim * (heads + 2 * self.num_kv_heads)
            yield Linear("attention.qkv", rows, hidden, "out", has_bias or self.qkv_bias)
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
        yield from (Linear("attention.kv_up", rows, mla.kv_lora_rank, "out"), out)

    def _ffn_linears(self, moe: bool) -> Iterator[Linear]:
        if not moe or self.moe is None:
            yield from self._mlp("ffn.", self.ffn_hidden_size)
            return
        experts = self.moe
        yield Linear("ffn.router", experts.num_experts, self.hidden_size)
        for linear in self._mlp("ffn.held.", experts.ffn_hidden_size):
            yield replace(
                linear, copies=experts.num_experts, active=experts.top_k, is_routed=True
            )
        if experts.num_shared_experts:
            yield from self._mlp("ffn.shared.", experts.shared_ffn_hidden_size)

    def _mlp(self, prefix: str, width: int) -> Iterator[Linear]:
        hidden = self.hidden_size
        bias = self.linear_bias
        for name in ("gate", "up") if self.activation == "swiglu" else ("up",):
            yield Linear(prefix + name, width, hidden, "out", bias)
        yield Linear(f"{prefix}down", hidden, width, "in", bias)

    def layer_matmul_params(self, moe: bool = False, *, active: bool = False) -> int:
        """Return the multiplied weights of one dense or MoE layer: no norms, no biases.

        active: of the routed experts only the top_k that one token meets; 2 FLOPs each
        per token forward.
        """
        return sum(
            linear.num_active if active else linear.num_weights for linear in self.linears(moe)
        )

    def layer_params(self, moe: bool = False, *, active: bool = False) -> int:
        """Return the parameters of one dense or MoE layer, including its two norms."""
        total = self.layer_matmul_params(moe, active=active) + 2 * self.norm_params
        total += sum(linear.out for linear in self.linears(moe) if linear.has_bias)
        if self.qk_norm:
            total += 2 * self.head_dim
        if self.mla:
            total += self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0)
        if moe and self.moe and self.moe.router_bias:
            total += self.moe.num_experts
        return total

    @property
    def head_params(self) -> int:
        """Parameters of the output projection, whether separate or tied to the input table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_embedding_params(self) -> int:
        """Parameters that are only looked up: positions, and the token table unless tied."""
        table = 0 if self.tied_embeddings else self.head_params
        return table + self.max_positions * self.hidden_size

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
        dense = self.num_dense_layers * self.layer_matmul_params()
        moe = self.num_moe_layers * self.layer_matmul_params(moe=True, active=True)
        return dense + moe + self.head_params

    def _count(self, *, active: bool) -> int:
        layers = self.num_dense_layers * self.layer_params()
        if self.num_moe_layers:
            layers += self.num_moe_layers * self.layer_params(moe=True, active=active)
        return self.num_embedding_params + layers + self.norm_params + self.head_params

    def scaled(self, factor: Fraction, *, tp: int = 1) -> "ModelConfig":
        """Return the architecture with hidden, ffn, heads and vocabulary times `factor`.

        Layers, sequence length, experts and top_k stay. Heads keep the GQA ratio and divide
        by `tp`; where that needs more heads than the factor leaves, heads get narrower.
        """
        if not 0 < factor <= 1:
            raise ConfigError("scale", factor, "a fraction above 0 and at most 1")
        _check_int("tp", tp)
        if factor == 1:
            return self

        def times(value: int, share: Fraction = factor, grain: int = _GRAIN * tp) -> int:
            return max(1, round(value * share / grain)) * grain if value else 0

        kv_heads = times(self.num_kv_heads, grain=tp)
        heads = kv_heads * (self.num_heads // self.num_kv_heads)
        narrower = min(Fraction(1), self.num_heads * factor / heads)

        def head_width(value: int) -> int:
            return value if narrower == 1 else times(value, narrower, _GRAIN)

        mla = self.mla and replace(
            self.mla,
            q_lora_rank=self.mla.q_lora_rank and times(self.mla.q_lora_rank, grain=_GRAIN),
            kv_lora_rank=times(self.mla.kv_lora_rank, grain=_GRAIN),
            qk_nope_head_dim=head_width(self.mla.qk_nope_head_dim),
            qk_rope_head_dim=head_width(self.mla.qk_rope_head_dim),
            v_head_dim=head_width(self.mla.v_head_dim),
        )
        head_dim = (
            mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else head_width(self.head_dim)
        )
        square = self.hidden_size == self.num_heads * self.head_dim
        moe = self.moe and replace(
            self.moe,
            ffn_hidden_size=times(self.moe.ffn_hidden_size),
            shared_ffn_hidden_size=times(self.moe.shared_ffn_hidden_size),
        )
        return replace(
            self,
            name=f"{self.name}@{factor}",
            hidden_size=heads * head_dim if square else times(self.hidden_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_hidden_size=times(self.ffn_hidden_size),
            vocab_size=times(self.vocab_size),
            moe=moe,
            mla=mla,
            published_params=None,
            published_active_params=None,
            aliases=(),
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
        return replace(
            self,
            name=f"{self.name}@{count}-layers",
            num_layers=count,
            moe=moe,
            published_params=None,
            published_active_params=None,
            aliases=(),
        )

    def tiny(self) -> "ModelConfig":
        """Return the same architecture, small enough for a test on CPU: `--scale tiny`."""
        hidden = 64
        heads = 4
        layers = 2

        def width(value: int) -> int:
            return max(1, round(Fraction(value * hidden, self.hidden_size * _GRAIN))) * _GRAIN

        mla = moe = None
        if self.mla:
            mla = MlaConfig(
                q_lora_rank=self.mla.q_lora_rank and 32,
                kv_lora_rank=16,
                qk_nope_head_dim=16,
                qk_rope_head_dim=16,
                v_head_dim=16,
            )
        if self.moe:
            shared = min(1, self.moe.num_shared_experts)
            moe = replace(
                self.moe,
                num_experts=4,
                top_k=min(2, self.moe.top_k),
                ffn_hidden_size=width(self.moe.ffn_hidden_size),
                num_shared_experts=shared,
                shared_ffn_hidden_size=shared * width(self.moe.ffn_hidden_size),
                first_dense_layers=min(1, self.moe.first_dense_layers),
            )
        return replace(
            self,
            name=f"{self.name}@tiny",
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if mla else 2,
            head_dim=32 if mla else 16,
            ffn_hidden_size=self.ffn_hidden_size and width(self.ffn_hidden_size),
            vocab_size=512,
            seq_len=64,
            max_positions=self.max_positions and 64,
            moe=moe,
            mla=mla,
            published_params=None,
            published_active_params=None,
            aliases=(),
        )


_FLAGS = ("tied_embeddings", "qkv_bias", "attention_bias", "linear_bias", "qk_norm")
_SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "seq_len",
)


def find_model(name: str) -> ModelConfig:
    """Return a built-in model by name or alias; case, punctuation and "org/" do not matter.

    Raise ConfigError for an unknown name, with similar names.
    """
    key = _key(name)
    for path in _model_files():
        if _key(path.stem) == key:
            return _load(path)
    for model in load_models().values():
        if key in map(_key, model.aliases):
            return model
    names = {_key(n): m.name for m in load_models().values() for n in (m.name, *m.aliases)}
    if close := dict.fromkeys(names[key] for key in nearest(key, names, most=8)):
        raise ConfigError("model", name, f"did you mean {' or '.join(list(close)[:3])}?")
    raise not_one_of("model", name, load_models())


@cache
def load_models() -> dict[str, ModelConfig]:
    """Return every built-in model by its name, in alphabetical order."""
    return {path.stem: _load(path) for path in _model_files()}


@cache
def _model_files() -> tuple[Path, ...]:
    return tuple(sorted(MODELS_DIR.glob("*.toml")))


@cache
def _load(path: Path) -> ModelConfig:
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    moe = table.pop("moe", None)
    mla = table.pop("mla", None)
    if mla:
        mla.setdefault("q_lora_rank", None)  # TOML has no null
    return ModelConfig(
        name=path.stem,
        moe=MoeConfig(**moe) if moe else None,
        mla=MlaConfig(**mla) if mla else None,
        aliases=tuple(table.pop("aliases", ())),
        unmodelled=tuple(
            f"{path.stem}: not modelled: {text}" for text in table.pop("unmodelled", ())
        ),
        **table,
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])
