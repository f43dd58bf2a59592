"""Our own workload file: JSON, each distinct operation once, programs nested as in memory.

docs/workload-format.md describes it. Reading restores exactly what was written.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from stepmark.ground import json_text
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.read_text import read_whole
from stepmark.model.collectives import RedOp
from stepmark.model.layers import DeltaConfig, MambaConfig, MlaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import FAMILIES, FAMILY_OF, Op, Phase
from stepmark.step.source_file import convert, in_file, one_line
from stepmark.step.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Run,
    Stage,
    Workload,
)

T = TypeVar("T")

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_COMM_ONLY = ("collective", "dtype", "count", "group", "redop", "root", "peer", "fused")


class OpFields(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of an operation: either computation or communication."""

    phase: Phase
    module: str
    compute: dict[str, Any] | None = None
    collective: str | None = None
    dtype: DType | None = None
    count: _Natural | None = None
    group: str | None = None
    layer: int | None = None
    microbatch: int | None = None
    stream: str = COMPUTE
    name: str = ""
    after: tuple[str, ...] = ()
    redop: RedOp = RedOp.NONE
    root: _Natural | None = None
    peer: int | None = None
    fused: bool = False
    recompute: bool = False
    time_s: _Seconds | None = None
    start_s: _Seconds | None = None


def plain_op(op: Operation) -> dict[str, Any]:
    """Return an operation as JSON without defaults."""
    if isinstance(op, CommOp):
        return bare(op)
    if isinstance(op.op, Kernel):
        compute = {"kernel": op.op.name} | bare(op.op, without="name")
    else:
        compute = {"family": FAMILY_OF[type(op.op)]} | bare(op.op)
    return {"compute": compute, **bare(op, without="op")}


def bare(value: Any, *, without: str = "") -> dict[str, Any]:
    """Return a dataclass as a dict without defaults."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.name != without and (
            field.default is dataclasses.MISSING or item != field.default
        ):
            plain[field.name] = bare(item) if dataclasses.is_dataclass(item) else item
    return plain


def operation(op: OpFields, where: str) -> Operation:
    """Return the operation with these fields. Raise ConfigError that starts with `where`."""
    if (op.compute is None) is (op.collective is None):
        raise ConfigError(where, one_line(None), "either compute or collective")
    for field in msgspec.structs.fields(op) if op.compute is not None else ():
        value = getattr(op, field.name)
        if field.name in _COMM_ONLY and value != field.default:
            raise ConfigError(f"{where}.{field.name}", value, "it has no place beside compute")
    values = {
        name: getattr(op, name)
        for name in op.__struct_fields__
        if name != "compute" and (op.compute is None or name not in _COMM_ONLY)
    }
    try:
        if op.compute is not None:
            return ComputeOp(op=_compute(op.compute), **values)
        for name in ("dtype", "count", "group"):
            if values[name] is None:
                raise ConfigError(name, "missing", "it is a required field")
        return CommOp(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error.field}", error.value, error.allowed) from None


def _compute(plain: dict[str, Any]) -> Op | Kernel:
    fields = dict(plain)
    if "kernel" in fields:
        return _dataclass(Kernel, {"name": fields.pop("kernel"), **fields})
    family = fields.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise not_one_of("family", one_line(family), FAMILIES, ", or kernel")
    kind = FAMILIES[family]
    _check_names(kind, fields)
    try:
        return kind(**fields)
    except TypeError:
        of_kind = dataclasses.fields(kind)
        needed = [field.name for field in of_kind if field.default is dataclasses.MISSING]
        raise ConfigError(family, ", ".join(fields), f"all of {', '.join(needed)}") from None


def model_of(plain: dict[str, Any]) -> ModelConfig:
    """Return a model. Raise ConfigError for unknown names, wrong types or impossible sizes."""
    for name, kind in (
        ("moe", MoeConfig),
        ("mla", MlaConfig),
        ("delta", DeltaConfig),
        ("mamba", MambaConfig),
    ):
        if isinstance(plain.get(name), dict):
            _check_names(kind, plain[name])
    return _dataclass(ModelConfig, plain)


def _dataclass(kind: type[T], plain: dict[str, Any]) -> T:
    _check_names(kind, plain)
    try:
        return msgspec.convert(plain, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            kind.__name__, ", ".join(plain), f"it does not decode: {error}"
        ) from None


def _check_names(kind: type[Any], plain: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for key in plain:
        if key not in names:
            raise not_one_of(ascii(key[:80])[1:-1], one_line(plain[key]), names)


SCHEMA = 1
KIND = "stepmark workload"
_SAME = ("name", "rules", "source", "world_size", "num_microbatches")  # as in Workload

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Shift(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    layer: int = 0
    layer_step: int = 0
    microbatch: int = 0
    microbatch_step: int = 0


class _Run(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    block: str
    times: _Positive = 1
    shift: _Shift = _Shift()


class _Stage(msgspec.Struct, forbid_unknown_fields=True):
    step: str
    setup: str = ""
    layers: tuple[int, ...] = ()
    has_embedding: bool = False
    has_head: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    kind: str
    name: str
    rules: str
    source: str
    world_size: _Positive
    num_microbatches: _Natural
    model: dict[str, Any] | None
    settings: dict[str, str | int | float | bool | None]
    groups: dict[str, tuple[tuple[_Positive, _Positive], ...]]
    ops: list[OpFields]
    blocks: dict[str, list[int | _Run]]
    stages: list[_Stage]
    notes: tuple[str, ...]
    origin: dict[str, Any]


def read(path: Path) -> Workload:
    """Read a file. Raise ConfigError for anything that is no workload."""
    data = read_whole(path, "workload")
    with in_file(path):
        return decode(data)


def encode(workload: Workload) -> bytes:
    """Return the whole file, a line per operation and per block."""
    numbers: dict[Operation, int] = {}
    blocks = {
        name: [_item(item, numbers) for item in block]
        for name, block in workload.blocks.items()
    }
    parts = {
        "schema": str(SCHEMA).encode(),
        "kind": _json(KIND),
        **{name: _json(getattr(workload, name)) for name in _SAME},
        "model": _json(workload.model and bare(workload.model)),
        "settings": _json(dict(workload.settings)),
        "groups": _json({name: group.digits for name, group in workload.groups.items()}),
        "ops": b"[\n" + b",\n".join(_json(plain_op(op)) for op in numbers) + b"\n]",
        "blocks": b"{\n"
        + b",\n".join(_json(name) + b":" + _json(items) for name, items in blocks.items())
        + b"\n}",
        "stages": _json([bare(stage) for stage in workload.stages]),
        "notes": _json(workload.notes),
        "origin": _json(dict(workload.origin)),
    }
    body = b",\n".join(_json(key) + b":" + value for key, value in parts.items())
    return b"{" + body + b"}\n"


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return nothing: the format holds the whole workload."""
    return []


