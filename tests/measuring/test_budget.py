"""The budget on a fake clock: what begins, what is skipped, and that it is said."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from stepmark.cases.case import OpCase
from stepmark.cases.plan import Entry, Plan
from stepmark.cases.plan import entries as of_plan
from stepmark.cases.record import Measured, Record, Samples, Skipped
from stepmark.measuring import context as contexts
from stepmark.measuring import rank, run_cases
from stepmark.measuring.measure import BEGAN
from stepmark.measuring.rank import Rank
from stepmark.measuring.ranks import CaseFailedError
from stepmark.measuring.run_cases import Bench
from stepmark.model.ops import Gemm
from stepmark.operators.bench import bench as operators
from stepmark.operators.bench.call import Call

from .fakes import GOOD, NoGuard, context, entries, gemm, impl


@dataclass
class FakeClock:
    """A clock that only work moves."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    for module in (contexts, run_cases, operators, rank):
        monkeypatch.setattr(module, "time", fake)
    return fake


@dataclass
class FakeBench(Bench):
    """Its cases take the seconds of `seconds_of`, a fifth of them for a call."""

    clock: FakeClock
    seconds_of: Callable[[OpCase], float]
    begun: list[OpCase] = field(default_factory=list)

    budget_s = None

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        return None

    def limit_s(self, share_s: float | None) -> float:
        return 1e9

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        case = entry.case
        assert isinstance(case, OpCase)
        self.begun.append(case)
        seconds = self.seconds_of(case)
        self.clock.now_s += seconds
        return Measured(
            run_id="r",
            case=case,
            samples=Samples(seconds=((seconds / 5,),), method="fake/1"),
            checks=(GOOD,),
            telemetry=(),
            backend_run="fake",
            peak_memory_bytes=None,
            started_at=0.0,
        )


def spent(
    clock: FakeClock,
    cases: list[OpCase],
    seconds_of: Callable[[OpCase], float],
    budget_s: float,
) -> tuple[float, list[Record], FakeBench]:
    """Run the cases; return the seconds that it took, the records and the bench."""
    begin = clock.now_s
    records: list[Record] = []
    bench = FakeBench(clock, seconds_of)
    place = replace(context(), end_s=begin + budget_s)
    run_cases.run(entries(cases), place, {"op": bench}, NoGuard(), records.append)
    return clock.now_s - begin, records, bench


@pytest.mark.parametrize("seed", range(12))
def test_no_budget_is_exceeded_by_more_than_a_case(seed: int, clock: FakeClock) -> None:
    draw = random.Random(seed)
    cases = [gemm(size=16 * i) for i in range(1, 12)]
    seconds = {case: draw.lognormvariate(0, 2) for case in cases}
    budget_s = draw.lognormvariate(1, 1.5)
    spent_s, records, bench = spent(clock, cases, seconds.__getitem__, budget_s)
    assert spent_s <= budget_s + max(map(seconds.__getitem__, bench.begun))
    assert [record.case for record in records] == cases, "each case has a record"
    skipped = [record for record in records if isinstance(record, Skipped)]
    assert len(skipped) == len(cases) - len(bench.begun)
    assert all(record.reason.startswith("--budget leaves ") for record in skipped)
    assert bench.begun[0] == cases[0], "something is measured"


@pytest.mark.parametrize("seed", range(12))
def test_what_earlier_cases_tell_to_be_too_long_does_not_begin(
    seed: int, clock: FakeClock
) -> None:
    """Times grow with the work: after the first case no other exceeds the budget."""
    draw = random.Random(seed)
    cases = [gemm(size=draw.choice((64, 128, 256, 512, 1024))) for _ in range(8)]
    cases = list(dict.fromkeys(cases))
    rate = draw.uniform(1e-7, 1e-6)

    def seconds_of(case: OpCase) -> float:
        return rate * max(case.op.flops, case.op.bytes_moved)

    budget_s = draw.uniform(0.1, 100)
    spent_s, records, bench = spent(clock, cases, seconds_of, budget_s)
    # A call shorter than 10 ms tells nothing.
    if seconds_of(cases[0]) >= 5 * 10e-3:
        assert spent_s <= max(budget_s, seconds_of(cases[0])) * (1 + 1e-9)
    if sum(map(seconds_of, cases)) < budget_s:
        assert bench.begun == cases
    for record in records:
        if isinstance(record, Skipped) and "nothing" not in record.reason:
            assert "and it takes at least" in record.reason


def test_a_short_call_or_another_backend_tells_nothing(clock: FakeClock) -> None:
    large = gemm(size=2048)
    seconds = {gemm(size=16): 0.02, large: 1.0, gemm("b", size=64): 3.0}
    _, _, bench = spent(clock, list(seconds), seconds.__getitem__, 2.0)
    assert bench.begun == list(seconds), "by its rate the large product would take hours"


