"""A TOML file of a model: the fields of ModelConfig, as the files of data/models have them."""

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError, nearest
from stepmark.ground.read_text import read_whole
from stepmark.model.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.step.source_file import in_file, one_line

_MOST_BYTES = 2**20
_TABLES: dict[str, type[MoeConfig] | type[MlaConfig]] = {"moe": MoeConfig, "mla": MlaConfig}


def read_model(path: Path) -> ModelConfig:
    """Return the model of a file, named after it. Raises ConfigError."""
    data = read_whole(path, "model", _MOST_BYTES)
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", path, f"a TOML file ({one_line(str(error))})") from None
    with in_file(path):
        for name, kind in _TABLES.items():
            if name in table:
                own = table[name]
                if not isinstance(own, dict):
                    raise ConfigError(name, one_line(own), "a table of its widths")
                if name == "mla":
                    own = {"q_lora_rank": None, **own}  # TOML has no null
                table[name] = _made(kind, own, f"{name}.")
        table = {"name": path.stem, **table}
        for name in ("aliases", "unmodelled"):
            table[name] = tuple(map(str, table.get(name, ())))
        model: ModelConfig = _made(ModelConfig, table, "")
        return model


def _made(kind: type[Any], table: dict[str, Any], prefix: str) -> Any:
    """Return an object of these fields. Raises ConfigError for others and for missing ones."""
    known = {field.name: field for field in fields(kind)}
    for name, value in table.items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{prefix}{name}", one_line(value), hint)
    for name, field in known.items():
        if name not in table and field.default is MISSING:
            raise ConfigError(f"{prefix}{name}", "missing", "it is a required field")
    return kind(**table)
