"""The pool that other tests trust: it runs, tells what was raised, and sees who died."""

import time
from collections.abc import Iterator

import pytest
from tests.collectives import on_ranks
from tests.ranks_pool import Pool, RankDiedError


def test_each_rank_answers_for_itself(pool: Pool) -> None:
    assert pool.run(on_ranks.who, "x") == [(rank, 4, "x") for rank in range(4)]


def test_what_a_rank_raises_is_told_and_the_pool_goes_on(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"rank 1: (.*\n)*ValueError: only here"):
        pool.run(on_ranks.raise_on_one)
    assert pool.is_whole
    assert len(pool.run(on_ranks.who, "y")) == 4


@pytest.fixture
def two() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def test_peers_of_a_rank_that_left_learn_of_it_and_the_pool_says_so(two: Pool) -> None:
    answer, nothing = two.run(on_ranks.bye, dying=(1,))
    assert nothing is None
    assert answer.startswith("a rank cannot be reached: ")
    assert "\n" not in answer
    assert not two.is_whole
    begin = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 died"):
        two.run(on_ranks.who, "z")
    assert time.monotonic() - begin < 5
