"""A TOML file of a model: the fields of ModelConfig, as the files of data/models have them."""

import tomllib
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import model_of_table
from stepmark.step.source_file import in_file, one_line

_MOST_BYTES = 2**20


def read_model(path: Path) -> ModelConfig:
    """Return the model of a file, named after it. Raises ConfigError."""
    data = read_whole(path, "model", _MOST_BYTES)
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", path, f"a TOML file ({one_line(str(error))})") from None
    with in_file(path):
        return model_of_table({"name": path.stem, **table})
