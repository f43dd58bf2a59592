"""Our own workload file: JSON, each distinct operation once, programs as they are nested.

docs/workload-format.md describes it. What is read equals what was written.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.core.workload import (
    Block,
    Group,
    Operation,
    Run,
    Stage,
    Workload,
)
from stepmark.workload.formats.native_op import OpFields, bare, model_of, operation, plain_op
from stepmark.workload.formats.source_file import in_file, read_bytes
from stepmark.workload.formats.strict_json import convert, one_line

SCHEMA = 1
KIND = "stepmark workload"

_Natural = Annotated[int, msgspec.Meta(ge=0)]
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
    """Raises ConfigError for whatever is no workload."""
    data = read_bytes(path, "workload")
    with in_file(path):
        return decode(data)


def encode(workload: Workload) -> bytes:
    """The whole file, a line per operation and per block."""
    numbers: dict[Operation, int] = {}
    blocks = {
        name: [_item(item, numbers) for item in block]
        for name, block in workload.blocks.items()
    }
    parts = {
        "schema": str(SCHEMA).encode(),
        "kind": _json(KIND),
        "name": _json(workload.name),
        "rules": _json(workload.rules),
        "source": _json(workload.source),
        "world_size": _json(workload.world_size),
        "num_microbatches": _json(workload.num_microbatches),
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


def lost(workload: Workload) -> list[str]:
    """Nothing: the format is the workload."""
    return []


def decode(data: bytes) -> Workload:
    """Raises ConfigError, one line, for whatever `encode` would not have written."""
    file = _file(data)
    ops = [operation(op, f"ops[{index}]") for index, op in enumerate(file.ops)]
    workload = Workload(
        name=file.name,
        rules=file.rules,
        source=file.source,
        world_size=file.world_size,
        num_microbatches=file.num_microbatches,
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
    """Typed at once; where that fails, again as plain JSON for a message with the place."""
    try:
        plain = msgspec.json.decode(data)
    except RecursionError:
        raise ConfigError("workload", "too deeply nested", "JSON") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
        return msgspec.convert(plain, type=_File, strict=True)
    except msgspec.ValidationError:
        pass
    try:
        return convert(plain, _File, "workload: ")
    except ConfigError as error:  # the file's own keys are part of the message
        field, allowed = (ascii(text[:300])[1:-1] for text in (error.field, error.allowed))
        raise ConfigError(field, error.shown, allowed) from None


def _item(item: Operation | Run, numbers: dict[Operation, int]) -> Any:
    if not isinstance(item, Run):
        return numbers.setdefault(item, len(numbers))
    shift = {
        name: value
        for name in ("layer", "layer_step", "microbatch", "microbatch_step")
        if (value := getattr(item, name))
    }
    return [item.block, item.times, shift] if shift else [item.block, item.times]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _block(name: str, items: Iterable[int | _Run], ops: list[Operation]) -> Block:
    found: list[Operation | Run] = []
    for item in items:
        if isinstance(item, _Run):
            shift = msgspec.structs.asdict(item.shift)
            found.append(Run(block=item.block, times=item.times, **shift))
        elif 0 <= item < len(ops):
            found.append(ops[item])
        else:
            raise ConfigError(
                f"blocks.{name[:80]}", item, f"an operation from 0 to {len(ops) - 1}"
            )
    return tuple(found)
