"""The runner on a fake clock: when it stops, what it records, what it survives."""

import gc
import itertools
import random
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.measuring.two_ranks import measure_and_check
from tests.ranks_pool import Pool

from stepmark.cases.case import OpCase, Rate
from stepmark.cases.plan import Entry, OpHow
from stepmark.cases.record import Check, Failed, Measured, Record, Skipped
from stepmark.ground.dtypes import DType
from stepmark.ground.stats import summarize
from stepmark.measuring import clock, run_cases
from stepmark.measuring.clock import Effort
from stepmark.measuring.ranks import Ranks, cause_of
from stepmark.model.ops import EmbeddingBag, Gemm, Norm, Op
from stepmark.operators.bench import bench as operators
from stepmark.operators.bench.bench import OperatorBench
from stepmark.operators.bench.call import Call

from .fakes import GOOD, WRONG, FakeTimer, NoGuard, context, entries, gemm, impl, install

pytestmark = pytest.mark.ranks

QUICK = Effort(sample_s=0.05, soak_s=0.0)


def steady() -> Iterator[float]:
    return itertools.repeat(1e-3)


def stepping() -> Iterator[float]:
    return itertools.cycle((1e-3, 1.01e-3))


def noisy(spread: float, seed: int = 1) -> Callable[[], Iterator[float]]:
    def times() -> Iterator[float]:
        rng = random.Random(seed)
        while True:
            yield rng.gauss(1, spread) * 1e-3

    return times


def run(
    cases: list[OpCase],
    effort: Effort = QUICK,
    *,
    budget_s: float | None = None,
    records: list[Record] | None = None,
    **more: int,
) -> list[Record]:
    """budget_s: of all cases together."""
    place, records = context(**more), [] if records is None else records
    mean_s = None if budget_s is None else budget_s / len(cases)
    bench = OperatorBench(place, OpHow(), budget_s=mean_s)
    bench.effort = effort
    run_cases.run(entries(cases), place, {"op": bench}, NoGuard(), records.append)
    assert len(records) == len(cases)
    assert [record.case for record in records] == cases
    return records


def one(case: OpCase, effort: Effort = QUICK) -> Measured:
    (record,) = run([case], effort)
    assert isinstance(record, Measured), record
    return record


def test_every_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(monkeypatch, {"good": impl()}, noisy(0.3))
    record = one(gemm())
    assert record.samples.seconds == (tuple(made[0].given),)
    assert record.samples.method == "fake/1"
    assert record.checks == (GOOD,)
    assert record.backend_run == "fake"


def test_steady_times_stop_early(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, steady)
    record = one(gemm(), Effort(sample_s=30, soak_s=0))
    assert len(record.samples.seconds[0]) == 5 * 100  # five batches of 0.1 s, all alike


def test_batches_last_a_tenth_of_a_second_whatever_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that launches late makes the estimate of a call ten times as long."""
    install(monkeypatch, {"good": impl()}, steady, call_s=1e-2)
    record = one(gemm(), Effort(sample_s=30, soak_s=0))
    assert record.samples.batches == (10, 100, 100, 100, 100)


def test_a_device_at_its_limit_is_never_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product at the power limit can be alike for half a second and 2 % off (H200)."""
    monkeypatch.setattr(operators.Sampler, "is_limited", lambda _: True)
    install(monkeypatch, {"good": impl()}, steady)
    record = one(gemm(), Effort(sample_s=30, soak_s=0))
    assert len(record.samples.batches) == clock.MIN_BATCHES


