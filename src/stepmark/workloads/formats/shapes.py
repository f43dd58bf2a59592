"""Lists of operators: our own shapes, and PARAM's operator configuration.

Ours is a JSON array of objects whose keys are an operator's fields; an object may also have
`model`, `role` and `mbs`, which become columns. PARAM's (facebookresearch/param,
train/compute/python/README.md) is { "torch.mm": { "config": [ { "input": [...] } ] } }: each
input is a list of argument specifications, whose `__range__` macros are expanded. Operators
that we do not have are named, not dropped.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepmark.cases.case import Label
from stepmark.ground.dtypes import parse_dtype
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.ops import FAMILIES, Bmm, Gemm, Layout, Op
from stepmark.step.source_file import decoded

_LABELS = ("model", "role", "mbs")


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Read a JSON array of objects. Raise ConfigError for anything else."""
    return decoded(path, list[dict[str, Any]], "shapes", "a JSON list of shapes")


def read_shapes(path: Path, family: str, defaults: dict[str, object]) -> list[tuple[Label, Op]]:
    """Read operators of one family; `defaults` fill fields that an object leaves out."""
    kind = FAMILIES[family]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    shapes = []
    for index, item in enumerate(read_objects(path)):
        where = f"{path.name}[{index}]"
        for key in item:
            if key not in fields and key not in _LABELS:
                raise not_one_of(f"{where}: unknown field", key, [*fields, *_LABELS])
        values = {name: defaults[name] for name in fields if name in defaults}
        values |= {key: value for key, value in item.items() if key in fields}
        missing = [
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ConfigError(f"{where}: {missing[0]}", "missing", "a value")
        shapes.append((_label(where, item), _build(kind, values, where)))
    if not shapes:
        raise ConfigError("shapes", path, "at least one shape")
    return shapes


def _build(kind: type[Op], values: dict[str, Any], where: str) -> Op:
    """Return an operator of plain values. Raise ConfigError that starts with `where`."""
    try:
        return kind(**values)
    except ConfigError as error:
        value = values.get(error.field.replace("-", "_"), error.value)
        raise ConfigError(f"{where}: {error.field}", value, error.allowed) from None


def _label(where: str, item: dict[str, Any]) -> Label:
    for name in _LABELS:
        kind, allowed = (int, "a whole number") if name == "mbs" else (str, "text")
        if name in item and type(item[name]) is not kind:
            raise ConfigError(f"{where}: {name}", item[name], allowed)
    if item.get("mbs", 1) < 1:
        raise ConfigError(f"{where}: mbs", item["mbs"], "at least 1")
    return Label(model=item.get("model", ""), role=item.get("role", ""), mbs=item.get("mbs"))


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
    """The operators of a file, and the names of those that we lack."""

    ops: tuple[tuple[str, Op], ...]
    lacking: tuple[str, ...]


def read_config(path: Path) -> ParamConfig:
    """Read PARAM's configuration. Raise ConfigError, one line, for any other file."""
    operators = decoded(path, dict[str, _Operator], "config", "a PARAM operator config")
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
    shapes = []
    dtypes = []
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
    for number, dims in enumerate(itertools.product(*shapes[0], *shapes[1])):
        if number >= 100_000:
            raise ConfigError(f"{where}: shape", "__range__", "at most 100000 combinations")
        first = list(dims[: len(shapes[0])])
        second = list(dims[len(shapes[0]) :])
        try:
            yield _BUILD[name](where, first, second, dtypes[0])
        except ConfigError as error:
            if error.field.startswith(where):
                raise
            raise ConfigError(
                f"{where}: shape", f"{first} x {second}", f"it has a bad size: {error}"
            ) from None


def _values(where: str, value: object) -> list[int]:
    """Return the values of a dimension: a number, or a macro ["__range__", low, high, step]."""
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