@pytest.mark.parametrize(
    "sizes_s", [{16: 0.055, 32: 0.001, 1024: 1.0}, {512: 0.1, 16: 0.055, 1024: 1.0}]
)
def test_a_faster_call_corrects_the_rate(sizes_s: dict[int, float], clock: FakeClock) -> None:
    """A busy host interrupts a small product for 11 ms."""
    seconds = {gemm(size=size): seconds for size, seconds in sizes_s.items()}
    _, _, bench = spent(clock, list(seconds), seconds.__getitem__, 50.0)
    assert bench.begun == list(seconds)


def test_without_a_budget_everything_is_measured(clock: FakeClock) -> None:
    cases = [gemm(size=16 * i) for i in range(1, 5)]
    _, records, _ = spent(clock, cases, lambda case: 1e6, math.inf)
    assert all(isinstance(record, Measured) for record in records)


@pytest.mark.parametrize(("set_s", "num_made"), [(0.5, 5), (4.0, 2)])
def test_operand_sets_that_do_not_fit_are_not_made(
    set_s: float, num_made: int, clock: FakeClock
) -> None:
    """The first set compiles: it does not tell what the others take."""
    begin = clock.now_s
    made: list[float] = []

    def make(_op: object, _device: torch.device) -> Call:
        clock.now_s += set_s if made else 90.0
        made.append(clock.now_s - begin)
        return Call(run=lambda: None, verify=lambda: GOOD, backend_run="fake")

    place = replace(context(), end_s=begin + 100.0)
    whole = impl(make=make)
    whole.make(gemm().op, place.ranks.device)
    too_late = pytest.raises(CaseFailedError, match="leaves 6 s, and it takes at least 12 s")
    with nullcontext() if num_made == 5 else too_late:
        operators._other_sets(gemm(), whole, place, 4)
    assert len(made) == num_made
    assert clock.now_s - begin <= 100.0


def test_the_last_sets_are_made_however_late(clock: FakeClock) -> None:
    """A case of two sets has begun in time, and needs no further one."""
    place = replace(context(), end_s=clock.now_s - 1)
    assert len(operators._other_sets(gemm(), impl(), place, 1)) == 1
    assert operators._other_sets(gemm(), impl(), place, 0) == []


# When the budget of a command ends


def plan(budget: str | None, *, command: str = "op") -> Plan:
    first, second = of_plan([OpCase(op=Gemm(m=1, n=1, k=1), backend="x", device="cpu")], 2)
    return Plan(
        command=command,
        device="cpu",
        world_size=1,
        options={"budget": budget},
        entries=(first, replace(second, position=1)),
    )


@pytest.mark.parametrize(
    ("budget", "command", "age_s", "expected_s"),
    [
        ("20s", "op", 4.0, 30.0),
        ("1s", "op", 4.0, 6.0),  # its ranks take four to start
        ("20s", "run", 4.0, 20.0),  # and then its step
        ("1s", "run", 4.0, 6.0),
        (None, "op", 4.0, math.inf),
    ],
)
def test_the_end_of_a_budget(
    budget: str | None,
    command: str,
    age_s: float,
    expected_s: float,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began_s = clock.now_s - 7.0  # some launches before
    monkeypatch.setenv(BEGAN, str(began_s))
    heartbeat = SimpleNamespace(first=1)
    one = Rank(plan(budget, command=command), None, heartbeat, force=False)  # type: ignore[arg-type]
    assert one._end_s(age_s) == began_s + expected_s


def test_the_first_case_begins_however_late(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEGAN, str(clock.now_s - 60.0))  # the machine was busy
    heartbeat = SimpleNamespace(first=0)
    one = Rank(plan("1s"), None, heartbeat, force=False)  # type: ignore[arg-type]
    assert one._end_s(0.1) == clock.now_s + 30.0


def test_a_rank_of_another_host_does_not_know_when_the_command_began(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BEGAN, raising=False)
    heartbeat = SimpleNamespace(first=0)
    one = Rank(plan("10s"), None, heartbeat, force=False)  # type: ignore[arg-type]
    assert one._end_s(3.0) == clock.now_s - 3.0 + 15.0


def test_a_launcher_counts_from_the_start_of_its_ranks(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEGAN, "-1e9")  # of a command that this one is a part of
    monkeypatch.setattr(rank, "Watchdog", lambda on_timeout: SimpleNamespace(first=0))
    one = Rank(plan("10s"), None, None, force=False)
    assert one._end_s(3.0) == clock.now_s - 3.0 + 15.0


def test_plans_know_their_budget() -> None:
    budgets = [plan(text).budget_s for text in ("20s", "2m", "", None)]
    assert budgets == [20.0, 120.0, None, None]