@pytest.mark.parametrize("is_limited", [False, True])
def test_what_is_flat_at_once_needs_no_soak_of_its_own(
    is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device at its limit the first batches are left out of samples and telemetry."""

    class Slow(FakeTimer):
        def sample(self, count: int) -> list[float]:
            time.sleep(0.02)
            return super().sample(count)

    forgotten: list[object] = []
    monkeypatch.setattr(operators.Sampler, "is_limited", lambda _: is_limited)
    monkeypatch.setattr(operators.Sampler, "forget", lambda _: forgotten.append(None))
    monkeypatch.setattr(operators, "_OWN_SOAK_S", 0.15)
    install(monkeypatch, {"good": impl()}, steady)
    timers: list[Slow] = []
    monkeypatch.setattr(
        clock, "choose", lambda *_, **__: timers.append(Slow(steady())) or timers[-1]
    )
    effort = Effort(sample_s=2.0, soak_s=0.5)
    (_, record) = run([gemm(size=16), gemm(size=32)], effort)
    assert isinstance(record, Measured)
    given, seconds = timers[-1].given, record.samples.seconds[0]
    if is_limited:
        assert len(record.samples.batches) == clock.MIN_BATCHES
        assert len(given) - len(seconds) >= 7 * 100, "0.15 s of batches of 0.02 s"
        assert len(forgotten) == 2
    else:
        assert (len(seconds), len(given)) == (5 * 100, 5 * 100)
        assert not forgotten
    assert record.samples.soak_s >= 0.5


def test_noise_asks_for_more_until_it_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, noisy(0.05))
    record = one(gemm(), Effort(sample_s=30, soak_s=0, target_ci_rel=0.002))
    found = summarize(record.samples.seconds[0])
    assert found.ci_rel < 0.002
    assert found.n > 500


def test_the_budget_ends_what_never_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeTimer):
        def sample(self, count: int) -> list[float]:
            time.sleep(0.02)
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, noisy(0.5))
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Slow(noisy(0.5)()))
    begin = time.monotonic()
    record = one(gemm(), Effort(sample_s=0.2, soak_s=0, target_ci_rel=1e-9))
    assert 0.2 <= time.monotonic() - begin < 2
    assert record.samples.wall_s >= 0.2


def test_no_more_than_the_most_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, noisy(0.9))
    record = one(gemm(), Effort(sample_s=60, soak_s=0, target_ci_rel=0))
    assert 20_000 <= len(record.samples.seconds[0]) <= 21_000


@pytest.mark.parametrize("rate", Rate)
@pytest.mark.parametrize("steps", [1, 7, 234])
def test_steps_and_warmups_are_exact(
    rate: Rate, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "BURST_IDLE_S", 0.0)
    calls: list[int] = []

    def make(op: object, device: torch.device) -> Call:
        number = next(numbers)
        return Call(run=lambda: calls.append(number), verify=lambda: GOOD, backend_run="fake")

    numbers = itertools.count()
    timers = install(monkeypatch, {"good": impl(make=make)}, noisy(0.5))
    case, place = gemm(rate=rate), context(cache_bytes=2 * Gemm(m=16, n=16, k=16).memory_bytes)
    bench, records = OperatorBench(place, OpHow(steps=steps, warmups=7)), list[Record]()
    run_cases.run(entries([case]), place, {"op": bench}, NoGuard(), records.append)
    (record,) = records
    assert isinstance(record, Measured), record
    assert record.samples.num_sets == 5
    assert calls == [3, 4, 0, 1, 2, 3, 4], "the first sample uses the set used longest ago"
    assert record.samples.seconds == (tuple(timers[0].given),)
    assert len(record.samples.seconds[0]) == steps
    assert record.samples.warmup_calls == 7
    assert record.samples.soak_s < 1


def test_steps_alone_keep_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, steady)
    place, records = context(), list[Record]()
    bench = OperatorBench(place, OpHow(steps=3, soak_s=0.05))
    run_cases.run(entries([gemm()]), place, {"op": bench}, NoGuard(), records.append)
    (record,) = records
    assert isinstance(record, Measured), record
    assert len(record.samples.seconds[0]) == 3
    assert record.samples.soak_s >= 0.05
    assert record.samples.warmup_calls == 0


def test_fewer_than_ten_batches_are_never_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are alike: two steps of 1 % are not."""
    made = install(monkeypatch, {"good": impl()}, stepping, call_s=10.0)  # one sample a batch
    record = one(gemm(), Effort(sample_s=60, soak_s=0))
    assert len(record.samples.seconds[0]) == len(made[0].given) >= 10


def test_a_total_budget_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeTimer):
        def sample(self, count: int) -> list[float]:
            time.sleep(0.01)
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, noisy(0.5))
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Slow(noisy(0.5)()))
    begin = time.monotonic()
    effort = Effort(sample_s=60, soak_s=60, target_ci_rel=0)
    records = run([gemm(size=16 * i) for i in range(1, 6)], effort, budget_s=1.0)
    assert time.monotonic() - begin < 5  # 1 s, and what a busy machine adds; not 5 x 120 s
    walls = [r.samples.wall_s for r in records if isinstance(r, Measured)]
    assert len(walls) == 5
    assert all(0 < wall < 0.6 for wall in walls)


