"""One operation, and a model, of our workload file: to plain JSON and back."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from stepmark.core.collectives import RedOp
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.core.ops import FAMILIES, FAMILY_OF, Op, Phase
from stepmark.core.workload import COMPUTE, CommOp, ComputeOp, Kernel, Operation
from stepmark.workload.formats.strict_json import one_line

T = TypeVar("T")

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_COMM_ONLY = ("collective", "dtype", "count", "group", "redop", "root", "peer", "fused")


class OpFields(msgspec.Struct, forbid_unknown_fields=True):
    """Either computation or communication."""

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


def plain_op(op: Operation) -> dict[str, Any]:
    """As JSON, defaults left out."""
    if isinstance(op, CommOp):
        return bare(op)
    compute = {"kernel": op.op.name} if isinstance(op.op, Kernel) else {}
    if not isinstance(op.op, Kernel):
        compute = {"family": FAMILY_OF[type(op.op)]}
    inner = {key: value for key, value in bare(op.op).items() if key not in compute}
    if isinstance(op.op, Kernel):
        inner.pop("name")
    return {"compute": compute | inner, **bare(op, without="op")}


def bare(value: Any, *, without: str = "") -> dict[str, Any]:
    """A dataclass as a dict, defaults left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if field.name != without and (
            field.default is dataclasses.MISSING or held != field.default
        ):
            found[field.name] = bare(held) if dataclasses.is_dataclass(held) else held
    return found


def operation(op: OpFields, where: str) -> Operation:
    """Raises ConfigError that starts with `where`."""
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
        raise ConfigError(f"{where}.{error.field}", error.shown, error.allowed) from None


def _compute(plain: dict[str, Any]) -> Op | Kernel:
    held = dict(plain)
    if "kernel" in held:
        made = {"name": held.pop("kernel"), **held}
        return _dataclass(Kernel, made)
    family = held.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            "family", one_line(family), f"one of {', '.join(FAMILIES)}, or kernel"
        )
    _known(FAMILIES[family], held)
    try:
        return FAMILIES[family](**held)
    except TypeError:
        needed = [
            field.name
            for field in dataclasses.fields(FAMILIES[family])
            if field.default is dataclasses.MISSING
        ]
        raise ConfigError(family, ", ".join(held), f"all of {', '.join(needed)}") from None


def model_of(plain: dict[str, Any]) -> ModelConfig:
    """Raises ConfigError for unknown names, wrong types and impossible models."""
    for name, kind in (("moe", MoeConfig), ("mla", MlaConfig)):
        if isinstance(plain.get(name), dict):
            _known(kind, plain[name])
    return _dataclass(ModelConfig, plain)


def _dataclass(kind: type[T], plain: dict[str, Any]) -> T:
    _known(kind, plain)
    try:
        return msgspec.convert(plain, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            kind.__name__, ", ".join(plain), f"it does not decode: {error}"
        ) from None


def _known(kind: type[Any], plain: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for key in plain:
        if key not in names:
            raise ConfigError(
                ascii(key[:80])[1:-1], one_line(plain[key]), f"one of {', '.join(names)}"
            )
