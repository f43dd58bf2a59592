"""What tests run on each rank of a pool; the first argument is the rank's place."""

import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.collectives.cases import case_of
from tests.measuring.fakes import NoGuard, context, entries

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Record
from stepmark.collectives.bench import timing
from stepmark.collectives.bench.bench import CollectiveBench
from stepmark.collectives.bench.case_on_rank import CaseOnRank
from stepmark.collectives.bench.communicators import Communicators
from stepmark.ground.dtypes import DType
from stepmark.measuring import run_cases
from stepmark.measuring.clock import Effort
from stepmark.measuring.ranks import (
    CaseFailedError,
    LostPeersError,
    Ranks,
    agreed,
    clock_offset,
)
from stepmark.model.collectives import Collective

FEW = CommHow(iterations=3, warmups=1)
QUICK = Effort(sample_s=0.1, soak_s=0.0, min_batches=2, target_ci_rel=0.005)
# What a test changes on a rank before it measures.
Change = Callable[[pytest.MonkeyPatch, Ranks], None]


def measure(
    ranks: Ranks,
    cases: list[CommCase],
    how: CommHow = FEW,
    effort: Effort = QUICK,
    change: Change | None = None,
    launch: int = 1,
    **place: Any,
) -> list[Record]:
    """Records, on rank 0; nothing on the others."""
    records: list[Record] = []
    here = context(ranks, **place)
    mean_s = None if how.budget_s is None else how.budget_s / len(cases)
    bench = CollectiveBench(here, how, budget_s=mean_s, effort=effort)
    with pytest.MonkeyPatch.context() as patch:
        if change:
            change(patch, ranks)
        run_cases.run(
            entries(cases, launch=launch), here, {"comm": bench}, NoGuard(), records.append
        )
    gc.freeze()  # the next run would collect all of torch first, on every rank
    return records


def who(ranks: Ranks, word: str) -> tuple[int, int, str]:
    return ranks.rank, ranks.num_ranks, word


def measure_with(
    ranks: Ranks, cases: list[CommCase], more: tuple[Any, ...], place: dict[str, Any]
) -> list[Record]:
    return measure(ranks, cases, *more, **place)


@dataclasses.dataclass(frozen=True)
class Breaking:
    """On one rank the first call of this step raises, when its peers need it no more.

    Those who wait for it in a collective are for the guard to end (tests/measuring).
    """

    step: str
    rank: int

    def __call__(self, patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
        real = getattr(CaseOnRank, self.step)
        left = [1]

        def step(part: CaseOnRank, *arguments: Any, **more: Any) -> Any:
            result = real(part, *arguments, **more)
            if left and ranks.rank == self.rank:
                left.pop()
                raise ValueError(f"no {self.step}")
            return result

        patch.setattr(CaseOnRank, self.step, step)


class ScriptedCompute:
    """Compute that covers a batch only after so many tries."""

    longest_s = 1.0
    backend_run = "scripted"

    def __init__(self, tries: float) -> None:
        self._left = tries
        self.covers: list[float] = []

    def alone(self) -> list[float]:
        return [1e-3]

    def start(self, cover_s: float) -> None:
        self.covers.append(cover_s)

    def stop(self, span: tuple[Any, Any] | None) -> list[float] | None:
        self._left -= 1
        return None if self._left >= 0 else [2e-3]


@dataclasses.dataclass(frozen=True)
class WithCompute:
    """One rank's compute fails to cover the collective this often."""

    tries: float
    rank: int

    def __call__(self, patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
        tries = self.tries if ranks.rank == self.rank else 0

        def concurrent_compute(part: CaseOnRank) -> ScriptedCompute:
            return ScriptedCompute(tries)

        patch.setattr(CaseOnRank, "concurrent_compute", concurrent_compute)


def alignments(ranks: Ranks, tries: int) -> list[float]:
    moments = []
    for _ in range(tries):
        ranks.align()
        moments.append(ranks.now())
    return moments


def arrivals_and_departures(
    ranks: Ranks, tries: int, lead_s: float
) -> list[tuple[float, float]]:
    """When this rank comes to each alignment, the last one late, and when it leaves."""
    moments = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepmark.measuring.ranks._LEAD_S", lead_s)
        for _ in range(tries):
            if ranks.rank == ranks.num_ranks - 1:
                time.sleep(lead_s / 2)
            arrival = ranks.now()
            ranks.align()
            moments.append((arrival, ranks.now()))
    return moments


def offset_between_made_up_hosts(ranks: Ranks) -> tuple[float, float]:
    """Ranks 2 and 3 say that they are elsewhere, so stamps are exchanged."""
    return clock_offset(ranks.rank, ranks.num_ranks, f"host {ranks.rank // 2}")


def timers(ranks: Ranks, name: str, count: int, k: int) -> tuple[int, list[float], float, int]:
    """A host's timer with calls of 2 ms; rank 3 is outside and idles. Counts its alignments."""
    starts, calls = [0], [0]

    class Counting(Ranks):
        def align(self) -> None:
            starts[0] += 1
            Ranks.align(self)

    place = Counting(**{f.name: getattr(ranks, f.name) for f in dataclasses.fields(ranks)})

    def call() -> None:
        calls[0] += 1
        time.sleep(2e-3)

    timer: timing.Timer = timing.HostTimer([call], place, k, name=name, wait_s=0.0)
    if ranks.rank == 3:
        timer = timing.IdleTimer(place, timer.method, name == "blocking")
    batch = timer.sample(count)
    return starts[0], batch.seconds, batch.began_s, calls[0]


def communicators_in_turn(ranks: Ranks, most: int) -> tuple[int, int, bool, bool]:
    """More than are kept: how many are open at most, and after the end; equal ones in one
    launch and in the next."""
    kept = []
    one = Communicators(ranks)
    cases = [case_of(Collective.P2P, pair=pair) for pair in itertools.permutations(range(4), 2)]
    for case in cases:
        one.get(case)
        kept.append(len(one._communicators))
    same = one.get(cases[-1])
    twice = one.get(cases[-1]) is same
    again = dataclasses.replace(cases[-1], dtype=DType.BF16, count=7)
    shared = one.get(again) is same
    one.close()
    next_launch = Communicators(ranks)
    fresh = next_launch.get(cases[-1]) is not same
    next_launch.close()
    assert len(cases) > most
    return max(kept), len(one._communicators), twice and shared, fresh


def bye(ranks: Ranks) -> str:
    """Rank 1 leaves; what the other's control calls raise."""
    if ranks.rank == 1:
        os._exit(7)
    try:
        ranks.gather(1)
    except LostPeersError as error:
        return str(error)
    return "nothing"


def raise_on_one(ranks: Ranks) -> int:
    if ranks.rank == 1:
        raise ValueError("only here")
    return ranks.rank


def agree_where_one_breaks(ranks: Ranks) -> tuple[str, str, tuple[int, ...]]:
    def step() -> None:
        if ranks.rank in (1, 3):
            raise MemoryError(f"on {ranks.rank}")

    try:
        agreed(ranks, step)
    except CaseFailedError as failed:
        return failed.cause, failed.message, failed.ranks
    raise AssertionError("all went on")
