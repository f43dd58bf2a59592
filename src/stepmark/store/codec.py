"""Records and runs to JSON and back. Raw data only; report/ derives figures from it.

An operator carries its `family`, a collective its name, a training step its model. Readers
without our code find next to the case its `case_id` and `command`, a collective's size and
busbw factor, and the strategy and number of ranks of a training step. JSON has no inf and no
nan: such a float is written as the string "inf", "-inf" or "nan", and read back because the
field is a float.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.fields import former_values
from stepmark.cases.record import (
    SCHEMA,
    AnyCase,
    Failed,
    Measured,
    Record,
    RunInfo,
    Skipped,
)
from stepmark.cases.replay_case import ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.ops import ALL_FAMILIES
from stepmark.store.commands import command_of
from stepmark.tables.export import finite

T = TypeVar("T")
NOTHING: Mapping[str, Any] = MappingProxyType({})
KINDS: dict[str, type[Record]] = {"measured": Measured, "skipped": Skipped, "failed": Failed}


def encode(record: Record) -> bytes:
    """Return one line, newline included."""
    plain = to_plain(record)
    derived: dict[str, Any] = {}
    if isinstance(record.case, CommCase):
        derived = {
            "size_bytes": record.case.message_bytes,
            "busbw_factor": record.case.busbw_factor,
        }
    if isinstance(record.case, TrainCase):
        derived = {"strategy": record.case.strategy, "num_ranks": record.case.num_ranks}
    plain["case"] = case_to_plain(record.case)
    head = {
        "schema": record.schema,
        "kind": record.kind,
        "run_id": record.run_id,
        "case_id": record.case.case_id,
        "command": command_of(record.case),
    }
    return msgspec.json.encode({**head, **derived, **plain}) + b"\n"


def decode(line: bytes) -> Record:
    """Read a record. Raises ConfigError for other JSON, and for a newer schema."""
    plain = json_object(line, "record")
    _check_schema(plain, "record")
    cls = KINDS.get(str(plain.get("kind")))
    if cls is None:
        raise not_one_of("kind", plain.get("kind"), KINDS)
    return build(cls, plain, {"case": case_from_plain(plain.get("case"))})


def case_to_plain(case: AnyCase) -> dict[str, Any]:
    """Return a case as it stands in records and plans: its op carries the family."""
    plain: dict[str, Any] = to_plain(case)
    if isinstance(case, OpCase):
        plain["op"] = {"family": case.family, **plain["op"]}
    return plain


def case_from_plain(plain: Any) -> AnyCase:
    """Read a case: a collective names its collective, training a model, an operator an op, a
    replay the digest of its workload."""
    fields = plain if isinstance(plain, dict) else {}
    if "collective" in fields:
        return build(CommCase, fields)
    if "digest" in fields:
        return build(ReplayCase, fields)
    if "model" in fields and "data_parallel" in fields:
        return build(TrainCase, fields)
    op = fields.get("op")
    if not isinstance(op, dict):
        raise ConfigError("case", plain, "an object with an op, a collective or a model")
    family = ALL_FAMILIES.get(str(op.get("family")))
    if family is None:
        raise not_one_of("family", op.get("family"), ALL_FAMILIES)
    return build(OpCase, fields, {"op": build(family, op)})


def encode_run(info: RunInfo) -> bytes:
    """Return the text of run.json, indented for readers."""
    return msgspec.json.format(msgspec.json.encode(to_plain(info)), indent=2) + b"\n"


def decode_run(text: bytes) -> RunInfo:
    plain = json_object(text, "run.json")
    _check_schema(plain, "run.json")
    return build(RunInfo, plain)


def to_plain(value: Any) -> Any:
    """Convert to dicts, lists, strings and finite numbers."""
    return finite(msgspec.to_builtins(value))


def json_object(text: bytes, what: str) -> dict[str, Any]:
    """Read an object. Raises ConfigError, naming `what`, for anything else."""
    start = text[:80].decode(errors="replace") or "(empty)"
    try:
        plain = json_text.decode(text)
    except ValueError as error:
        raise ConfigError(what, start, f"JSON ({error})") from None
    if not isinstance(plain, dict):
        raise ConfigError(what, start, "a JSON object")
    return plain


def _check_schema(plain: dict[str, Any], what: str) -> None:
    schema = plain.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ConfigError(f"{what} schema", schema, f"a whole number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise ConfigError(f"{what} schema", schema, f"at most {SCHEMA}; use a newer stepmark")


def build(cls: type[T], plain: dict[str, Any], decoded: Mapping[str, Any] = NOTHING) -> T:
    """Make a `cls` of its fields: `decoded` as they are, the others converted from `plain`.

    Unknown keys are ignored; absent ones take what cases had before the field was added, or
    their default. msgspec converts field by field because it has no untagged unions of
    dataclasses.
    """
    values = former_values(cls) | dict(decoded)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in decoded or field.name not in plain:
            continue
        value = plain[field.name]
        try:
            values[field.name] = msgspec.convert(value, field.type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(field.name, value, f"it does not decode: {error}") from None
    try:
        return cls(**values)
    except TypeError as error:
        reason = f"it does not decode: {error}"
        raise ConfigError(cls.__name__, sorted(values), reason) from None