def test_a_spent_budget_still_measures_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, steady)
    records = run([gemm(size=16), gemm(size=32)], Effort(), budget_s=1e-9)
    assert all(isinstance(r, Measured) and r.samples.seconds[0] for r in records)


def test_soak_runs_the_case_and_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FakeTimer):
        calls = 0

        def sample(self, count: int) -> list[float]:
            time.sleep(0.005)
            Counting.calls += 1
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, steady)
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Counting(steady()))
    record = one(gemm(), Effort(sample_s=0.05, soak_s=0.1))
    assert 0.1 <= record.samples.soak_s < 1
    assert Counting.calls > 5
    assert one(gemm(rate=Rate.BURST), Effort(sample_s=0.05, soak_s=9)).samples.soak_s == 0


def test_the_load_of_the_case_before_counts_as_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause it does not, and neither does that of bursts."""

    class Slow(FakeTimer):
        def sample(self, count: int) -> list[float]:
            time.sleep(0.01)
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, steady)
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Slow(steady()))
    monkeypatch.setattr(operators, "_OWN_SOAK_S", 0.05)
    effort = Effort(sample_s=0.2, soak_s=0.5)
    begin = time.monotonic()
    first, second = run([gemm(size=16), gemm(size=32)], effort)
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)
    assert first.samples.soak_s >= 0.5
    assert second.samples.soak_s >= 0.5
    assert second.samples.wall_s < 0.5, "it has only its own soak"
    monkeypatch.setattr(operators, "_PAUSE_S", 0.0)
    (_, again) = run([gemm(size=16), gemm(size=32)], effort)
    assert isinstance(again, Measured)
    assert again.samples.wall_s >= 0.5
    assert time.monotonic() - begin < 20


def test_alike_within_a_batch_is_not_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that drifts: 100 equal samples a batch, another level in the next."""

    def drifting() -> Iterator[float]:
        for level in itertools.cycle((1.0, 1.2)):
            yield from itertools.repeat(level * 1e-3, 100)

    install(monkeypatch, {"good": impl()}, drifting)
    record = one(gemm(), Effort(sample_s=60, soak_s=0))
    assert len(record.samples.seconds[0]) >= 20_000


def test_bursts_idle_before_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    idles: list[float] = []
    batches: list[int] = []

    class Watched(FakeTimer):
        def sample(self, count: int) -> list[float]:
            batches.append(count)
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, noisy(0.02))
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Watched(noisy(0.02)()))
    monkeypatch.setattr("stepmark.measuring.telemetry._PAUSES_S", ())
    monkeypatch.setattr(operators.time, "sleep", idles.append)
    one(gemm(rate=Rate.BURST), Effort(sample_s=5, target_ci_rel=0.005))
    assert idles == [1.0] * len(batches)
    assert len(batches) > 1
    assert max(batches) * 1e-3 <= 20e-3  # at most 20 ms of work
    idles.clear()
    one(gemm(), Effort(soak_s=0, sample_s=5))
    assert idles == []


def test_half_load_idles_as_long_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    class Working(FakeTimer):
        calls_per_sample = 2

        def sample(self, count: int) -> list[float]:
            batches.append(count)
            time.sleep(count * 2e-3)
            return super().sample(count)

    install(monkeypatch, {"good": impl()}, steady)
    monkeypatch.setattr(clock, "choose", lambda *_, **__: Working(steady()))
    samples = one(gemm(rate=Rate.HALF), Effort(sample_s=0.3, soak_s=9)).samples
    assert samples.soak_s == 0
    assert len(batches) > 2
    assert set(batches) == {5}  # 10 ms of work
    assert samples.wall_s >= (2 * sum(batches) - 5) * 2e-3  # no pause after the last


# What goes wrong


def test_a_missing_backend_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl()}, steady)
    skipped, measured = run([gemm("none"), gemm()])
    assert isinstance(skipped, Skipped)
    assert "no backend none" in skipped.reason
    assert "good" in skipped.reason
    assert isinstance(measured, Measured)


