"""Declarations of operator fields: meaning, range and default."""

import dataclasses
import functools
import types
import typing
from enum import StrEnum
from typing import Any

from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.ground.errors import ConfigError, not_one_of

# Larger than any tensor dimension that fits a device; it catches typing errors.
MAX_DIM = 2**40


class Phase(StrEnum):
    """Part of a training step. bwd = dgrad and wgrad together; step = fwd, bwd, optimizer."""

    FWD = "fwd"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    BWD = "bwd"
    OPTIM = "optim"
    STEP = "step"


# Element types of operators that only move data, and of those that matrix units may compute.
STORED = (DType.BF16, DType.FP16, DType.FP32, DType.FP64)
MULTIPLIED = (*STORED, DType.TF32)


class Operator:
    """Base of all families: what is true of an operator unless its family says otherwise."""

    __slots__ = ()

    def __post_init__(self) -> None:
        validate(self)

    @property
    def flops(self) -> int:
        """Return 0, as of operators without matrix products."""
        return 0

    @property
    def executed_flops(self) -> int:
        """Return the FLOPs with what a kernel computes again: at least `flops`."""
        return self.flops

    @property
    def bytes_moved(self) -> int:
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Return the size of a kernel that keeps its operands and results alone."""
        return self.bytes_moved


# formerly: what operators had before the field was added, whose identities stay; ...: nothing.


def count(
    meaning: str,
    *,
    low: int = 1,
    high: int = MAX_DIM,
    default: Any = dataclasses.MISSING,
    formerly: Any = ...,
) -> Any:
    """Declare a field that holds a number from low to high; a whole one in a field of int."""
    metadata = {"help": meaning, "low": low, "high": high, "formerly": formerly}
    return dataclasses.field(default=default, metadata=metadata)


def choice(
    meaning: str, *, default: Any, allowed: tuple[str, ...] = (), formerly: Any = ...
) -> Any:
    """Declare a field that holds a member of an enum, or one of `allowed`."""
    metadata = {"help": meaning, "allowed": allowed, "formerly": formerly}
    return dataclasses.field(default=default, metadata=metadata)


def identity_fields(value: Any) -> dict[str, object]:
    """Return the fields that tell operators apart.

    These are all but those that are declared otherwise, or still have what they had formerly.
    """
    return {
        field.name: item
        for field in dataclasses.fields(value)
        if field.metadata.get("is_identity", True)
        and (item := getattr(value, field.name)) != field.metadata.get("formerly", ...)
    }


def validate(op: Any) -> None:
    """Check every field against its declaration. Raise ConfigError.

    A plain value of an equivalent type (skew=1, phase="bwd") is converted to the declared type,
    so that equal operators compare equal in `case_id`, in sets and in match statements.
    """
    for field, name in _declared(op.__class__):
        meta = field.metadata
        value = getattr(op, field.name)
        if type(value) is not field.type:
            value = _typed(name, field.type, value)
            object.__setattr__(op, field.name, value)
        if "low" in meta:
            for item in value if isinstance(value, tuple) else (value,):
                if not meta["low"] <= item <= meta["high"]:  # NaN is outside every range
                    raise ConfigError(name, item, f"from {meta['low']} to {meta['high']}")
        if isinstance(value, DType) and value.is_integer:
            raise not_one_of(name, value, OPERATOR_DTYPES)
        allowed = meta.get("allowed")
        if allowed and value not in allowed:
            raise not_one_of(name, value, allowed)


@functools.cache
def _declared(cls: type) -> tuple[tuple[dataclasses.Field[Any], str], ...]:
    """Return the fields of an operator with their names in messages."""
    return tuple((field, field.name.replace("_", "-")) for field in dataclasses.fields(cls))


def _typed(name: str, hint: Any, value: Any) -> Any:
    """Return `value` as the field's declared type."""
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = hint.__args__[0]
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(name, value, "a list of whole numbers")
        return tuple(_typed(name, int, item) for item in value)
    if issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise not_one_of(name, value, hint) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_DIM else value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(name, value, words.get(hint, "text"))
    return value


def number_or_text(text: str) -> int | float | str:
    """Return a number for a number, and other text as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
