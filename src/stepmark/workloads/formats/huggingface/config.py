"""Hugging Face `config.json` of decoder-only families, as ModelConfig.

Only what changes shapes is read. `unmodelled` names the other keys that change a step.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError, nearest
from stepmark.ground.packages import install_command
from stepmark.ground.read_text import read_whole
from stepmark.model.model import ModelConfig
from stepmark.step.source_file import MAX_JSON_BYTES, one_line, parse_json, read_json
from stepmark.workloads.formats.huggingface.families import FAMILIES, NESTED
from stepmark.workloads.formats.huggingface.keys import Keys
from stepmark.workloads.formats.huggingface.notes import unmodelled
from stepmark.workloads.formats.huggingface.trace import transformers_version

# Our name of a field -> keys of files: a message names the one with the value, or one there.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head", "num_sliding_attention_heads"),
    "num_kv_heads": (
        *("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads"),
    ),
    "head_dim": ("head_dim", "global_head_dim", "hidden_size"),
    "ffn_hidden_size": ("intermediate_size",),
    "qkv_bias": ("attention_bias",),
    "linear_bias": ("mlp_bias",),
    "moe.num_experts": (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    "moe.top_k": (
        *("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
        "top_k_experts",
    ),
    "moe.first_dense_layers": ("first_k_dense_replace", "num_dense_layers"),
    "moe.num_groups": ("n_group",),
    "moe.top_groups": ("topk_group",),
    "delta.num_key_heads": ("linear_num_key_heads",),
    "delta.num_value_heads": ("linear_num_value_heads",),
    "mamba.num_heads": ("mamba_n_heads", "mamba_num_heads"),
    "mamba.num_groups": ("mamba_n_groups", "n_groups"),
}
_TEXT = "text_config"


def read_config(path: Path, as_family: str = "") -> ModelConfig:
    """Read the model that a Hugging Face config.json describes. Raise ConfigError.

    The model is named after the file's folder if the file is config.json. Of a model of
    several kinds of input it is the decoder of text. as_family: whose keys the file has, where
    its own model_type is of no family that is known.
    """
    return _config_of(path, as_family, read_whole(path, "file", MAX_JSON_BYTES))


@lru_cache(maxsize=8)  # a search of layouts reads a file for each of them
def _config_of(path: Path, as_family: str, data: bytes) -> ModelConfig:
    where = f"{path}: "
    raw = parse_json(path, data)
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}config", one_line(raw), "an object")
    keys = _of_text(Keys(raw, where))
    own_family = keys.text("model_type", default="")
    family = as_family or own_family
    if family not in FAMILIES:
        raise _unknown(keys, path, family)
    name = path.parent.name if path.name == "config.json" else path.stem
    facts: dict[str, Any] = {"name": name or family, "source": str(path)}
    try:
        fields = FAMILIES[family](keys)
        outer = {key: value for key, value in raw.items() if key != _TEXT}
        notes = unmodelled({**outer, **keys.raw}, keys.read)
        if family != own_family:
            notes.insert(0, f"model_type {one_line(own_family)} is read as {family}")
        notes += _absent_notes(keys)
        facts["unmodelled"] = tuple(f"{path}: {note}" for note in notes)
        context = keys.raw.get("max_position_embeddings")
        facts["max_context"] = context if isinstance(context, int) else 0
        return ModelConfig(**facts, **fields)
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        raw = {**keys.absent, **keys.raw}
        raise in_words_of_file(error, raw, keys.where, _NAMES) from None


def _absent_notes(keys: Keys) -> list[str]:
    """Return a note on the keys that the file leaves to its family, with their values."""
    absent = keys.absent
    off = [name for name, value in absent.items() if value is None or value is False]
    own = [f"{name} {one_line(absent[name])}" for name in absent if name not in off]
    parts = [", ".join(own), f"false or null: {', '.join(off)}" if off else ""]
    words = "; ".join(filter(None, parts))
    return [f"absent keys have the family's defaults: {words}"] if words else []


def _of_text(keys: Keys) -> Keys:
    """Return the keys of the decoder of text, which are inside for models that see, too."""
    outer = keys.text("model_type", default="")
    inner = keys.part(_TEXT)
    if inner is None:
        if outer in NESTED:
            return replace(keys, raw={**keys.raw, "model_type": NESTED[outer]})
        return keys
    family = inner.raw.get("model_type", NESTED.get(outer, outer))
    raw = {"tie_word_embeddings": keys.raw.get("tie_word_embeddings"), **inner.raw}
    if raw["tie_word_embeddings"] is None:
        del raw["tie_word_embeddings"]
    return Keys({**raw, "model_type": NESTED.get(str(family), family)}, inner.where, keys.read)


def is_unknown(path: Path) -> bool:
    """Return whether a config is of a family without a reader; False for any other file."""
    try:
        raw = read_json(path)
        keys = _of_text(Keys(raw, "")) if isinstance(raw, dict) else Keys({}, "")
        family = keys.text("model_type", default="")
    except ConfigError:
        return False
    return bool(family) and family not in FAMILIES


_SHOWN = 12  # families in a message


def _unknown(keys: Keys, path: Path, family: str) -> ConfigError:
    near = nearest(family, FAMILIES)
    first = ", ".join(list(FAMILIES)[:_SHOWN])
    known = f"did you mean {near[0]}?" if near else f"one of {len(FAMILIES)} ({first}, ...)"
    file = path.name
    install = "" if transformers_version() else f" ({install_command('huggingface')})"
    allowed = (
        f"{known}; {file}:{near[0] if near else 'FAMILY'} reads the file as that family's, and "
        f"stepmark workload generate --model {file} --framework fsdp through transformers"
        f"{install}; docs/howto/custom-models.md says more"
    )
    return ConfigError(f"{keys.where}model_type", family[:80] or "missing", allowed)


def in_words_of_file(
    error: ConfigError, raw: dict[str, object], where: str, names: Mapping[str, tuple[str, ...]]
) -> ConfigError:
    """Return a failed check of ModelConfig in the names and the value of the file."""
    part, _, own = error.field.rpartition(".")

    def key_of(word: str, value: str) -> str:
        keys = names.get(f"{part}.{word}") or names.get(word) or (word,)
        there = [key for key in keys if key in raw]
        return next((key for key in there if str(raw[key]) == value), (*there, *keys)[0])

    field = key_of(own, error.value)
    allowed = re.sub(
        r"(\w+)(=\w+)?",
        lambda word: key_of(word[1], (word[2] or "=")[1:]) + (word[2] or ""),
        error.allowed,
    )
    return ConfigError(f"{where}{field}", one_line(raw.get(field, error.value)), allowed)
