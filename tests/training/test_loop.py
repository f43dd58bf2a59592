"""The loop on a clock and a trainer without work: how many samples, which of them count."""

import itertools
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Schedule
from stepmark.measuring.ranks import Ranks
from stepmark.model.model_tables import find_model
from stepmark.training import loop
from stepmark.training.loop import Loop

ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))
# Powers of two, so that sums are exact.
FWD_S, BWD_S, OPTIM_S, DATA_S = 0.25, 0.5, 0.125, 0.0625
COMPILES_S = 64.0


class FakeClock:
    """The module `time`, which moves when a trainer says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class FakeTrainer:
    """Takes made-up times; `during` is called in each micro-step with its number from 1."""

    def __init__(
        self, clock: FakeClock, during: Callable[[int], None] = lambda _number: None
    ) -> None:
        self.models: list[nn.Module] = []
        self._clock, self._during = clock, during
        self.micro_steps: list[bool] = []  # is_last of each
        self.updates_after: list[int] = []  # micro-steps

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
    ) -> Tensor | None:
        self.micro_steps.append(is_last)
        count = len(self.micro_steps)
        self._clock.now_s += FWD_S + (COMPILES_S if count == 1 else 0.0)
        mark("fwd")
        self._clock.now_s += BWD_S
        mark("bwd")
        self._during(count)
        return torch.tensor(float(count))

    def optimizer_step(self) -> None:
        self._clock.now_s += OPTIM_S
        self.updates_after.append(len(self.micro_steps))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(loop, "time", found)
    return found


def case(**more: Any) -> TrainCase:
    model = find_model("gpt2-125m").tiny()
    return TrainCase(model=model, device="cpu", backend="gloo", **more)


def micro(grad_accum: int = 4) -> TrainCase:
    return case(schedule=Schedule.MICRO, grad_accum=grad_accum)


def batches(clock: FakeClock) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in itertools.count():
        clock.now_s += DATA_S
        yield torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)


def made(clock: FakeClock, of: TrainCase, trainer: FakeTrainer, ranks: Any = ALONE) -> Loop:
    return Loop(of, trainer, batches(clock), ranks)


def ran(
    clock: FakeClock, of: TrainCase, trainer: FakeTrainer, wanted: int, end_s: float | None
) -> loop.StepSamples:
    work = made(clock, of, trainer)
    work.first()
    work.run(wanted, end_s)
    return work.samples


@pytest.mark.parametrize("wanted", [1, 2, 5, 30])
def test_every_step_has_its_phases_and_they_add_up(clock: FakeClock, wanted: int) -> None:
    taken = ran(clock, case(grad_accum=3), FakeTrainer(clock), wanted, None)
    assert taken.steady == 1, "the first one compiles"
    assert len(taken.seconds) - taken.steady >= wanted
    assert set(taken.seconds[1:]) == {3 * (DATA_S + FWD_S + BWD_S) + OPTIM_S}
    assert taken.seconds[0] == taken.seconds[1] + COMPILES_S == taken.first_s
    assert set(taken.fwd_s[1:]) == {3 * FWD_S}
    assert set(taken.bwd_s) == {3 * BWD_S}
    assert set(taken.optim_s) == {OPTIM_S}
    assert set(taken.data_s) == {3 * DATA_S}
    assert [float(one) for one in taken.losses[:2]] == [2.0, 5.0], "means of three"


@pytest.mark.parametrize("steady_s", [1.0, 20.0])
def test_steady_samples_last_as_long_as_is_asked(clock: FakeClock, steady_s: float) -> None:
    work = made(clock, case(), FakeTrainer(clock))
    work.first()
    work.run(4, None, steady_s)
    steady = work.samples.seconds[work.samples.steady :]
    assert len(steady) >= 4
    assert max(4 * steady[0], steady_s) <= sum(steady) < max(8 * steady[0], steady_s + 2.0)


class SlowAgreement:
    """A rank alone, whose every agreement takes a second."""

    rank, num_ranks, device = 0, 1, torch.device("cpu")

    def __init__(self, clock: FakeClock) -> None:
        self._clock, self.num_gathers = clock, 0

    def gather(self, value: Any) -> list[Any]:
        self._clock.now_s += 1.0
        self.num_gathers += 1
        return [value]

    def decide(self, decision: Callable[[], Any]) -> Any:
        return decision()


def test_samples_tile_the_time_that_passes(clock: FakeClock) -> None:
    ranks = SlowAgreement(clock)
    work = made(clock, case(), FakeTrainer(clock), ranks)
    work.first()
    begin_s = clock.now_s
    work.run(8, None)
    passed_s = clock.now_s - begin_s
    total_s = sum(work.samples.seconds[1:])
    # After the last sample ranks agree twice: that it is the last, and on interrupts.
    assert total_s == work.samples.elapsed_s == passed_s - 2.0
    assert work.samples.uncounted_s == 0
    work_s = (len(work.samples.seconds) - 1) * (DATA_S + FWD_S + BWD_S + OPTIM_S)
    assert total_s == work_s + ranks.num_gathers - 2, "agreements are in the samples after them"


def test_time_in_no_sample_is_told(clock: FakeClock) -> None:
    work = made(clock, case(), FakeTrainer(clock))
    work.first()
    enqueue = work.sample

    def sample_after_a_pause(*more: Any) -> None:
        clock.now_s += 0.25
        work._last_end = None
        enqueue(*more)

    work.sample = sample_after_a_pause  # type: ignore[method-assign]
    work.run(8, None)
    assert work.samples.uncounted_s == 0.25 * (len(work.samples.seconds) - 1)


class SlowEvent:
    """An event of a device whose clock runs slower than the host's by one in 1024."""

    clock: FakeClock

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = -1.0

    def record(self) -> None:
        assert self.at_s < 0, "an event is recorded once"
        self.at_s = self.clock.now_s * (1 - 2**-10)

    def elapsed_time(self, end: "SlowEvent") -> float:
        return 1e3 * (end.at_s - self.at_s)

    def synchronize(self) -> None:
        """The device has finished."""

    def query(self) -> bool:
        return True


