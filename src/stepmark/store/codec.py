"""Records and runs to JSON and back. Raw data only; what is derived is drawn by report.

An operator carries its `family`, a collective its name, a training step its model. Beside the
case stand, for readers without our code, `case_id` and `command`, a collective's size and
busbw factor, and the strategy and number of ranks of a training step. JSON has no inf and no
nan: such a float is written as the string "inf", "-inf" or "nan", and read back because the
field is a float.
"""

import dataclasses
import functools
import math
import typing
from typing import Any

import msgspec

from stepmark.core.case import OpCase
from stepmark.core.comm_case import CommCase
from stepmark.core.commands import command_of
from stepmark.core.errors import ConfigError
from stepmark.core.ops import FAMILIES
from stepmark.core.record import (
    SCHEMA,
    AnyCase,
    Failed,
    Measured,
    Record,
    RunInfo,
    Skipped,
)
from stepmark.core.train_case import TrainCase

KINDS: dict[str, type[Record]] = {"measured": Measured, "skipped": Skipped, "failed": Failed}


def encode(record: Record) -> bytes:
    """One line, newline included."""
    plain = to_plain(record)
    beside: dict[str, Any] = {}
    if isinstance(record.case, CommCase):
        beside = {
            "size_bytes": record.case.message_bytes,
            "busbw_factor": record.case.busbw_factor,
        }
    if isinstance(record.case, TrainCase):
        beside = {"strategy": record.case.strategy, "num_ranks": record.case.num_ranks}
    plain["case"] = case_to_plain(record.case)
    head = {
        "schema": record.schema,
        "kind": record.kind,
        "run_id": record.run_id,
        "case_id": record.case.case_id,
        "command": command_of(record.case),
    }
    return msgspec.json.encode({**head, **beside, **plain}) + b"\n"


def decode(line: bytes) -> Record:
    """Raises ConfigError for what is no record of ours, or one of a newer schema."""
    plain = json_object(line, "record")
    _check_schema(plain, "record")
    cls = KINDS.get(str(plain.get("kind")))
    if cls is None:
        raise ConfigError("kind", plain.get("kind"), f"one of {', '.join(KINDS)}")
    record: Record = build(cls, plain, {"case": case_from_plain(plain.get("case"))})
    return record


def case_to_plain(case: AnyCase) -> dict[str, Any]:
    """Return a case as it stands in records and plans: its op carries the family."""
    plain: dict[str, Any] = to_plain(case)
    if isinstance(case, OpCase):
        plain["op"] = {"family": case.family, **plain["op"]}
    return plain


def case_from_plain(plain: Any) -> AnyCase:
    """An operator's case has an op, a collective's names the collective, training a model."""
    if isinstance(plain, dict) and "collective" in plain:
        comm: CommCase = build(CommCase, plain, {})
        return comm
    if isinstance(plain, dict) and "model" in plain and "data_parallel" in plain:
        train: TrainCase = build(TrainCase, plain, {})
        return train
    op = plain.get("op") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or not isinstance(op, dict):
        raise ConfigError("case", plain, "an object with an op, a collective or a model")
    family = FAMILIES.get(str(op.get("family")))
    if family is None:
        raise ConfigError("family", op.get("family"), f"one of {', '.join(FAMILIES)}")
    case: OpCase = build(OpCase, plain, {"op": build(family, op, {})})
    return case


def encode_run(info: RunInfo) -> bytes:
    """The whole of run.json, indented for readers."""
    return msgspec.json.format(msgspec.json.encode(to_plain(info)), indent=2) + b"\n"


def decode_run(text: bytes) -> RunInfo:
    plain = json_object(text, "run.json")
    _check_schema(plain, "run.json")
    info: RunInfo = build(RunInfo, plain, {})
    return info


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings and finite numbers only."""
    return _spell(msgspec.to_builtins(value))


def _spell(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _spell(item) for key, item in value.items()}
        case list() | tuple():
            return [_spell(item) for item in value]
        case _:
            return value


def json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        plain = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(what, _shown(text), f"JSON ({error})") from None
    if not isinstance(plain, dict):
        raise ConfigError(what, _shown(text), "a JSON object")
    return plain


def _shown(text: bytes) -> str:
    return text[:80].decode(errors="replace")


def _check_schema(plain: dict[str, Any], what: str) -> None:
    schema = plain.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ConfigError(f"{what} schema", schema, f"a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise ConfigError(f"{what} schema", schema, f"at most {SCHEMA}; use a newer stepmark")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type, plain: dict[str, Any], given: dict[str, Any]) -> Any:
    """`cls` from its fields; unknown keys are ignored, absent ones take their default.

    msgspec converts field by field because it has no untagged unions of dataclasses.
    """
    values = dict(given)
    for field in dataclasses.fields(cls):
        if field.name in given or field.name not in plain:
            continue
        try:
            values[field.name] = msgspec.convert(
                plain[field.name], _hints(cls)[field.name], strict=False
            )
        except msgspec.ValidationError as error:
            raise ConfigError(
                field.name, plain[field.name], f"it does not decode: {error}"
            ) from None
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(
            cls.__name__, sorted(values), f"it does not decode: {error}"
        ) from None
