"""Sizes, factors and groups of collectives, by nccl-tests' rules."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import (
    FACTS,
    Api,
    Collective,
    Parts,
    busbw_factor,
    groups,
    largest_buffer,
    num_parts,
    parse_split,
    placements,
    sizes,
    spread_counts,
    torch_collective,
    trimmed_count,
)

ITEMSIZES = st.sampled_from([1, 2, 4, 8])
RANKS = st.integers(2, 64)
WHOLE = [c for c in Collective if FACTS[c].parts is Parts.WHOLE]
PARTED = [c for c in Collective if FACTS[c].parts is not Parts.WHOLE]


# nccl-tests' doc/PERFORMANCE.md; 8 ranks.
FACTORS = {
    Collective.ALL_REDUCE: 1.75,
    Collective.ALL_GATHER: 0.875,
    Collective.REDUCE_SCATTER: 0.875,
    Collective.BROADCAST: 1.0,
    Collective.REDUCE: 1.0,
    Collective.ALL_TO_ALL: 0.875,
    Collective.ALL_TO_ALL_V: 0.875,
    Collective.GATHER: 0.875,
    Collective.SCATTER: 0.875,
    Collective.SENDRECV: 1.0,
    Collective.P2P: 1.0,
    Collective.P2P_BOTH: 1.0,
    Collective.PING_PONG: 1.0,
    Collective.INCAST: 1.0,
    Collective.MULTICAST: 1.0,
    Collective.BARRIER: 0.0,
}


@pytest.mark.parametrize("collective", Collective)
def test_busbw_factors(collective: Collective) -> None:
    assert busbw_factor(collective, 8) == FACTORS[collective]


@given(n=RANKS)
def test_an_all_reduce_moves_what_a_reduce_scatter_and_an_all_gather_move(n: int) -> None:
    both = busbw_factor(Collective.REDUCE_SCATTER, n) + busbw_factor(Collective.ALL_GATHER, n)
    assert busbw_factor(Collective.ALL_REDUCE, n) == pytest.approx(both)


@given(collective=st.sampled_from(PARTED), size=st.integers(0, 2**40), n=RANKS, item=ITEMSIZES)
def test_parts_are_the_most_that_fit_in_multiples_of_16_bytes(
    collective: Collective, size: int, n: int, item: int
) -> None:
    count, parts = trimmed_count(collective, size, item, n), num_parts(collective, n)
    assert count * item % 16 == 0
    assert count * item * parts <= size
    assert (count * item + 16) * parts > size - item * parts  # less than a part's elements lost
    # What fits once fits again: the printed size, asked for, gives itself.
    assert trimmed_count(collective, count * item * parts, item, n) == count


@given(collective=st.sampled_from(WHOLE), size=st.integers(0, 2**40), n=RANKS, item=ITEMSIZES)
def test_whole_messages_are_not_trimmed(
    collective: Collective, size: int, n: int, item: int
) -> None:
    assert trimmed_count(collective, size, item, n) == size // item


@pytest.mark.parametrize(
    ("collective", "size", "item", "n", "count"),
    [
        (Collective.ALL_GATHER, 1024, 4, 8, 32),
        (Collective.ALL_GATHER, 127, 4, 8, 0),  # below 16 n bytes nothing is left
        (Collective.ALL_GATHER, 1000, 4, 6, 40),  # 166 bytes a rank, 160 of them
        (Collective.ALL_TO_ALL, 2**20, 2, 6, 87376),
        (Collective.INCAST, 2**20, 4, 5, 2**16),
        (Collective.ALL_REDUCE, 1023, 4, 8, 255),
    ],
)
def test_examples_of_trimming(
    collective: Collective, size: int, item: int, n: int, count: int
) -> None:
    assert trimmed_count(collective, size, item, n) == count


# Sizes


def test_sizes_by_factor_and_by_step() -> None:
    assert sizes(8, 128, factor=2) == [8, 16, 32, 64, 128]
    assert sizes(8, 100, factor=2) == [8, 16, 32, 64]
    assert sizes(1000, 3000, step=1000) == [1000, 2000, 3000]
    assert sizes(7, 7) == [7]
    assert sizes(1, 4, factor=1.1) == [1, 2, 3, 4]  # never the same twice


@given(
    begin=st.integers(1, 2**30),
    end=st.integers(1, 2**40),
    factor=st.floats(1.01, 1e6),
)
def test_sizes_rise_from_the_first_to_at_most_the_last(
    begin: int, end: int, factor: float
) -> None:
    end = max(begin, end)
    found = sizes(begin, end, factor=factor)
    assert found[0] == begin
    assert found[-1] <= end
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("begin", "end", "factor", "step", "field"),
    [
        (2, 1, 2.0, 0, "begin"),
        (1, 2, 1.0, 0, "factor"),
        (1, 2, -2.0, 0, "factor"),
        (1, 1, math.inf, 0, "factor"),
        (1, 2**20, math.nan, 1, "factor"),
        (1, 2**30, 0.0, 1, "step"),
    ],
)
def test_sizes_that_lead_nowhere(
    begin: int, end: int, factor: float, step: int, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sizes(begin, end, factor=factor, step=step)
    assert caught.value.field == field


# Groups


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("MOD 2", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("%4", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("div 4", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("/ 2", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("AND 0x1", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("&0", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("OR 0x3", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("| 6", [(0, 2, 4, 6), (1, 3, 5, 7)]),
    ],
)
def test_nccl_tests_words_for_splits(split: str, expected: list[tuple[int, ...]]) -> None:
    assert groups(8, split) == expected


@given(
    n=st.integers(1, 64),
    word=st.sampled_from(["mod", "div", "and", "or", "%", "/", "&", "|"]),
    value=st.integers(1, 64),
)
def test_every_rank_is_in_one_group(n: int, word: str, value: int) -> None:
    found = groups(n, f"{word} {value}")
    assert sorted(rank for group in found for rank in group) == list(range(n))
    assert all(list(group) == sorted(group) for group in found)


@pytest.mark.parametrize("text", ["4", "mod", "mod 0", "div -1", "xor 1", "% 1.5", "or"])
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="group-split"):
        parse_split(text)


# Uneven parts


@given(n=RANKS, count=st.integers(1, 2**24), item=ITEMSIZES, spread=st.floats(0, 1))
def test_spread_is_the_same_for_every_rank_and_nearly_all_of_the_message(
    n: int, count: int, item: int, spread: float
) -> None:
    matrix = spread_counts(n, count, spread, item)
    rows = [sum(row) for row in matrix]
    columns = [sum(column) for column in zip(*matrix, strict=True)]
    assert len(set(rows + columns)) == 1
    lost = n * count - rows[0]
    assert 0 <= lost * item <= 16 * n + item * n  # each part is trimmed to 16 bytes
    assert largest_buffer(matrix) == rows[0]
    # Only the distance counts: each row is the one above it, turned by one.
    for above, row in itertools.pairwise(matrix):
        assert row == (above[-1], *above[:-1])


@given(n=RANKS, parts=st.integers(1, 2**20), item=ITEMSIZES)
def test_no_spread_is_an_even_all_to_all(n: int, parts: int, item: int) -> None:
    count = parts * 16 // item
    assert spread_counts(n, count, 0.0, item) == ((count,) * n,) * n


def test_full_spread_is_proportional_to_the_distance() -> None:
    # 4 ranks, 4 x 1536 bytes: distances 0 to 3 of 6.
    assert spread_counts(4, 1536, 1.0, 1)[0] == (0, 1024, 2048, 3072)
    assert spread_counts(4, 1536, 1.0, 1)[1] == (3072, 0, 1024, 2048)


def test_largest_buffer_looks_at_both_sides() -> None:
    assert largest_buffer([[1, 2], [3, 4]]) == 7
    assert largest_buffer([[0, 9], [0, 9]]) == 18
    assert largest_buffer([]) == 0


def test_torch_has_three_collectives_in_place_only() -> None:
    only = {c for c in Collective if placements(c, Api.TORCH) == (True,)}
    assert only == {Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE}
    for collective in Collective:
        of_torch, of_nccl = (placements(collective, api) for api in (Api.TORCH, Api.NCCL))
        assert set(of_torch) <= set(of_nccl)


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        ("allreduce allreduce_coalesced all_reduce_barrier allreduce_sparse", "all_reduce"),
        ("_allgather_base all_gather allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_all alltoall_base alltoall_", "all_to_all"),
        ("all_to_allv all_to_all_v_single", "all_to_all_v"),
        ("broadcast _broadcast_oop broadcast_", "broadcast"),
        ("reduce _reduce_oop", "reduce"),
        ("barrier monitored_barrier_ monitoredBarrier", "barrier"),
        ("send isend", "send"),
        ("recv irecv recv_any_source_", "recv"),
        ("wait init coalesced shard_dim_gather", ""),
    ],
)
def test_names_of_torch_calls_are_those_of_one_collective(names: str, ours: str) -> None:
    assert {torch_collective(name) for name in names.split()} == {ours}
