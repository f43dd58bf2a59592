"""llm-train-bench's model configurations (JSON), as ModelConfig.

Two architectures: GPT (learned positions, LayerNorm, GELU, biases, a head tied to the token
table) and Llama (RMSNorm, rotary positions, SwiGLU, grouped heads, no biases, its own head).
Fields without an effect on shapes (rope_base, norm_eps) are ignored, as unknown ones are.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.core.model import ModelConfig
from stepmark.workload.formats.source_file import convert, one_line, read_json

Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Multiplier = Annotated[float, msgspec.Meta(gt=0, le=64)]

_ARCHITECTURES = ("gpt", "llama")
# Of a file that does not name its architecture, these are fields of Llama only.
_OF_LLAMA = ("n_kv_heads", "ffn_mult", "ffn_factor", "rope_base", "norm_eps")


class _Gpt(msgspec.Struct):
    n_layers: Size
    n_heads: Size
    d_embd: Size
    max_seq_len: Size
    vocab_size: Size


class _Llama(_Gpt, kw_only=True):
    n_kv_heads: Size
    d_hid: Size | None = None  # of the MLP; else from the next two
    ffn_mult: Multiplier | None = None
    ffn_factor: Size | None = None


def is_config(raw: object) -> bool:
    """Whether a JSON document is of this kind, by a field that no other kind has."""
    return isinstance(raw, dict) and "d_embd" in raw


def read_config(path: Path) -> ModelConfig:
    """The model that a file describes, called after the file. Raises ConfigError."""
    where = f"{path}: "
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}top level", one_line(raw), "an object")
    shapes = _llama(raw, where) if _architecture(raw, where) == "llama" else _gpt(raw, where)
    return ModelConfig(name=path.stem, source=str(path), **shapes)


def _architecture(raw: dict[str, object], where: str) -> str:
    named = raw.get("arch_name")
    if named is None:
        return "llama" if any(name in raw for name in _OF_LLAMA) else "gpt"
    if named not in _ARCHITECTURES:
        allowed = f"one of {', '.join(_ARCHITECTURES)}"
        raise ConfigError(f"{where}arch_name", one_line(named), allowed)
    return str(named)


def _gpt(raw: dict[str, object], where: str) -> dict[str, Any]:
    config = convert(raw, _Gpt, where)
    return _shared(config, where) | {
        "num_kv_heads": config.n_heads,
        "ffn_hidden_size": 4 * config.d_embd,
        "max_positions": config.max_seq_len,
        "activation": "gelu",
        "norm": "layernorm",
        "tied_embeddings": True,
        "linear_bias": True,
    }


def _llama(raw: dict[str, object], where: str) -> dict[str, Any]:
    config = convert(raw, _Llama, where)
    if config.n_heads % config.n_kv_heads:
        allowed = f"a divisor of n_heads={config.n_heads}"
        raise ConfigError(f"{where}n_kv_heads", config.n_kv_heads, allowed)
    return _shared(config, where) | {
        "num_kv_heads": config.n_kv_heads,
        "ffn_hidden_size": _ffn_width(config, where),
    }


def _shared(config: _Gpt, where: str) -> dict[str, Any]:
    if config.d_embd % config.n_heads:
        allowed = f"a multiple of n_heads={config.n_heads}"
        raise ConfigError(f"{where}d_embd", config.d_embd, allowed)
    return {
        "hidden_size": config.d_embd,
        "num_layers": config.n_layers,
        "num_heads": config.n_heads,
        "head_dim": config.d_embd // config.n_heads,
        "vocab_size": config.vocab_size,
        "seq_len": config.max_seq_len,
    }


def _ffn_width(config: _Llama, where: str) -> int:
    """Two thirds of 4 x d_embd, times ffn_mult, rounded up to a multiple of ffn_factor.

    Source: Llama 3's reference model, where these are ffn_dim_multiplier and multiple_of.
    """
    if config.d_hid is not None:
        return config.d_hid
    for name in ("ffn_mult", "ffn_factor"):
        if getattr(config, name) is None:
            raise ConfigError(f"{where}{name}", "missing", "it is a required field, or d_hid")
    assert config.ffn_mult is not None
    assert config.ffn_factor is not None
    width = int(config.ffn_mult * (8 * config.d_embd // 3))
    return -(-width // config.ffn_factor) * config.ffn_factor
