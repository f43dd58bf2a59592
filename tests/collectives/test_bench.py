"""The runner on four ranks: how many samples, what breaks, what does not fit."""

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.collectives import on_ranks
from tests.collectives.cases import case_of
from tests.collectives.on_ranks import FEW
from tests.ranks_pool import Pool

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Failed, Measured, Record, Skipped
from stepmark.collectives.bench import bench
from stepmark.collectives.bench.communicators import TorchCommunicator
from stepmark.collectives.bench.timing import Batch
from stepmark.measuring.clock import Effort
from stepmark.measuring.ranks import CaseFailedError, Ranks
from stepmark.model.collectives import Collective, Mode

# Four ranks that spin on two cores wait for the scheduler, by up to 10 ms and rarely more.
SKEW_S, SCHEDULER_S = 50e-3, 20e-3


def records_of(pool: Pool, cases: list[CommCase], *more: Any, **place: Any) -> list[Record]:
    records, *others = pool.run(on_ranks.measure_with, cases, more, place)
    assert others == [[], [], []], "only rank 0 passes records on"
    found: list[Record] = records
    return found


def one(pool: Pool, case: CommCase, *more: Any, **place: Any) -> Measured:
    (record,) = records_of(pool, [case], *more, **place)
    assert isinstance(record, Measured), record
    return record


class LateRanks:
    """Rank 0 of two, of which the other begins every batch half a second later."""

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            seconds, began_s, *others = value
            return [value, (seconds, began_s + 0.5, *others)]
        return [value, value]

    def decide(self, decision: Callable[[], Any]) -> Any:
        return decision()


class OneRank:
    def gather(self, value: Any) -> list[Any]:
        return [value]


class OneSecond:
    """A timer whose samples take a second each, begun at second 10."""

    method, calls_per_sample, lead_s = "queued/1", 1, 0.0

    def sample(self, count: int) -> Batch:
        return Batch(seconds=[1.0] * count, began_s=10.0, issue_s=0.1)


def test_the_delay_of_a_rank_is_counted_from_the_first_rank() -> None:
    ranks = cast("Ranks", LateRanks())
    samples = bench.collect(ranks, OneSecond(), None, 1.0, Effort(), 2, 1000)
    assert samples.late_s == [[0.0, 0.5]] * 2
    assert samples.seconds == [1.0, 1.0]


class LateTwice(OneSecond):
    """A host that enqueues calls too late, until it has four times as long."""

    method = "queued-ahead/1"

    def __init__(self) -> None:
        self.leads_s: list[float] = []

    def sample(self, count: int) -> Batch:
        self.leads_s.append(self.lead_s)
        is_late = len(self.leads_s) < 3
        seconds = [9.0 if is_late else 1.0] * count
        return Batch(seconds=seconds, began_s=10.0, issue_s=1e-3, is_late=is_late)


def test_a_batch_that_the_device_did_not_wait_for_is_measured_again() -> None:
    """With twice the time for the host; what was late is in no sample."""
    timer = LateTwice()
    samples = bench.collect(cast("Ranks", LateRanks()), timer, None, 1.0, Effort(), 2, 1)
    assert samples.seconds == [1.0, 1.0]
    assert timer.leads_s[1:] == pytest.approx([9e-3, 18e-3, 18e-3])  # 3 calls of 1 ms x 3, x 6


def test_a_host_that_is_always_late_is_named() -> None:
    class Late(OneSecond):
        def sample(self, count: int) -> Batch:
            return Batch(seconds=[1.0], began_s=0.0, issue_s=1.0, is_late=True)

    with pytest.raises(CaseFailedError, match="--mode queued or graph"):
        bench.collect(cast("Ranks", OneRank()), Late(), None, 1.0, Effort(), 1, 1)


# How many samples


