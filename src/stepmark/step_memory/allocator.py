"""torch's caching allocator of device memory, replayed without a device.

A tensor takes a block of a segment. Small tensors share segments of 2 MiB, larger ones
segments of 20 MiB, and those from 10 MiB on have segments of their own size. The smallest free
block that is large enough is taken, and split unless too little would remain; blocks of one
stream are not given to another. So blocks are larger than tensors, and segments stay when
blocks are free: c10/cuda/CUDACachingAllocator.cpp, with its default settings.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from stepmark.ground.units import MIB

_ALIGNMENT = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_SEGMENT_ALIGNMENT = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment that a tensor has, or that is free (of no purpose)."""

    pool: "_Pool"
    address: int
    num_bytes: int
    requested: int = 0
    purpose: str = ""
    before: "Block | None" = None
    after: "Block | None" = None

    def append(self, other: "Block") -> None:
        """Make the block after this one a part of this one."""
        self.num_bytes += other.num_bytes
        self.after = other.after
        if other.after:
            other.after.before = self


@dataclass(slots=True, eq=False)
class _Pool:
    """Segments of a stream for small or for large tensors. free: blocks by size and address."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)


@dataclass(slots=True)
class Allocator:
    """Blocks of one device, and the most that there were since the last reset_peaks()."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _requested: Counter[str] = field(default_factory=Counter)  # bytes by purpose
    _at_peak: Counter[str] | None = None  # None: there are as many now
    _pools: dict[tuple[int, bool], _Pool] = field(default_factory=dict)
    _end: int = 0

    @property
    def at_peak(self) -> Counter[str]:
        """Requested bytes by purpose when most were allocated."""
        return self._requested if self._at_peak is None else self._at_peak

    def reset_peaks(self) -> None:
        """Forget the most that there was, as torch's reset_peak_memory_stats() does."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved
        self._at_peak = None

    def allocate(self, num_bytes: int, purpose: str, stream: int = 0) -> Block:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT
        is_small = size <= _SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
        free = pool.free
        index = bisect_left(free, (size,))
        block = free.pop(index)[2] if index < len(free) else self._segment(pool, size)
        rest = block.num_bytes - size
        if rest >= _ALIGNMENT if is_small else rest > _SMALL:
            remainder = Block(pool, block.address + size, rest, 0, "", block, block.after)
            if block.after:
                block.after.before = remainder
            block.after = remainder
            block.num_bytes = size
            insort(free, (rest, remainder.address, remainder))
        block.requested = num_bytes
        block.purpose = purpose
        allocated = self.allocated + block.num_bytes
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
            self._at_peak = None
        self._requested[purpose] += num_bytes
        self.allocated = allocated
        return block

    def free(self, *blocks: Block) -> None:
        if self._at_peak is None:
            self._at_peak = self._requested.copy()
        for block in blocks:
            self.allocated -= block.num_bytes
            self._requested[block.purpose] -= block.requested
            block.purpose = ""
            free = block.pool.free
            whole = block
            if (after := block.after) and not after.purpose:
                del free[bisect_left(free, (after.num_bytes, after.address))]
                block.append(after)
            if (before := block.before) and not before.purpose:
                del free[bisect_left(free, (before.num_bytes, before.address))]
                before.append(block)
                whole = before
            insort(free, (whole.num_bytes, whole.address, whole))

    def _segment(self, pool: _Pool, size: int) -> Block:
        if pool.is_small:
            num_bytes = _SMALL_SEGMENT
        elif size < _LARGE:
            num_bytes = _LARGE_SEGMENT
        else:
            num_bytes = -(-size // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
        block = Block(pool, self._end, num_bytes)
        self._end += num_bytes
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block
