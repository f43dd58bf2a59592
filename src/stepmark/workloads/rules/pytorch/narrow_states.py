"""Moments of Adam in 8 bits: torchao 0.18, optim/adam.py and optim/subclass_8bit.py.

A moment is a code of a byte per value, a scale in fp32 per block of 256 values, and a table of
the 256 values in fp32. A shard of a tensor with less than 4,096 values, or with a block that
is not whole, has moments of its own type (_AdamBase._new_buffer). torch.compile makes the
update of each tensor.
"""

from collections.abc import Iterable

from stepmark.ground.dtypes import DType

_BLOCK = 256
_LEAST = 4096
_TABLE_BYTES = 256 * DType.FP32.itemsize


def is_in_8_bits(numel: int) -> bool:
    """Return whether the moments of a shard of so many values are in 8 bits."""
    return numel >= _LEAST and numel % _BLOCK == 0


def moment_bytes(numel: int, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of each tensor of one moment. itemsize: of the parameter."""
    if is_in_8_bits(numel):
        return numel, numel // _BLOCK * DType.FP32.itemsize, _TABLE_BYTES
    return (numel * itemsize,)


def update_bytes(shards: Iterable[int], itemsize: int) -> int:
    """Return the bytes that an update moves: weights and moments both ways, gradients once."""
    moved = 0
    for numel in shards:
        moments = sum(moment_bytes(numel, itemsize)[:2])
        moved += 3 * numel * itemsize + 4 * moments
    return moved
