"""Ranks start together, agree on failures, know their clocks, and make communicators."""

import statistics

import pytest
from tests.collectives import on_ranks
from tests.ranks_pool import Pool

from stepmark.collectives.bench.communicators import _MOST


def test_ranks_leave_an_alignment_together(pool: Pool) -> None:
    """Median of many: on a machine with fewer cores than ranks some come late."""
    by_rank = pool.run(on_ranks.alignments, 60)
    apart = [max(moments) - min(moments) for moments in zip(*by_rank, strict=True)]
    assert statistics.median(apart) < 4e-3
    assert min(apart) < 2e-3


def test_nobody_leaves_an_alignment_before_the_moment_that_the_last_one_named(
    pool: Pool,
) -> None:
    by_rank = pool.run(on_ranks.arrivals_and_departures, 5, 0.1)
    for moments in zip(*by_rank, strict=True):
        arrivals, departures = zip(*moments, strict=True)
        assert min(departures) >= max(arrivals) + 0.1


def test_clocks_of_one_host_agree_within_what_is_said(pool: Pool) -> None:
    found = pool.run(on_ranks.offset_between_made_up_hosts)
    assert found[0] == found[1] == (0.0, 0.0)
    assert found[2] == found[3], "one rank speaks for a host"
    offset, error = found[2]
    assert 0 < error < 5e-3
    assert abs(offset) <= error


def test_all_learn_who_broke_and_why(pool: Pool) -> None:
    assert pool.run(on_ranks.agree_where_one_breaks) == [("oom", "on 1", (1, 3))] * 4


def test_communicators_are_kept_for_a_launch_and_the_oldest_gives_way(pool: Pool) -> None:
    for kept, left, shared, fresh in pool.run(on_ranks.communicators_in_turn, _MOST):
        assert kept == _MOST
        assert left == 0
        assert shared
        assert fresh


@pytest.mark.parametrize(
    ("name", "count", "k", "starts", "calls"),
    [
        ("queued", 5, 3, 1, 5 * 3 + 1),  # the first call is nobody's sample
        ("blocking", 5, 1, 5, 5),
        ("blocking-free", 5, 1, 1, 5),
    ],
)
def test_a_hosts_timers(
    pool: Pool, name: str, count: int, k: int, starts: int, calls: int
) -> None:
    *members, idle = pool.run(on_ranks.timers, name, count, k)
    for started, seconds, began_s, called in members:
        assert (started, len(seconds), called) == (starts, count, calls)
        assert all(2e-3 <= value < 12e-3 for value in seconds)  # of one call, not of k
        assert began_s > 0
    # A rank outside starts as often as the others, or they would wait for it.
    assert idle[:2] == (starts, [])
    assert idle[3] == 0
