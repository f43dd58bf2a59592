"""Sample a training case back to back: nothing waits for the device inside a sample.

Each sample begins at the moment at which the one before it ends, so that they add up to the
time that passes. The host runs at most two samples ahead of the device. Now and then ranks
exchange their times and decide together whether to continue, which does not delay a busy
device. At the end the samples of all ranks become the record.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from stepmark.cases.train_case import TrainCase
from stepmark.ground import signals
from stepmark.ground.stats import slowest_per_sample, steady_from
from stepmark.measuring.ranks import Ranks
from stepmark.training.trainer import Trainer

_AHEAD = 2
# Approximate interval between agreements of the ranks.
_AGREE_S = 0.5
# Maximum samples until they are steady: this multiple of the requested ones, and some cycles.
_PATIENCE = 2
# A device is as warm as it gets if it rises by at most so much in so many seconds. Four H100
# rose from 65 to 76 degrees in 15 s of a step, and lost 9 % of their clock (docs/diary).
_SAME_C = 1.0
_WARMING_S = 3
_MORE_CYCLES = 4
# The phase that begins at a mark; a pipeline has no "fwd" mark, and its phases are mixed.
_FOLLOWS = {"data": "forward", "fwd": "backward", "work": "optimizer"}


@dataclass(slots=True)
class StepSamples:
    """Times and losses of this rank by sample, from the very first one."""

    seconds: list[float] = field(default_factory=list)
    fwd_s: list[float] = field(default_factory=list)
    bwd_s: list[float] = field(default_factory=list)
    optim_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    first_s: float = 0.0
    steady: int = 0  # index of the first steady sample
    soak_s: float = 0.0
    # By the host's clock, from the begin of the first sample after the soak to the end of the
    # last one; and how much more that is than the sum of these samples.
    elapsed_s: float = 0.0
    uncounted_s: float = 0.0
    interrupted: bool = False

    def without_losses(self) -> "StepSamples":
        """Return a copy without tensors, for other ranks."""
        return replace(self, losses=[])


def _moment(on_gpu: bool) -> Any:
    """Return an event of the compute stream, or a reading of the host's clock in seconds."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments that have passed."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) * 1e-3)


class _Sample:
    """Moments of one sample: (name, moment), the first one its begin."""

    def __init__(
        self, begin: Any, on_gpu: bool, on_phase: Callable[[str], None] | None
    ) -> None:
        self._on_gpu = on_gpu
        self._on_phase = on_phase
        self.marks: list[tuple[str, Any]] = [("begin", begin)]

    @property
    def end(self) -> Any:
        return self.marks[-1][1]

    def mark(self, name: str) -> None:
        if self._on_phase and name in _FOLLOWS:
            self._on_phase(_FOLLOWS[name])
        self.marks.append((name, _moment(self._on_gpu)))

    def wait(self) -> None:
        if self._on_gpu:
            self.end.synchronize()

    @property
    def is_done(self) -> bool:
        return not self._on_gpu or bool(self.end.query())

    def seconds(self, name: str = "") -> float:
        """Return the whole sample's seconds, or the sum over the phases of a name."""
        if not name:
            return _between(self.marks[0][1], self.end)
        return sum(
            _between(begin, end)
            for (_, begin), (mark, end) in pairwise(self.marks)
            if mark == name
        )


def _gets_warmer(readings: Sequence[Sequence[float | None]]) -> bool:
    """Return whether a device did in the last seconds. readings: of all, in each second."""
    if None in readings[-1]:
        return False
    before = readings[max(0, len(readings) - 1 - _WARMING_S)]
    rises = (now - then for now, then in zip(readings[-1], before, strict=True) if now and then)
    return len(readings) <= _WARMING_S or max(rises, default=0.0) > _SAME_C


