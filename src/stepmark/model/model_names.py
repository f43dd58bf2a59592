"""Names that tell models apart. Files of different models may have one name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from stepmark.model.model import NO_IDENTITY, ModelConfig

# A sequence length is a field of its own in comparisons and tables.
_NOT_SHOWN = frozenset({"name", "seq_len", *NO_IDENTITY})
_WORDS = {
    "hidden_size": "hidden",
    "num_layers": "layers",
    "num_heads": "heads",
    "num_kv_heads": "KV heads",
    "head_dim": "head width",
    "ffn_hidden_size": "FFN",
    "vocab_size": "vocabulary",
    "max_positions": "positions",
    "moe.num_experts": "experts",
    "moe.top_k": "top-k",
    "moe.ffn_hidden_size": "expert FFN",
}


def architecture(model: ModelConfig) -> dict[str, object]:
    """Return what a model computes, by field: all but its name, source and sequence length."""
    return dict(_flat(model, ""))


def _flat(config: Any, prefix: str) -> Iterator[tuple[str, object]]:
    for field in fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if name in _NOT_SHOWN:
            continue
        if is_dataclass(value):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def distinct_names(models: Iterable[ModelConfig]) -> dict[ModelConfig, str]:
    """Return a name for each model: its own, with fields where others have it, too.

    Only as many fields follow as tell the models of one name apart: "m (hidden 128)".
    """
    by_name: dict[str, dict[ModelConfig, dict[str, object]]] = {}
    for model in models:
        by_name.setdefault(model.name, {})[model] = architecture(model)
    names: dict[ModelConfig, str] = {}
    for name, configs in by_name.items():
        shown = _telling(list(configs.values()))
        for model, config in configs.items():
            words = ", ".join(_worded(field, config) for field in shown)
            names[model] = f"{name} ({words})" if words else name
    return names


def _telling(configs: list[dict[str, object]]) -> list[str]:
    """Return the first fields by which all of these are told apart."""
    shown: list[str] = []
    num_apart = 1
    for field in dict.fromkeys(field for config in configs for field in config):
        keys = {tuple(config.get(name) for name in (*shown, field)) for config in configs}
        if len(keys) > num_apart:
            shown.append(field)
            num_apart = len(keys)
    return shown


def _worded(field: str, config: Mapping[str, object]) -> str:
    value = config.get(field)
    word = _WORDS.get(field, field.replace("_", " ").replace(".", " "))
    if isinstance(value, bool):
        return word if value else f"no {word}"
    return f"no {word}" if value is None else f"{word} {value}"
