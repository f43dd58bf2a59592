"""The models that --model and --scale name: built-in ones by name, or files."""

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_head
from stepmark.model.model import ModelConfig, find_model
from stepmark.step import source_file
from stepmark.workloads.formats import benchmark_models, huggingface


def read_models(names: str | None, scale: str | None = None, tp: int = 1) -> list[ModelConfig]:
    """Return the models of a comma-separated list, scaled. Raises ConfigError.

    A file is a config.json of Hugging Face or llm-train-bench, or Primus' list of models.
    """
    models: list[ModelConfig] = []
    for name, file in _split_names(names):
        models += _reader_of(file)(file) if file else [find_model(name)]
    return [scaled(model, scale, tp) for model in models] if scale else models


def notes_of(models: Iterable[ModelConfig]) -> tuple[str, ...]:
    """Return what the step lacks of these models, each note once."""
    return tuple(dict.fromkeys(note for model in models for note in model.unmodelled))


def _split_names(names: str | None) -> Iterator[tuple[str, Path | None]]:
    """Yield the names of a list, each with the file that it is; None: a built-in model."""
    for name in filter(None, map(str.strip, (names or "").split(","))):
        path = Path(name)
        if path.is_dir():
            yield name, path / "config.json"
        else:
            yield name, path if path.suffix == ".json" else None


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


def _reader_of(file: Path) -> Callable[[Path], list[ModelConfig]]:
    """Return the reader of a file by its content. Raises ConfigError."""
    start = read_head(file, 4096, "model").lstrip()[:1]
    if start == b"[":
        return lambda file: list(benchmark_models.read_model_configs(file))
    if benchmark_models.is_config(source_file.read_json(file)):
        return lambda file: [benchmark_models.read_config(file)]
    return lambda file: [huggingface.read_config(file)]