def test_what_a_backend_cannot_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(op: object, device: torch.device) -> None:
        raise AssertionError("allocated although unsupported")

    backend = impl(make=never, unsupported=lambda op, caps: f"not on {caps.device_type}")  # type: ignore[arg-type]
    install(monkeypatch, {"bad": backend, "good": impl()}, steady)
    skipped, measured = run([gemm("bad"), gemm()])
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "not on cpu"
    assert isinstance(measured, Measured)


def test_what_does_not_fit_is_skipped_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy = impl(extra_bytes=lambda op: 2**40)
    install(monkeypatch, {"greedy": greedy, "good": impl()}, steady)
    skipped, measured = run([gemm("greedy"), gemm()])
    assert isinstance(skipped, Skipped)
    assert skipped.needed_bytes == 2**40 + gemm().op.memory_bytes
    assert "1 TiB" in skipped.reason
    assert "1 GiB are free" in skipped.reason
    assert isinstance(measured, Measured)


def raising(error: Exception) -> Callable[..., object]:
    def broken(*_: object) -> object:
        raise error

    return broken


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB\nmore"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    RuntimeError("HIP error: out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
@pytest.mark.parametrize("where", ["make", "verify"])
def test_out_of_memory_is_one_cases_fate(
    monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    backend = impl(**{where: raising(error)})  # type: ignore[arg-type]
    install(monkeypatch, {"bad": backend, "good": impl()}, steady)
    failed, measured = run([gemm("bad"), gemm()])
    assert isinstance(failed, Failed)
    assert failed.cause == "oom"
    assert "\n" not in failed.message
    assert failed.ranks == (0,)
    assert isinstance(measured, Measured)


@pytest.mark.parametrize("where", ["make", "verify", "sample"])
def test_an_exception_is_recorded_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    error = ValueError("first line\nsecond line")
    made = {"bad": impl(), "good": impl()}
    if where != "sample":
        made["bad"] = impl(**{where: raising(error)})  # type: ignore[arg-type]
    install(monkeypatch, made, steady)
    if where == "sample":
        timers = iter([raising(error), FakeTimer(steady()).sample])

        def choose(*_: object, **__: object) -> FakeTimer:
            timer = FakeTimer(steady())
            timer.sample = next(timers)  # type: ignore[method-assign, assignment]
            return timer

        monkeypatch.setattr(clock, "choose", choose)
    failed, measured = run([gemm("bad"), gemm()])
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.message) == ("error", "first line")
    assert "Traceback" in failed.traceback
    assert "second line" in failed.traceback
    assert isinstance(measured, Measured)


def test_an_error_without_words_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"bad": impl(verify=raising(AssertionError()))}, steady)  # type: ignore[arg-type]
    (failed,) = run([gemm("bad")])
    assert isinstance(failed, Failed)
    assert failed.message == "AssertionError"


def test_a_wrong_result_is_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"good": impl(verify=lambda: WRONG)}, steady)
    assert one(gemm()).num_wrong == 4


def test_an_interrupt_is_not_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        {"good": impl(), "stop": impl(verify=raising(KeyboardInterrupt()))},  # type: ignore[arg-type]
        steady,
    )
    records: list[Record] = []
    with pytest.raises(KeyboardInterrupt):
        run([gemm(), gemm("stop"), gemm()], records=records)
    assert len(records) == 1


@pytest.mark.parametrize(
    ("cache", "free", "expected"),
    [
        (0, 2**30, 2),
        (15360, 2**30, 21),
        (2**40, 2**50, 128),
        (2**40, 16 * 1536, 8),
        (0, 2000, 1),
    ],
)
def test_operand_sets_pass_twice_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: int, free: int, expected: int
) -> None:
    install(monkeypatch, {"good": impl()}, steady)
    (record,) = run([gemm()], free_bytes=free, cache_bytes=cache)
    assert isinstance(record, Measured)
    assert gemm().op.memory_bytes == 1536
    assert record.samples.num_sets == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # 8 MiB each, of which a call touches 4: 2 x 32 / 4 + 1 sets.
        (Norm(tokens=1024, hidden=512, dtype=DType.FP32), 17),
        # A table of 512 MiB is not copied beyond 64 caches.
        (EmbeddingBag(rows=2**20, dim=128, pooling=1, batch=1), 3),
    ],
)
def test_sets_are_as_many_as_calls_touch(op: Op, expected: int) -> None:
    case = OpCase(op=op, backend="torch", device="cpu")
    place = context(free_bytes=2**40, cache_bytes=32 * 2**20)
    assert operators._num_sets(case, impl(), place) == expected


