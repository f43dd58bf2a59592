"""The models that --model and --scale name: built-in ones by name, or files."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.read_text import read_head
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.step import source_file
from stepmark.workloads.formats import benchmark_models, model_toml
from stepmark.workloads.formats.huggingface import config
from stepmark.workloads.formats.huggingface.families import FAMILIES


def read_models(names: str | None, scale: str | None = None, tp: int = 1) -> list[ModelConfig]:
    """Return the models of a comma-separated list, scaled. Raises ConfigError.

    A file is a config of Hugging Face or llm-train-bench, Primus' list of models, a TOML file
    of a model such as those of data/models, or a framework's file, of which the rest is unread.
    FILE:FAMILY is a config of Hugging Face that is read as another family's.
    """
    models: list[ModelConfig] = []
    for name, file in _split_names(names):
        config_file, family = split_family(name)
        if family:
            models.append(config.read_config(config_file, family))
        else:
            models += _reader_of(file, tp)(file) if file else [find_model(name)]
    return [scaled(model, scale, tp) for model in models] if scale else models


def notes_of(models: Iterable[ModelConfig]) -> tuple[str, ...]:
    """Return what the step lacks of these models, each note once."""
    return tuple(dict.fromkeys(note for model in models for note in model.unmodelled))


def _split_names(names: str | None) -> Iterator[tuple[str, Path | None]]:
    """Yield the names of a list, each with the file that it is; None: a built-in model."""
    for name in filter(None, map(str.strip, (names or "").split(","))):
        path = Path(name)
        if split_family(name)[1]:
            yield name, path
        elif path.is_dir():
            yield name, path / "config.json"
        else:
            is_file = path.suffix in (".json", ".toml") or is_model_file(path)
            yield name, path if is_file or _is_framework_file(path) else None


def split_family(name: str) -> tuple[Path, str]:
    """Split FILE:FAMILY into a config's path and the family; empty: the file's own."""
    text, colon, family = name.rpartition(":")
    path = Path(text)
    if not colon or Path(name).exists() or not (path.suffix == ".json" or path.is_dir()):
        return Path(name), ""
    if family not in FAMILIES:
        raise not_one_of(f"{name}: family", family, FAMILIES)
    return (path / "config.json" if path.is_dir() else path), family


def unknown_config(name: str) -> Path | None:
    """Return the config that a name is, if it is of a family without a reader."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return (
        path if path.suffix == ".json" and path.is_file() and config.is_unknown(path) else None
    )


def is_file(name: str) -> bool:
    """Return whether a model is read from a file of this name, and not a built-in one."""
    return any(file for _, file in _split_names(name))


def _is_framework_file(path: Path) -> bool:
    if not path.is_file():
        return False
    from stepmark.framework_files import configuration  # noqa: PLC0415 - 10 ms

    return configuration.is_framework_file(str(path))


def is_model_file(path: Path) -> bool:
    """Return whether a file describes a model, by its content."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return False
        text = read_head(path, _MOST_BYTES, "model").decode()
        if path.suffix == ".toml":
            return tomllib.loads(text).keys() >= _WIDTHS
        content = json_text.decode(text) if text.lstrip()[:1] == "{" else None
    except (ConfigError, OSError, ValueError):
        return False
    if not isinstance(content, dict):
        return False
    return not _HUGGING_FACE.isdisjoint(content) or benchmark_models.is_config(content)


_MOST_BYTES = 2**20  # the largest real file of this kind has about 100 kB
_WIDTHS = {"num_layers", "hidden_size"}
_HUGGING_FACE = {"model_type", "architectures"}


def scaled(model: ModelConfig, scale: str, tp: int = 1) -> ModelConfig:
    """Return the model as --scale says: tiny, or a fraction of its widths."""
    return model.tiny() if scale == "tiny" else model.scaled(factor(scale), tp=tp)


def factor(scale: str) -> Fraction:
    """Return --scale as a fraction above 0 and at most 1."""
    try:
        value = Fraction(scale)
    except (ValueError, ZeroDivisionError):
        raise ConfigError("scale", scale, "a fraction such as 1/64, or tiny") from None
    if not 0 < value <= 1:
        raise ConfigError("scale", scale, "above 0 and at most 1")
    return value


def _reader_of(file: Path, tp: int) -> Callable[[Path], list[ModelConfig]]:
    """Return the reader of a file by its content. Raises ConfigError."""
    if not is_model_file(file) and _is_framework_file(file):
        return lambda file: [_framework_model(file, tp)]
    if file.suffix == ".toml":
        return lambda file: [model_toml.read_model(file)]
    start = read_head(file, 4096, "model").lstrip()[:1]
    if start == b"[":
        return lambda file: list(benchmark_models.read_model_configs(file))
    if benchmark_models.is_config(source_file.read_json(file)):
        return lambda file: [benchmark_models.read_config(file)]
    return lambda file: [config.read_config(file)]


def _framework_model(file: Path, tp: int) -> ModelConfig:
    from stepmark.workloads import configured  # noqa: PLC0415 - which imports this module

    return configured.model_of(str(file), tp)
