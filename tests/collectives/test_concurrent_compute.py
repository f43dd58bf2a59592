"""Compute beside a collective: what it is measured against, and what ends it."""

import math
import statistics
import threading
import time
from typing import Any

import pytest
from tests.collectives import on_ranks
from tests.collectives.cases import case_of
from tests.measuring.fakes import GOOD
from tests.ranks_pool import Pool

from stepmark.cases.plan import CommHow
from stepmark.cases.record import Failed, Measured, Record
from stepmark.collectives.bench.concurrent_compute import ThreadCompute
from stepmark.model.collectives import Collective
from stepmark.operators.bench.call import Call


def records_of(pool: Pool, *arguments: Any) -> list[Record]:
    found: list[Record] = pool.run(on_ranks.measure, *arguments)[0]
    return found


def test_compute_on_a_cpu_is_timed_alone_and_together(pool: Pool) -> None:
    case = case_of(size=2**20, beside="copy:64K")
    (record,) = records_of(pool, [case], CommHow(iterations=20))
    assert isinstance(record, Measured), record
    assert record.num_wrong == 0
    beside = record.beside
    assert beside is not None
    assert beside.backend_run
    assert len(beside.alone_s) == len(beside.together_s) == 4
    for alone, together in zip(beside.alone_s, beside.together_s, strict=True):
        assert min(*alone, *together) > 0
        assert statistics.median(together) > 0.3 * statistics.median(alone)


def test_a_pair_without_rank_0_still_says_what_ran_beside(pool: Pool) -> None:
    case = case_of(Collective.P2P, size=2**20, pair=(3, 1), beside="copy:64K")
    (record,) = records_of(pool, [case], CommHow(iterations=20))
    assert isinstance(record, Measured), record
    assert record.beside is not None
    assert record.beside.backend_run
    assert len(record.beside.alone_s) == 2


def test_compute_longer_than_a_batch_gives_no_figure(pool: Pool) -> None:
    """Nothing is known of it, and the collective's own times stand."""
    case = case_of(size=64, beside="gemm:3072")
    (record,) = records_of(pool, [case], CommHow(iterations=1))
    assert isinstance(record, Measured), record
    assert record.beside is None


def test_compute_that_never_covers_is_given_up_on_all_ranks(pool: Pool) -> None:
    never = on_ranks.WithCompute(tries=math.inf, rank=2)
    cases = [case_of(beside="copy"), case_of()]
    failed, measured = records_of(pool, cases[:1], on_ranks.FEW, on_ranks.QUICK, never) + (
        records_of(pool, cases[1:])
    )
    assert isinstance(failed, Failed)
    assert "choose a longer one" in failed.message
    assert failed.ranks == (0, 1, 2, 3)
    assert isinstance(measured, Measured)


def test_compute_that_covers_after_some_tries_goes_on(pool: Pool) -> None:
    some = on_ranks.WithCompute(tries=3, rank=2)
    (record,) = records_of(
        pool, [case_of(beside="copy")], CommHow(iterations=5), on_ranks.QUICK, some
    )
    assert isinstance(record, Measured), record
    assert {len(seconds) for seconds in record.samples.seconds} == {5}
    assert record.beside is not None
    # Batches that some rank could not cover count nowhere.
    assert len({len(together) for together in record.beside.together_s}) == 1


# The thread


def sleep() -> None:
    time.sleep(2e-3)


def thread(run: Any = sleep) -> ThreadCompute:
    return ThreadCompute(Call(run=run, verify=lambda: GOOD, backend_run="sleeps"))


def test_only_calls_that_lie_within_count() -> None:
    compute = thread()
    compute.start(1.0)
    time.sleep(0.01)
    first = time.perf_counter()
    time.sleep(0.05)
    last = time.perf_counter()
    time.sleep(0.01)
    within = compute.stop((first, last))
    assert within is not None
    assert 2 <= len(within) <= 25
    assert sum(within) <= last - first
    assert min(within) >= 2e-3
    assert len(compute.alone()) >= 3


def test_nothing_goes_on_after_a_batch() -> None:
    compute, before = thread(), threading.active_count()
    for span in ((0.0, 1.0), None):
        compute.start(1.0)
        assert compute.stop(span) == []
        assert threading.active_count() == before


def test_compute_that_breaks_is_no_silence() -> None:
    left = [1, 1, 1]

    def breaks() -> None:
        left.pop()

    compute = thread(breaks)
    compute.start(1.0)
    time.sleep(0.05)
    with pytest.raises(IndexError):
        compute.stop((0.0, 1.0))
