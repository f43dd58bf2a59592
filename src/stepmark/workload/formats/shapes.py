"""Our own shape list: a JSON array of objects whose keys are an operator's fields.

Beside the fields an object may name `model`, `role` and `mbs`, which become columns.
"""

import dataclasses
import difflib
import enum
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from stepmark.core.case import Label
from stepmark.core.errors import ConfigError
from stepmark.core.ops import FAMILIES, Op

_LABELS = ("model", "role", "mbs")
_MAX_BYTES = 64 * 2**20


def read_objects(path: Path) -> list[dict[str, Any]]:
    """A JSON array of objects. Raises ConfigError for anything else."""
    if "\0" in str(path):
        raise ConfigError("shapes", path, "a readable file (NUL in its name)")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError("shapes", path, "a file of at most 64 MiB")
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except OSError as error:
        raise ConfigError("shapes", path, f"a readable file ({error.strerror})") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error) or "nested too deep"
        raise ConfigError("shapes", path, f"a JSON list of shapes ({reason})") from None


def read_shapes(path: Path, family: str, defaults: dict[str, object]) -> list[tuple[Label, Op]]:
    """Operators of one family; `defaults` fill fields that an object leaves out."""
    kind = FAMILIES[family]
    known = {field.name: field for field in dataclasses.fields(kind)}
    placed = []
    for index, item in enumerate(read_objects(path)):
        where = f"{path.name}[{index}]"
        for key in item:
            if key not in known and key not in _LABELS:
                close = difflib.get_close_matches(key, [*known, *_LABELS], n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}"
                raise ConfigError(f"{where}: unknown field", key, hint)
        values = {name: defaults[name] for name in known if name in defaults}
        values |= {key: value for key, value in item.items() if key in known}
        missing = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ConfigError(f"{where}: {missing[0]}", "missing", "a value")
        placed.append((_label(where, item), build(kind, values, where)))
    if not placed:
        raise ConfigError("shapes", path, "at least one shape")
    return placed


def build(kind: type[Op], values: dict[str, Any], where: str) -> Op:
    """An operator from plain values (numbers, names, lists). Raises ConfigError."""
    hints = typing.get_type_hints(kind)
    converted = {}
    for name, value in values.items():
        field = f"{where}: {name.replace('_', '-')}" if where else name.replace("_", "-")
        try:
            converted[name] = msgspec.convert(value, type=hints[name])
        except msgspec.MsgspecError:
            raise ConfigError(field, value, _allowed(hints[name])) from None
    try:
        return kind(**converted)
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError(
            f"{where}: {error.field}",
            converted.get(error.field.replace("-", "_"), ""),
            error.allowed,
        ) from None


def _allowed(hint: Any) -> str:
    """What a field's type takes, in words."""
    options = [hint]
    if isinstance(hint, types.UnionType):
        options = [option for option in hint.__args__ if option is not types.NoneType]
    if isinstance(options[0], type) and issubclass(options[0], enum.StrEnum):
        return f"one of {', '.join(options[0])}"
    if options[0] is bool:
        return "true or false"
    if typing.get_origin(options[0]) is tuple:
        return "a list of whole numbers"
    return {int: "a whole number", float: "a number"}.get(options[0], "text")


def _label(where: str, item: dict[str, Any]) -> Label:
    for name, kind in (("model", str), ("role", str), ("mbs", int)):
        if name in item and type(item[name]) is not kind:
            raise ConfigError(f"{where}: {name}", item[name], _allowed(kind))
    if item.get("mbs", 1) < 1:
        raise ConfigError(f"{where}: mbs", item["mbs"], "at least 1")
    return Label(model=item.get("model", ""), role=item.get("role", ""), mbs=item.get("mbs"))
