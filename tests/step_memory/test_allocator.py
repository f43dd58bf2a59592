"""torch's caching allocator: sizes of blocks and segments, and what is reused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.units import MIB
from stepmark.step_memory.allocator import Allocator


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (0, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # What would remain of the segment is not worth a block of its own.
        (29 * MIB, 30 * MIB, 30 * MIB),
        (29 * MIB - 512, 29 * MIB - 512, 30 * MIB),
    ],
)
def test_sizes_of_one_tensor(num_bytes: int, allocated: int, reserved: int) -> None:
    heap = Allocator()
    heap.allocate(num_bytes, "x")
    assert (heap.allocated, heap.reserved) == (allocated, reserved)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    heap = Allocator()
    large, small = heap.allocate(40 * MIB, "x"), heap.allocate(12 * MIB, "x")
    heap.free(large)
    heap.free(small)
    assert heap.allocate(12 * MIB, "x").address == small.address
    assert heap.allocate(12 * MIB, "x").address == large.address
    assert heap.allocated == 24 * MIB
    assert heap.reserved == 52 * MIB


def test_free_neighbours_are_one_block() -> None:
    heap = Allocator()
    blocks = [heap.allocate(5 * MIB, "x") for _ in range(4)]
    for index in (0, 2, 1):
        heap.free(blocks[index])
    heap.allocate(15 * MIB, "x")
    assert heap.reserved == 20 * MIB


def test_a_stream_has_its_own_segments() -> None:
    heap = Allocator()
    heap.free(heap.allocate(12 * MIB, "x", stream=1))
    heap.allocate(12 * MIB, "x")
    assert heap.reserved == 24 * MIB


def test_peaks_are_since_the_last_reset() -> None:
    heap = Allocator()
    heap.free(heap.allocate(12 * MIB, "x"))
    heap.reset_peaks()
    heap.allocate(MIB, "y")
    assert (heap.peak_allocated, heap.peak_reserved) == (MIB, 14 * MIB)
    assert heap.at_peak["y"] == MIB
    assert not heap.at_peak["x"]


@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.booleans()), max_size=60))
def test_blocks_do_not_overlap_and_nothing_is_lost(steps: list[tuple[int, bool]]) -> None:
    heap, blocks = Allocator(), []
    for num_bytes, frees in steps:
        if frees and blocks:
            heap.free(blocks.pop(num_bytes % len(blocks)))
        else:
            blocks.append(heap.allocate(num_bytes, "x", stream=num_bytes % 2))
        spans = sorted((block.address, block.address + block.num_bytes) for block in blocks)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert heap.allocated == sum(block.num_bytes for block in blocks) <= heap.reserved
    for block in blocks:
        heap.free(block)
    assert heap.allocated == 0
    assert heap.peak_allocated <= heap.peak_reserved == heap.reserved
