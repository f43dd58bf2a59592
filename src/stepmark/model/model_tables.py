"""Tables of models: the built-in ones, and files of the same form.

Facts of named models lie in `data/models/*.toml`, one file each, with their source.
`find_model` reads one of them; nothing is read on import.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError, nearest, not_one_of
from stepmark.model.layers import (
    DeltaConfig,
    IndexerConfig,
    Layer,
    MambaConfig,
    MlaConfig,
    MoeConfig,
)
from stepmark.model.model import ModelConfig

MODELS_DIR = Path(__file__).parents[1] / "data" / "models"


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
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    notes = table.pop("unmodelled", ())
    words = [f"{path.stem}: not modelled: {text}" for text in notes]
    return model_of_table(table | {"name": path.stem, "unmodelled": words})


def model_of_table(table: Mapping[str, Any]) -> ModelConfig:
    """Return the model of nested tables of fields. Raises ConfigError for wrong ones.

    pattern: a letter for each layer of the cycle; layer: what each letter stands for.
    """
    own = dict(table)
    for name in ("aliases", "unmodelled", "biases"):
        own[name] = tuple(map(str, own.get(name, ())))
    for name, kind in _PARTS.items():
        if name in own:
            own[name] = _part(kind, own[name], name)
    if "pattern" in own:
        own["pattern"] = _pattern(own["pattern"], own.pop("layer", None))
    model: ModelConfig = _made(ModelConfig, own, "")
    return model


_PARTS: dict[str, Any] = {
    "moe": MoeConfig,
    "mla": MlaConfig,
    "delta": DeltaConfig,
    "mamba": MambaConfig,
}


def _part(kind: type[Any], table: object, name: str) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(name, ascii(table), "a table of its widths")
    if kind is not MlaConfig:
        return _made(kind, table, f"{name}.")
    own = {"q_lora_rank": None, **table}  # TOML has no null
    if "indexer" in own:
        own["indexer"] = _part(IndexerConfig, own["indexer"], "mla.indexer")
    return _made(kind, own, f"{name}.")


def _pattern(letters: object, layers: object) -> tuple[Layer, ...]:
    """Return the layers that the letters of a pattern stand for."""
    if not isinstance(letters, str) or not letters:
        raise ConfigError("pattern", ascii(letters), "letters, each of a table layer.LETTER")
    if not isinstance(layers, dict):
        raise ConfigError("layer", ascii(layers), "a table of layers by letter")
    known = {name: _part(Layer, own, f"layer.{name}") for name, own in layers.items()}
    for letter in letters:
        if letter not in known:
            raise ConfigError("pattern", letters[:80], f"of letters {', '.join(known)}")
    return tuple(known[letter] for letter in letters)


def _made(kind: type[Any], table: Mapping[str, Any], prefix: str) -> Any:
    """Return an object of these fields. Raises ConfigError for others and for missing ones."""
    known = {field.name: field for field in fields(kind)}
    for name, value in table.items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{prefix}{name}", ascii(value)[:80], hint)
    for name, field in known.items():
        if name not in table and field.default is MISSING:
            raise ConfigError(f"{prefix}{name}", "missing", "it is a required field")
    return kind(**table)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])


def params_text(model: ModelConfig) -> str:
    """Return e.g. "124 M parameters" or "30.5 B parameters (3.35 B active)"."""
    count, active = (
        f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
        for number in (model.num_params, model.num_active_params)
    )
    return f"{count} parameters ({active} active)" if model.moe else f"{count} parameters"
