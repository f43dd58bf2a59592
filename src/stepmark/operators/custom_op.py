"""What a function of `stepmark op custom` returns: a kernel, its work and a reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepmark.ground.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOp:
    """One operand set of your kernel, its FLOPs and bytes, and the reference of its result.

    `stepmark op custom FILE.py:FUNCTION` calls FUNCTION(device, dtype) once for each operand
    set; the sets together exceed the cache. device and dtype are torch's.

    call(*operands) is timed, again and again on the same operands, on torch's current stream.
    It returns a tensor or several: new ones, or operands that it wrote into. Its result
    depends on the operands alone, and it changes no other operand: after the samples it is
    checked with other values in the same storage. reference(*operands) returns the same by
    other means in higher precision, from floating-point operands in fp64. flops are those of
    matrix products in one call, bytes_moved what it must read and write. tolerance is the
    largest relative error that is right; by default four roundings to dtype, and a sum as long
    as the longest dimension, limit it and the root mean square.
    """

    call: Callable[..., object]
    operands: Sequence[object]
    reference: Callable[..., object]
    flops: int
    bytes_moved: int
    tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("call", "reference"):
            if not callable(getattr(self, name)):
                raise ConfigError(name, getattr(self, name), "a function of the operands")
        if not isinstance(self.operands, tuple | list) or not self.operands:
            raise ConfigError("operands", self.operands, "a tuple of one tensor or more")
        for name, low in (("flops", 0), ("bytes_moved", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(name, value, f"a whole number from {low}")
        is_number = isinstance(self.tolerance, int | float)
        if self.tolerance is None or (is_number and 0 <= self.tolerance < math.inf):
            return
        raise ConfigError("tolerance", self.tolerance, "a number from 0, or None")
