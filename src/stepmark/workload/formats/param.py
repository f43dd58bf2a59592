"""PARAM's operator configuration: { "torch.mm": { "config": [ { "input": [...] } ] } }.

Source of the format: facebookresearch/param, train/compute/python/README.md. Each input is a
list of argument specifications; `__range__` macros are expanded, `__copy__` ties one dimension
to another. Operators that we do not have are named, not dropped.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepmark.core.dtypes import parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Bmm, Gemm, Layout, Op

_MAX_BYTES = 16 * 2**20


class _Input(msgspec.Struct):
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class _Config(msgspec.Struct):
    input: list[_Input]
    build: list[Any] = []


class _Operator(msgspec.Struct):
    config: list[_Config]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamConfig:
    """The operators of the file that we have, and the names of those we lack."""

    ops: tuple[tuple[str, Op], ...]
    lacking: tuple[str, ...]


def read_config(path: Path) -> ParamConfig:
    """Raises ConfigError, one line, for anything that is not such a file."""
    if "\0" in str(path):
        raise ConfigError("config", path, "a readable file (NUL in its name)")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError("config", path, "a file of at most 16 MiB")
        operators = msgspec.json.decode(path.read_bytes(), type=dict[str, _Operator])
    except OSError as error:
        raise ConfigError("config", path, f"a readable file ({error.strerror})") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error) or "nested too deep"
        raise ConfigError("config", path, f"a PARAM operator config ({reason})") from None
    ops: list[tuple[str, Op]] = []
    lacking = []
    for name, operator in operators.items():
        if name not in _BUILD:
            lacking.append(name)
            continue
        for config in operator.config:
            for item in config.input:
                ops += [(name, op) for op in _ops(name, item, path)]
    return ParamConfig(ops=tuple(ops), lacking=tuple(lacking))


def _ops(name: str, item: _Input, path: Path) -> Iterator[Op]:
    where = f"config {path.name}: {name}"
    shapes, dtypes = [], []
    for index, argument in enumerate(item.args):
        if not isinstance(argument, dict) or argument.get("type") != "tensor":
            raise ConfigError(f"{where}: args[{index}]", argument, "a tensor specification")
        shape = argument.get("shape")
        if not isinstance(shape, list) or not shape:
            raise ConfigError(f"{where}: args[{index}].shape", shape, "a list of dimensions")
        shapes.append([_values(where, value) for value in shape])
        dtypes.append(str(argument.get("dtype", "float")))
    if len(shapes) != 2:
        raise ConfigError(f"{where}: args", f"{len(shapes)} tensors", "two tensors")
    flat = [*shapes[0], *shapes[1]]
    choices = itertools.product(*flat)
    for number, dims in enumerate(choices):
        if number >= 100_000:
            raise ConfigError(f"{where}: shape", "__range__", "at most 100000 combinations")
        first, second = list(dims[: len(shapes[0])]), list(dims[len(shapes[0]) :])
        try:
            yield _BUILD[name](where, first, second, dtypes[0])
        except ConfigError as error:
            if error.field.startswith(where):
                raise
            raise ConfigError(
                f"{where}: shape", f"{first} x {second}", f"it has a bad size: {error}"
            ) from None


def _values(where: str, value: object) -> list[int]:
    """One dimension: a number, or a macro ["__range__", low, high, step]."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if (
        isinstance(value, list)
        and len(value) == 4
        and value[0] == "__range__"
        and all(isinstance(item, int) and item > 0 for item in value[1:])
        and value[1] <= value[2]
    ):
        return list(range(value[1], min(value[2] + 1, value[1] + 100_001 * value[3]), value[3]))
    raise ConfigError(f"{where}: shape", value, "a number or [__range__, low, high, step]")


def _gemm(where: str, first: list[int], second: list[int], dtype: str) -> Op:
    if len(first) != 2 or len(second) != 2 or first[1] != second[0]:
        raise ConfigError(f"{where}: shape", f"{first} x {second}", "[m, k] x [k, n]")
    kind = parse_dtype(dtype, f"{where}: dtype")
    return Gemm(m=first[0], n=second[1], k=first[1], dtype=kind, layout=Layout.NN)


def _bmm(where: str, first: list[int], second: list[int], dtype: str) -> Op:
    fits = len(first) == len(second) == 3 and first[0] == second[0] and first[2] == second[1]
    if not fits:
        raise ConfigError(f"{where}: shape", f"{first} x {second}", "[b, m, k] x [b, k, n]")
    kind = parse_dtype(dtype, f"{where}: dtype")
    return Bmm(
        batch=first[0], m=first[1], n=second[2], k=first[2], dtype=kind, layout=Layout.NN
    )


_BUILD = {"torch.mm": _gemm, "torch.matmul": _gemm, "torch.bmm": _bmm}