class FakeMemory:
    """torch.cuda's counters of allocated bytes."""

    def __init__(self) -> None:
        self.allocated, self.peak = 1000, 5000

    def use(self, kept: int, peak: int) -> None:
        self.peak = max(self.peak, self.allocated + peak)
        self.allocated += kept

    def reset(self, *_device: object) -> None:
        self.peak = self.allocated

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        # Frees the workspace of the reference's products.
        monkeypatch.setattr(operators, "collect", lambda _context: self.use(-32, 0))


def test_the_memory_of_an_operator_has_no_reference_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = FakeMemory()
    memory.install(monkeypatch)

    def make(_op: object, _device: torch.device) -> Call:
        memory.use(kept=100, peak=150)  # made of random numbers in another type

        def verify() -> Check:
            memory.use(kept=32, peak=10_000)
            return GOOD

        return Call(run=lambda: memory.use(kept=8, peak=8), verify=verify, backend_run="fake")

    place = context(Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cuda", 0)))
    _, check, peak_bytes = operators._checked_set(gemm(), impl(make=make), place)
    assert (check, peak_bytes) == (GOOD, 108)


def test_nothing_is_collected_while_operators_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled: list[bool] = []

    def times() -> Iterator[float]:
        while True:
            enabled.append(gc.isenabled())
            yield 1e-3

    install(monkeypatch, {"good": impl()}, times)
    run([gemm()], Effort(sample_s=0.05, soak_s=0.01))
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


class Node:
    """A node of a cycle, which only a garbage collection frees."""

    def __init__(self) -> None:
        self.node = self


def test_what_a_case_leaves_is_collected_once_and_its_garbage_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch.compile does, the first case leaves many objects."""
    left: list[list[int]] = []
    garbage: list[weakref.ref[Node]] = []
    exempt: list[int] = []

    def make(_op: object, _device: torch.device) -> Call:
        exempt.append(gc.get_freeze_count())
        assert all(node() is None for node in garbage)
        node = Node()
        garbage.append(weakref.ref(node))
        left.extend([number] for number in range(1000))
        return Call(run=lambda: node, verify=lambda: GOOD, backend_run="fake")

    install(monkeypatch, {"good": impl(make=make)}, steady)
    before = gc.get_freeze_count()
    run([gemm(), gemm(size=32)])
    assert exempt[-1] - exempt[0] >= 1000
    assert all(node() is None for node in garbage)
    assert gc.get_freeze_count() <= before


def test_two_ranks_agree() -> None:
    """On a skip, on a failure of one, on wrong data; uneven ranks take as many samples."""
    with Pool(2) as pool:
        pool.run(measure_and_check, timeout_s=120)


def test_the_start_of_processes_counts_in_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float | None] = []
    install(monkeypatch, {"good": impl()}, steady)
    bench = OperatorBench(context(), OpHow(), budget_s=10.0)
    plain = bench.measure

    def noted(entry: Entry, share_s: float | None) -> Measured:
        shares.append(share_s)
        return plain(entry, 0.01)

    monkeypatch.setattr(bench, "measure", noted)
    cases = entries([gemm(size=16), gemm(size=32)])
    benches = {"op": bench}
    run_cases.run(cases, context(), benches, NoGuard(), lambda record: None, start_s=14.0)
    assert shares[0] == pytest.approx(3.0)  # of 2 x 10 s, 6 s are left for two cases
    assert 5 < (shares[1] or 0) <= 6


def test_a_case_that_the_system_fails_names_what_is_lacking() -> None:
    text = "C++ compile error\n\nOutput:\nas: can't write 40 bytes: No space left on device\n"
    cause, message, trace = cause_of(RuntimeError(text))
    assert cause == "error"
    assert message.startswith("as: can't write 40 bytes: No space left on device: free some")
    assert "C++ compile error" in trace
    assert cause_of(MemoryError())[:2] == ("oom", "MemoryError")
