"""How a field of an operator is declared: its meaning, its range, its default."""

import dataclasses
import math
from enum import StrEnum
from typing import Any

from stepmark.core.errors import ConfigError

# Larger than any tensor dimension that fits a device; catches typing errors, not ambitions.
MAX_DIM = 2**40


class Phase(StrEnum):
    """Part of a training step. bwd = dgrad and wgrad in one; step = fwd, bwd and optimizer."""

    FWD = "fwd"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    BWD = "bwd"
    OPTIM = "optim"
    STEP = "step"


def count(meaning: str, *, low: int = 1, high: int = MAX_DIM, default: Any = None) -> Any:
    """A field that holds a whole number between low and high."""
    metadata = {"help": meaning, "low": low, "high": high}
    if default is None:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def choice(meaning: str, *, default: Any, allowed: tuple[str, ...] = ()) -> Any:
    """A field that holds a member of an enum, or one of `allowed`."""
    return dataclasses.field(default=default, metadata={"help": meaning, "allowed": allowed})


def validate(op: Any) -> None:
    """Check every field against its declaration. Raises ConfigError."""
    for field in dataclasses.fields(op):
        value, meta = getattr(op, field.name), field.metadata
        name = field.name.replace("_", "-")
        if "low" in meta:
            values = value if isinstance(value, tuple) else (value,)
            for item in values:
                if not isinstance(item, int | float) or isinstance(item, bool):
                    raise ConfigError(name, item, "a number")
                if not math.isfinite(item) or not meta["low"] <= item <= meta["high"]:
                    raise ConfigError(name, item, f"from {meta['low']} to {meta['high']}")
        allowed = meta.get("allowed")
        if allowed and value not in allowed:
            raise ConfigError(name, value, f"one of {', '.join(allowed)}")
