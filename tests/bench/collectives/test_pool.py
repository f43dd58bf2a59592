"""The pool that other tests trust: it runs, tells what was raised, and sees who died."""

import time
from collections.abc import Iterator

import pytest
from tests.bench.collectives import on_ranks
from tests.bench.collectives.pool import Pool, RankDiedError


def test_each_rank_answers_for_itself(pool: Pool) -> None:
    assert pool.run(on_ranks.who, "x") == [(rank, 4, "x") for rank in range(4)]