def decode(data: bytes) -> Workload:
    """Decode a file. Raise ConfigError, one line, for anything that `encode` does not write."""
    file = _file(data)
    ops = [operation(op, f"ops[{index}]") for index, op in enumerate(file.ops)]
    workload = Workload(
        **{name: getattr(file, name) for name in _SAME},
        model=None if file.model is None else model_of(file.model),
        settings=file.settings,
        groups={name: Group(digits=digits) for name, digits in file.groups.items()},
        blocks={name: _block(name, items, ops) for name, items in file.blocks.items()},
        stages=tuple(Stage(**msgspec.structs.asdict(stage)) for stage in file.stages),
        notes=file.notes,
        origin=file.origin,
    )
    try:
        workload.check()
    except RecursionError:
        raise ConfigError("blocks", len(workload.blocks), "blocks nested less deeply") from None
    return workload


def _file(data: bytes) -> _File:
    """Decode a file's fields. Raise ConfigError with the place."""
    try:
        plain = json_text.decode(data)
    except ValueError as error:
        raise ConfigError("workload", one_line(data[:40]), f"JSON ({error})") from None
    if not isinstance(plain, dict) or plain.get("kind") != KIND:
        kind = plain.get("kind") if isinstance(plain, dict) else None
        raise ConfigError("kind", one_line(kind), KIND)
    schema = plain.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
        raise ConfigError(
            "schema", one_line(schema), f"from 1 to {SCHEMA}; or a newer stepmark"
        )
    try:
        return convert(plain, _File, "workload: ")
    except ConfigError as error:  # the file's own keys are part of the message
        field, allowed = (ascii(text[:300])[1:-1] for text in (error.field, error.allowed))
        raise ConfigError(field, error.value, allowed) from None


def _item(item: Operation | Run, numbers: dict[Operation, int]) -> Any:
    if not isinstance(item, Run):
        return numbers.setdefault(item, len(numbers))
    shift = {name: value for name in _Shift.__struct_fields__ if (value := getattr(item, name))}
    return [item.block, item.times, shift] if shift else [item.block, item.times]


_json = msgspec.json.encode


def _block(name: str, items: Iterable[int | _Run], ops: list[Operation]) -> Block:
    content: list[Operation | Run] = []
    for item in items:
        if isinstance(item, _Run):
            shift = msgspec.structs.asdict(item.shift)
            content.append(Run(block=item.block, times=item.times, **shift))
        elif 0 <= item < len(ops):
            content.append(ops[item])
        else:
            raise ConfigError(
                f"blocks.{name[:80]}", item, f"an operation from 0 to {len(ops) - 1}"
            )
    return tuple(content)
