"""A framework's file, told by its content, as options of ours."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.framework_files import (
    accelerate,
    deepspeed,
    megatron,
    nemo,
    shell,
    torchtitan,
)
from stepmark.framework_files.table import Keys, Table, Translation, flat, text_of
from stepmark.framework_files.yaml_text import read_yaml
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole

_MAX_BYTES = 2**20
_TORCHTITAN = ("job", "model", "training", "parallelism", "activation_checkpoint", "optimizer")
_NEMO = ("trainer", "train")
_DEEPSPEED = (
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "bf16", "fp16"),
)
_NO_PROGRAM = {"program": "none is named"}
_ARGUMENTS = ("--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file: its table, and its keys from what the file holds."""

    table: Table
    is_one: Callable[[Any], bool]
    keys: Callable[[Any, str], Keys]


def _has_arguments(content: object) -> bool:
    return isinstance(content, str) and any(name in content for name in _ARGUMENTS)


def _has_tables(content: object, names: tuple[str, ...]) -> bool:
    """Return whether it has two of these tables at least."""
    tables = content if isinstance(content, dict) else {}
    return sum(isinstance(tables.get(name), dict) for name in names) > 1


def _is_megatron_yaml(content: object) -> bool:
    return isinstance(content, dict) and (
        "MODEL_ARGS" in content or any(str(key).startswith("--") for key in content)
    )


def _megatron_keys(content: Any, where: str) -> Keys:
    if isinstance(content, str):
        programs: list[str] = []
        words = shell.training_words(content, where, megatron.IDLE, programs.append)
        for program in programs:
            megatron.check_program(program)
        if not words:
            allowed = "a script that starts a Python file with arguments, or these arguments"
            raise ConfigError(where, "without a training", allowed)
        return megatron.keys_of_words(words, where) | ({} if programs else _NO_PROGRAM)
    arguments = content.get("MODEL_ARGS", content)
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: MODEL_ARGS", text_of(arguments), "arguments with values")
    if arguments is not content:
        for name in content:
            if str(name).startswith("--"):
                raise ConfigError(f"{where}: {name}", "outside", "one of MODEL_ARGS")
    keys = dict(_NO_PROGRAM)
    for name, value in arguments.items():
        key = str(name).removeprefix("--")
        if key in keys:
            raise ConfigError(f"{where}: {key}", text_of(value), "given once")
        text = text_of(value)
        keys[key] = text.replace(",", " ") if isinstance(value, list) else text
    return keys


def _flat_keys(content: Any, where: str) -> Keys:
    return dict(flat(content))


def _keys_with_deepspeed(content: Any, where: str) -> Keys:
    """Return the keys, and those of the DeepSpeed file that they name, if it is there."""
    keys = _flat_keys(content, where)
    name = keys.get("deepspeed_config.deepspeed_config_file", "")
    folder = Path(where).parent
    for path in (folder / name, folder / Path(name).name):
        recognized = _recognized(path) if name else None
        if recognized and recognized[0].table is deepspeed.TABLE:
            del keys["deepspeed_config.deepspeed_config_file"]
            return keys | _flat_keys(recognized[1], str(path))
    return keys


def _has_any(content: object, names: tuple[str, ...]) -> bool:
    return isinstance(content, dict) and any(name in content for name in names)


def _distributed(content: object) -> str:
    """Return how accelerate distributes a job; "" for a file of other kinds."""
    if not _has_any(content, ("distributed_type",)) or not isinstance(content, dict):
        return ""
    return str(content["distributed_type"]).upper()


KINDS: Mapping[str, Kind] = {
    "megatron-args": Kind(
        table=megatron.TABLE,
        is_one=lambda content: _has_arguments(content) or _is_megatron_yaml(content),
        keys=_megatron_keys,
    ),
    "torchtitan": Kind(
        table=torchtitan.TABLE,
        is_one=lambda content: (
            _has_tables(content, _TORCHTITAN) and not _has_any(content, _NEMO)
        ),
        keys=_flat_keys,
    ),
    "deepspeed": Kind(
        table=deepspeed.TABLE,
        is_one=lambda content: (
            _has_any(content, _DEEPSPEED)
            and not _has_any(content, ("model_type", "architectures", "distributed_type"))
        ),
        keys=_flat_keys,
    ),
    "nemo": Kind(
        table=nemo.TABLE,
        is_one=lambda content: (
            _has_tables(content, ("trainer", "train", "model")) and _has_any(content, _NEMO)
        ),
        keys=_flat_keys,
    ),
    "accelerate": Kind(
        table=accelerate.FSDP_TABLE,
        is_one=lambda content: _distributed(content) not in ("", "DEEPSPEED"),
        keys=_flat_keys,
    ),
    "accelerate with deepspeed": Kind(
        table=accelerate.WITH_DEEPSPEED_TABLE,
        is_one=lambda content: _distributed(content) == "DEEPSPEED",
        keys=_keys_with_deepspeed,
    ),
}


def is_framework_file(name: str | None) -> bool:
    """Return whether a name is that of a file of one of these kinds."""
    return bool(name) and _recognized(Path(str(name))) is not None


def framework_of(name: str) -> str:
    """Return the framework of a file, by its rules' name. Raises ConfigError."""
    return _kind_of(Path(name))[0].table.framework


def read(name: str) -> Translation:
    """Return a framework's file as options. Raises ConfigError."""
    path = Path(name)
    kind, content = _kind_of(path)
    return kind.table.read(kind.keys(content, str(path)), str(path))


def _kind_of(path: Path) -> tuple[Kind, object]:
    recognized = _recognized(path)
    if recognized is None:
        read_whole(path, "config", _MAX_BYTES)  # may say more
        raise ConfigError("config", path, f"a file of one of these: {', '.join(KINDS)}")
    return recognized


def _recognized(path: Path) -> tuple[Kind, object] | None:
    """Return the kind and the content of a file; None for any other file, or none."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        data = read_whole(path, "config", _MAX_BYTES)
        text = data.decode("utf-8")
    except (ConfigError, OSError, ValueError):
        return None
    if b"\0" in data:
        return None
    for content in _contents(path, text):
        for kind in KINDS.values():
            if kind.is_one(content):
                return kind, content
    return None


def _contents(path: Path, text: str) -> list[object]:
    """Return what a text may hold: JSON, TOML or YAML; else the text itself."""
    start = text.lstrip()[:1]
    try:
        if start == "{":
            return [json_text.decode(text)]
        if path.suffix in (".yaml", ".yml"):
            return [read_yaml(text, path)]
        if path.suffix == ".toml":
            return [tomllib.loads(text)]
    except (ValueError, RecursionError):
        return []
    return [text]