class Loop:
    """Takes samples of a case on this rank."""

    def __init__(
        self,
        case: TrainCase,
        trainer: Trainer,
        batches: Iterator[tuple[Tensor, Tensor]],
        ranks: Ranks,
    ) -> None:
        self._case = case
        self._trainer = trainer
        self._batches = batches
        self._ranks = ranks
        self._on_gpu = ranks.device.type == "cuda"
        self.samples = StepSamples()
        self._steady_s = 0.0
        self._last_end: Any = None  # of the last sample, at which the next one begins
        self._num_before = 0  # samples before `run`: the first cycle and the soak
        self._pending: list[_Sample] = []
        self._times_by_rank: list[list[float]] = [[] for _ in range(ranks.num_ranks)]
        self._num_shared = 0
        self._count = 0  # micro-steps begun

    def first(self) -> None:
        """Run the first sample and its cycle to the end: it compiles and allocates."""
        begin = time.perf_counter()
        self.sample()
        self._settle(0)
        self.samples.first_s = time.perf_counter() - begin
        for _ in range(self._case.cycle - 1):
            self.sample()
        self._settle(0)

    def soak(
        self,
        soak_s: float,
        most_s: float = 0.0,
        temperature_c: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Run whole cycles until the device has been under load for so many seconds.

        Then go on while a device gets warmer, for most_s at most: its clock falls meanwhile.
        temperature_c: of this rank's. Call `first` before. Rank 0's duration counts. These
        samples are warm-up.
        """
        begin = time.monotonic()
        self._last_end = None
        readings: list[Sequence[float | None]] = []  # of all ranks, one in each second
        while True:
            elapsed_s: float = self._ranks.decide(lambda: time.monotonic() - begin)
            if most_s and elapsed_s >= len(readings):
                readings.append(self._ranks.gather(temperature_c()))
            if elapsed_s >= soak_s and (elapsed_s >= most_s or not _gets_warmer(readings)):
                break
            for _ in range(self._case.cycle):
                self.sample()
        self._settle(0)
        self.samples.soak_s = time.monotonic() - begin if soak_s else 0.0

    def run(self, num_steady: int, end_s: float | None, steady_s: float = 0.0) -> None:
        """Sample until so many samples are steady on every rank, or time is up.

        Call `first` before. end_s: on time.monotonic. steady_s: seconds that steady samples
        last at least. Ctrl-C ends it on all ranks, with samples.interrupted set.
        """
        self._steady_s = steady_s
        self._num_before = len(self.samples.seconds)
        most = _PATIENCE * num_steady + _MORE_CYCLES * self._case.cycle
        # A rank that Ctrl-C stops alone would block others in a collective.
        with signals.catching([signal.SIGINT]) as interrupts, self._elapsed():
            while True:
                chunk = self._ranks.decide(lambda: self._chunk(num_steady))
                for _ in range(chunk):
                    self.sample()
                self._settle(_AHEAD)
                stop = bool(interrupts)
                late = end_s is not None and time.monotonic() > end_s
                if self._is_over(num_steady, most, interrupted=stop, late=late):
                    break
            self._settle(0)
            # An interrupt after the last agreement counts, too.
            stopped, _ = self._share(bool(interrupts), False)
        self.samples.interrupted |= stopped
        self.samples.steady = self._steady(num_steady)

    @contextlib.contextmanager
    def _elapsed(self) -> Iterator[None]:
        """Compare samples with the host's clock; before and after, the device is idle."""
        self._last_end, begin_s = self._now()
        yield
        end, end_s = self._now()
        if self._on_gpu:
            end.synchronize()
        elapsed_s = end_s - begin_s - _between(self._last_end, end)
        self.samples.elapsed_s = elapsed_s
        self.samples.uncounted_s = elapsed_s - math.fsum(
            self.samples.seconds[self._num_before :]
        )

    def _now(self) -> tuple[Any, float]:
        """Return the moment, and the host's reading for it in seconds."""
        moment = _moment(self._on_gpu)
        return moment, time.perf_counter() if self._on_gpu else moment

    def untimed_cycles(
        self,
        count: int = 1,
        *,
        on_phase: Callable[[str], None] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """Run cycles that are not recorded, back to back as the others.

        on_phase is called as each phase begins; on_end as a cycle ends, with its number.
        """
        before = self.samples
        self.samples = StepSamples()
        self._last_end = None
        for number in range(count):
            for _ in range(self._case.cycle):
                self.sample(on_phase)
            if number == count - 1:
                self._settle(0)
            if on_end:
                on_end(number)
        self.samples = before

    def sample(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Enqueue one sample, which begins where the last one ends."""
        case = self._case
        begin = _moment(self._on_gpu) if self._last_end is None else self._last_end
        sample = _Sample(begin, self._on_gpu, on_phase)
        data_s = 0.0
        losses = []
        for _ in range(case.micro_steps):
            if on_phase:
                on_phase("data")
            begin_s = time.perf_counter()
            tokens, labels = next(self._batches)
            data_s += time.perf_counter() - begin_s
            if self._on_gpu:
                tokens = tokens.to(self._ranks.device, non_blocking=True)
                labels = labels.to(self._ranks.device, non_blocking=True)
            sample.mark("data")
            self._count += 1
            is_last = self._count % case.grad_accum == 0
            loss = self._trainer.micro_step(tokens, labels, is_last=is_last, mark=sample.mark)
            sample.mark("work")  # ends a micro-step without marks of its own
            if loss is not None:
                losses.append(loss.clone())
        if self._count % case.grad_accum == 0:
            self._trainer.optimizer_step()
            sample.mark("optim")
        if losses:
            self.samples.losses.append(torch.stack(losses).mean() if losses[1:] else losses[0])
        self.samples.data_s.append(data_s)
        sample.mark("end")
        self._last_end = sample.end
        self._pending.append(sample)
        self._settle(_AHEAD)

    def _settle(self, ahead: int) -> None:
        """Wait until at most `ahead` samples are unfinished; take the times of the others."""
        while self._pending and (len(self._pending) > ahead or self._pending[0].is_done):
            sample = self._pending.pop(0)
            sample.wait()
            self.samples.seconds.append(sample.seconds())
            self.samples.fwd_s.append(sample.seconds("fwd"))
            self.samples.bwd_s.append(sample.seconds("bwd"))
            self.samples.optim_s.append(sample.seconds("optim"))

    def _chunk(self, num_steady: int) -> int:
        """Return the samples until the next agreement, at most a quarter of the requested."""
        typical_s = median_high(self.samples.seconds)
        return max(1, min(round(_AGREE_S / max(typical_s, 1e-6)), num_steady // 4))

    def _share(self, stop: bool, late: bool) -> tuple[bool, bool]:
        """Exchange new times; return whether any rank wants to stop, and any is late."""
        new = self.samples.seconds[self._num_shared :]
        self._num_shared = len(self.samples.seconds)
        stops = False
        lates = False
        for rank, (times, stops_too, late_too) in enumerate(
            self._ranks.gather((new, stop, late))
        ):
            self._times_by_rank[rank] += times
            stops = stops or stops_too
            lates = lates or late_too
        return stops, lates

    def _is_over(self, num_steady: int, most: int, *, interrupted: bool, late: bool) -> bool:
        interrupted, late = self._share(interrupted, late)
        self.samples.interrupted = interrupted
        if interrupted or late:
            return True
        slowest = self._slowest()
        if len(slowest) >= most and sum(slowest) >= _PATIENCE * self._steady_s:
            return True
        first = self._steady_from(slowest)
        if first is None:
            return False
        return len(slowest) - first >= num_steady and sum(slowest[first:]) >= self._steady_s

    def _steady(self, num_steady: int) -> int:
        """Return the first steady sample; a case that is never steady keeps its last ones."""
        slowest = self._slowest()
        cycle = self._case.cycle
        if len(slowest) < cycle:
            return self._num_before - cycle
        first = self._steady_from(slowest)
        if first is None:
            first = max(0, len(slowest) - num_steady) // cycle * cycle
        return self._num_before + first

    def _steady_from(self, slowest: list[float]) -> int | None:
        """Return the first steady one of these samples; None if they are not steady yet."""
        cycle = self._case.cycle
        return steady_from(slowest, cycle) if len(slowest) >= 2 * cycle else 0

    def _slowest(self) -> list[float]:
        """Return the slowest rank's seconds of each sample that all ranks have, in `run`."""
        count = min(map(len, self._times_by_rank))
        times = [times[self._num_before : count] for times in self._times_by_rank]
        return slowest_per_sample(times)