@pytest.mark.parametrize("iterations", [1, 7, 20, 101])
def test_a_fixed_number_of_samples_is_exact_and_the_same_on_all_ranks(
    pool: Pool, iterations: int
) -> None:
    samples = one(pool, case_of(), CommHow(iterations=iterations)).samples
    counts = {len(seconds) for seconds in samples.seconds}
    k = samples.calls_per_sample
    assert counts == {-(-iterations // k)}
    assert k <= max(1, iterations // 5), "at least five samples show how they spread"


def test_calls_that_wait_are_samples_each(pool: Pool) -> None:
    record = one(pool, case_of(mode=Mode.BLOCKING), CommHow(iterations=11))
    assert record.samples.calls_per_sample == 1
    assert [len(seconds) for seconds in record.samples.seconds] == [11] * 4


@pytest.mark.alone
def test_without_a_number_it_ends_within_its_time(pool: Pool) -> None:
    begin = time.monotonic()
    record = one(pool, case_of(), CommHow(), Effort(sample_s=0.3, target_ci_rel=1e-9))
    assert 0.3 <= record.samples.wall_s < time.monotonic() - begin < 5
    counts = {len(seconds) for seconds in record.samples.seconds}
    assert len(counts) == 1
    assert counts.pop() > 5


def test_it_ends_as_soon_as_it_is_certain(pool: Pool) -> None:
    easy = Effort(sample_s=30, target_ci_rel=10.0, min_batches=3)
    record = one(pool, case_of(), CommHow(), easy)
    assert record.arrivals is not None
    assert {len(late) for late in record.arrivals.late_s} == {3}, "no more batches than asked"


def test_a_record_holds_what_a_reader_needs(pool: Pool) -> None:
    record = one(
        pool, case_of(), CommHow(iterations=4, warmups=3), cache_bytes=10_000, launch=2
    )
    assert record.launch == 2
    assert record.backend_run == "gloo"
    assert record.samples.method == "queued/1"
    assert record.samples.num_sets == 6  # twice the cache and one more
    assert record.peak_memory_bytes is None
    assert len(record.telemetry) == 4
    arrivals = record.arrivals
    assert arrivals is not None
    assert arrivals.warmup_calls == 3
    assert arrivals.error_s == 0.0
    assert all(late >= 0 for late_s in arrivals.late_s for late in late_s)
    assert min(late_s[0] for late_s in arrivals.late_s) == 0.0, "someone is first"
    assert all(issue > 0 for issue in arrivals.issue_s)
    assert all(value > 0 for seconds in record.samples.seconds for value in seconds)


def test_no_check_is_no_check(pool: Pool) -> None:
    assert one(pool, case_of(), CommHow(iterations=1, checks=0)).checks == ()


# What is wrong, breaks or does not fit


def one_element_is_changed(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    bind = TorchCommunicator.bind

    def corrupting(self: Any, case: CommCase, index: int, send: Any, recv: Any) -> Any:
        call = bind(self, case, index, send, recv)

        def issue() -> None:
            call()
            recv[-1] += 1.0

        return issue if ranks.rank == 2 else call

    patch.setattr(TorchCommunicator, "bind", corrupting)


@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, Collective.ALL_TO_ALL])
def test_one_wrong_element_is_seen_where_it_is(pool: Pool, kind: Collective) -> None:
    record = one(pool, case_of(kind), FEW, on_ranks.QUICK, one_element_is_changed)
    assert [check.num_wrong for check in record.checks] == [0, 0, 1, 0]
    assert record.num_wrong == 1


@pytest.mark.parametrize(
    "step", ["allocate", "bind", "warm_up", "estimate", "timer", "concurrent_compute"]
)
def test_a_rank_that_breaks_ends_the_case_for_all(pool: Pool, step: str) -> None:
    change = on_ranks.Breaking(step, rank=2)
    failed, measured = records_of(
        pool, [case_of(size=1024), case_of(size=4096)], FEW, on_ranks.QUICK, change
    )
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.ranks) == ("error", (2,))
    assert failed.message == f"no {step}"
    assert "ValueError" in failed.traceback
    assert isinstance(measured, Measured)
    assert measured.num_wrong == 0


def test_what_does_not_fit_is_skipped_with_its_bytes(pool: Pool) -> None:
    cases = [case_of(size=2**20), case_of()]
    skipped, measured = records_of(pool, cases, FEW, free_bytes=2**21)
    assert isinstance(skipped, Skipped)
    assert skipped.needed_bytes == 17 * 2**20  # the buffer, and what its check takes
    assert skipped.reason == "needs 17 MiB, 2 MiB are free"
    assert isinstance(measured, Measured)


def test_who_has_no_room_is_named(pool: Pool) -> None:
    case = case_of(Collective.GATHER, size=2**20, root=3)
    (skipped,) = records_of(pool, [case], FEW, free_bytes=18 * 2**20)
    assert isinstance(skipped, Skipped)
    assert skipped.reason.endswith("(rank 3)")  # it alone receives


def test_a_budget_is_shared_by_all_cases(pool: Pool) -> None:
    cases = [case_of(size=1024 * i) for i in range(1, 5)]
    begin = time.monotonic()
    records = records_of(pool, cases, CommHow(budget_s=1.0), Effort(sample_s=30))
    assert time.monotonic() - begin < 6  # not 120 s; a busy machine adds
    assert all(isinstance(record, Measured) for record in records)


# What a time is


def sleeping(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Each call takes 4 ms and moves nothing."""
    patch.setattr(TorchCommunicator, "_sends_and_receives", lambda *_: lambda: time.sleep(4e-3))


def test_a_ping_pongs_time_is_one_way(pool: Pool) -> None:
    cases = [case_of(Collective.PING_PONG), case_of(Collective.P2P)]
    how = CommHow(iterations=5, checks=0)
    there_and_back, there = records_of(pool, cases, how, on_ranks.QUICK, sleeping)
    assert isinstance(there, Measured)
    assert isinstance(there_and_back, Measured)
    for whole, half in zip(there.samples.seconds, there_and_back.samples.seconds, strict=True):
        assert min(whole) >= 4e-3
        assert 2e-3 <= min(half) < 4e-3


@pytest.mark.parametrize("mode", [Mode.QUEUED, Mode.BLOCKING])
def test_who_comes_last_waits_least(pool: Pool, mode: Mode) -> None:
    """The first rank's time holds the skew, the last one's does not."""
    waits = []
    for _ in range(3):
        record = one(pool, case_of(mode=mode, skew_s=SKEW_S), CommHow(iterations=15))
        assert record.samples.calls_per_sample == 1
        medians = [statistics.median(seconds) for seconds in record.samples.seconds]
        waits.append(medians[0] - medians[3])
        if abs(waits[-1] - SKEW_S) < SCHEDULER_S:
            break
    assert waits[-1] == pytest.approx(SKEW_S, abs=SCHEDULER_S), waits