class OnDevice:
    """A tensor that moves to a device that is not there."""

    def to(self, *_place: object, **_how: object) -> "OnDevice":
        return self


def test_samples_of_a_device_are_compared_with_the_clock_of_the_host(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowEvent.clock = clock
    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    gpu = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cuda", 0))
    tensors: Any = itertools.repeat((OnDevice(), OnDevice()))
    work = Loop(case(), FakeTrainer(clock), tensors, gpu)
    work.first()
    begin_s = clock.now_s
    work.run(8, None)
    taken = work.samples
    assert taken.elapsed_s == clock.now_s - begin_s
    assert sum(taken.seconds[1:]) == pytest.approx(taken.elapsed_s * (1 - 2**-10))
    assert taken.uncounted_s == pytest.approx(taken.elapsed_s * 2**-10)


@pytest.mark.parametrize("of", [case(), case(schedule=Schedule.MICRO, grad_accum=4)])
def test_steady_samples_begin_after_the_soak(clock: FakeClock, of: TrainCase) -> None:
    work = made(clock, of, FakeTrainer(clock))
    work.first()
    work.soak(30.0)
    work.run(8, None)
    cycle_s = (DATA_S + FWD_S + BWD_S) * of.cycle + OPTIM_S
    num_cycles = math.ceil(30.0 / cycle_s)
    assert work.samples.soak_s == num_cycles * cycle_s
    assert work.samples.steady == of.cycle * (1 + num_cycles)
    assert len(work.samples.seconds) - work.samples.steady >= 8
    assert work.samples.elapsed_s == sum(work.samples.seconds[work.samples.steady :])


@pytest.mark.parametrize(
    ("seconds", "rises_c", "most_s", "end_s"),
    [
        (4, 2.0, 60.0, 6),  # 1 degree in 3 s is the same
        (4, 1.0, 60.0, 6),
        (99, 2.0, 12.0, 12),
        (99, 0.25, 60.0, 3),
        (0, None, 60.0, 2),
    ],
)
def test_a_soak_goes_on_while_a_device_gets_warmer(
    clock: FakeClock, seconds: int, rises_c: float | None, most_s: float, end_s: int
) -> None:
    begin_s = clock.now_s

    def temperature_c() -> float | None:
        elapsed_s = min(seconds, clock.now_s - begin_s)
        return None if rises_c is None else 50.0 + rises_c * elapsed_s

    work = made(clock, case(), FakeTrainer(clock))
    work.first()
    begin_s = clock.now_s
    work.soak(2.0, most_s, temperature_c)
    step_s = DATA_S + FWD_S + BWD_S + OPTIM_S
    assert end_s <= work.samples.soak_s <= end_s + 2 * step_s


def test_a_soak_of_nothing_adds_no_sample(clock: FakeClock) -> None:
    work = made(clock, case(), FakeTrainer(clock))
    work.first()
    work.soak(0.0)
    assert (work.samples.soak_s, len(work.samples.seconds)) == (0.0, 1)


def test_of_micro_steps_every_fourth_has_the_optimizer(clock: FakeClock) -> None:
    trainer = FakeTrainer(clock)
    taken = ran(clock, micro(), trainer, 8, None)
    assert taken.steady == 4, "the whole first cycle is warm-up"
    assert len(taken.seconds) >= 4 + 8
    have = [index % 4 == 3 for index in range(len(taken.seconds))]
    assert trainer.micro_steps == have
    assert [value > 0 for value in taken.optim_s] == have
    assert trainer.updates_after == list(range(4, len(have) + 1, 4))
    assert len(taken.losses) == len(taken.fwd_s) == len(taken.data_s) == len(taken.seconds)


def test_a_slow_start_is_warm_up_and_more_samples_follow(clock: FakeClock) -> None:
    def slow_at_first(number: int) -> None:
        clock.now_s += 3.0 if number <= 6 else 0.0

    taken = ran(clock, case(), FakeTrainer(clock, slow_at_first), 10, None)
    assert taken.steady == 6
    assert len(taken.seconds) >= 16


def test_what_never_settles_ends_and_keeps_its_last_samples(clock: FakeClock) -> None:
    def ever_slower(number: int) -> None:
        clock.now_s += number

    taken = ran(clock, case(), FakeTrainer(clock, ever_slower), 10, None)
    assert 25 <= len(taken.seconds) <= 25 + 10 // 4
    assert len(taken.seconds) - taken.steady == 10


def test_time_that_is_up_ends_it(clock: FakeClock) -> None:
    one_s = DATA_S + FWD_S + BWD_S + OPTIM_S
    taken = ran(clock, case(), FakeTrainer(clock), 1000, COMPILES_S + 20 * one_s)
    assert 20 <= len(taken.seconds) <= 22
    assert not taken.interrupted


def test_time_that_was_up_before_still_gives_a_steady_sample(clock: FakeClock) -> None:
    taken = ran(clock, micro(), FakeTrainer(clock), 8, 0.0)
    assert 4 < len(taken.seconds) <= 8
    taken = ran(clock, case(), FakeTrainer(clock), 8, 0.0)
    assert (len(taken.seconds), taken.steady) == (2, 1)


def test_ctrl_c_ends_it_after_the_sample_and_keeps_all(clock: FakeClock) -> None:
    def interrupted(number: int) -> None:
        if number == 7:
            signal.raise_signal(signal.SIGINT)

    trainer = FakeTrainer(clock, interrupted)
    taken = ran(clock, case(), trainer, 8, None)
    assert taken.interrupted
    assert 7 <= len(taken.seconds) <= 8
    assert len(taken.losses) == len(trainer.micro_steps) == len(taken.seconds)


class LateInterrupt:
    """A rank alone, to which Ctrl-C comes while it agrees for the last time."""

    rank, num_ranks, device = 0, 1, torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        _times, _stop, late = value
        if late:
            signal.raise_signal(signal.SIGINT)
        return [value]

    def decide(self, decision: Callable[[], Any]) -> Any:
        return decision()


def test_ctrl_c_after_the_last_agreement_is_not_lost(clock: FakeClock) -> None:
    work = made(clock, case(), FakeTrainer(clock), LateInterrupt())
    work.first()
    work.run(8, 0.0)
    assert work.samples.interrupted


class OtherRank:
    """Two ranks, of which the other is half as fast and may want to stop."""

    rank, num_ranks, device = 0, 2, torch.device("cpu")

    def __init__(self, stops_at: int) -> None:
        self._stops_at, self._told = stops_at, 0

    def gather(self, value: Any) -> list[Any]:
        times, _stop, late = value
        self._told += len(times)
        return [value, ([2 * one for one in times], self._told >= self._stops_at, late)]

    def decide(self, decision: Callable[[], Any]) -> Any:
        return decision()


def test_one_rank_that_is_interrupted_stops_all(clock: FakeClock) -> None:
    work = made(clock, case(), FakeTrainer(clock), OtherRank(stops_at=5))
    work.first()
    work.run(100, None)
    assert work.samples.interrupted
    assert 5 <= len(work.samples.seconds) < 30


def test_a_cycle_aside_is_whole_untold_and_says_its_phases(clock: FakeClock) -> None:
    trainer = FakeTrainer(clock)
    work = made(clock, micro(), trainer)
    work.first()
    work.run(4, None)
    before = (list(work.samples.seconds), list(work.samples.losses))
    count, updates = len(trainer.micro_steps), len(trainer.updates_after)
    phases: list[str] = []
    ends: list[int] = []
    work.untimed_cycles(2, on_phase=phases.append, on_end=ends.append)
    assert (work.samples.seconds, work.samples.losses) == before
    assert len(trainer.micro_steps) == count + 8
    assert len(trainer.updates_after) == updates + 2
    assert phases == ["data", "forward", "backward", "optimizer"] * 8
    assert ends == [0, 1]
