"""Sample a training case back to back: nothing waits for the device inside a sample.

The host runs at most two samples ahead of the device. Between samples ranks exchange their
times and decide together whether to continue, which does not delay a busy device. At the end
the samples of all ranks become the record.
"""

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from stepmark.bench.ranks import Ranks
from stepmark.bench.training.trainer import Trainer
from stepmark.core.record import METHOD_VERSIONS, Check, Samples
from stepmark.core.stats import slowest_per_sample, steady_from
from stepmark.core.train_case import TrainCase
from stepmark.core.training import Training

(VERSION,) = METHOD_VERSIONS["train"]
_AHEAD = 2
# Approximate interval between agreements of the ranks.
_AGREE_S = 0.5
# Maximum samples until they are steady: this multiple of the requested ones, and some cycles.
_PATIENCE, _MORE_CYCLES = 2, 4
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
    interrupted: bool = False

    def without_losses(self) -> "StepSamples":
        """Return a copy without tensors, for other ranks."""
        return replace(self, losses=[])


class _Sample:
    """Moments of one sample: (name, moment), the first one its start."""

    def __init__(self, on_gpu: bool, on_phase: Callable[[str], None] | None) -> None:
        self._on_gpu, self._on_phase = on_gpu, on_phase
        self.marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        if self._on_phase and name in _FOLLOWS:
            self._on_phase(_FOLLOWS[name])
        if not self._on_gpu:
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def wait(self) -> None:
        if self._on_gpu:
            self.marks[-1][1].synchronize()

    @property
    def is_done(self) -> bool:
        return not self._on_gpu or bool(self.marks[-1][1].query())

    def seconds(self, name: str = "") -> float:
        """Return the whole sample's seconds, or the sum over the phases of a name."""
        if not name:
            return self._between(0, len(self.marks) - 1)
        return sum(
            self._between(i - 1, i) for i, (mark, _) in enumerate(self.marks) if mark == name
        )

    def _between(self, first: int, last: int) -> float:
        a, b = self.marks[first][1], self.marks[last][1]
        return float(a.elapsed_time(b) * 1e-3 if self._on_gpu else b - a)


class Loop:
    """Takes samples of a case on this rank."""

    def __init__(
        self,
        case: TrainCase,
        trainer: Trainer,
        batches: Iterator[tuple[Tensor, Tensor]],
        ranks: Ranks,
    ) -> None:
        self._case, self._trainer, self._batches, self._ranks = case, trainer, batches, ranks
        self._on_gpu = ranks.device.type == "cuda"
        self.samples = StepSamples()
        self._steady_s = 0.0
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

    def run(self, num_steady: int, end_s: float | None, steady_s: float = 0.0) -> None:
        """Sample until so many samples are steady on every rank, or time is up.

        Call `first` before. end_s: on time.monotonic. steady_s: seconds that steady samples
        last at least. Ctrl-C ends it on all ranks, with samples.interrupted set.
        """
        self._steady_s = steady_s
        most = _PATIENCE * num_steady + _MORE_CYCLES * self._case.cycle
        with _deferred_interrupt() as interrupts, _no_collection():
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
        for number in range(count):
            for _ in range(self._case.cycle):
                self.sample(on_phase)
            if number == count - 1:
                self._settle(0)
            if on_end:
                on_end(number)
        self.samples = before

    def sample(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Enqueue one sample."""
        case = self._case
        sample = _Sample(self._on_gpu, on_phase)
        sample.mark("start")
        data_s, losses = 0.0, []
        for _ in range(case.micro_steps):
            if on_phase:
                on_phase("data")
            begin = time.perf_counter()
            tokens, labels = next(self._batches)
            data_s += time.perf_counter() - begin
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
        sample.mark("end")
        if losses:
            self.samples.losses.append(torch.stack(losses).mean() if losses[1:] else losses[0])
        self.samples.data_s.append(data_s)
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
        stops, lates = False, False
        for rank, (times, stops_too, late_too) in enumerate(
            self._ranks.gather((new, stop, late))
        ):
            self._times_by_rank[rank] += times
            stops, lates = stops or stops_too, lates or late_too
        return stops, lates

    def _is_over(self, num_steady: int, most: int, *, interrupted: bool, late: bool) -> bool:
        interrupted, late = self._share(interrupted, late)
        self.samples.interrupted = interrupted
        slowest, cycle = self._slowest(), self._case.cycle
        if interrupted or late:
            return True
        if len(slowest) >= most and sum(slowest[cycle:]) >= _PATIENCE * self._steady_s:
            return True
        steady = steady_from(slowest, cycle)
        # The first cycle compiles and allocates: it is never steady.
        rest = slowest[max(steady or 0, cycle) :]
        is_long = len(rest) >= num_steady and sum(rest) >= self._steady_s
        return steady is not None and is_long

    def _steady(self, num_steady: int) -> int:
        """Return the first steady sample; a case that is never steady keeps its last ones."""
        slowest, cycle = self._slowest(), self._case.cycle
        first = steady_from(slowest, cycle)
        if first is None:
            first = max(0, len(slowest) - num_steady) // cycle * cycle
        return max(first, cycle) if len(slowest) >= 2 * cycle else 0

    def _slowest(self) -> list[float]:
        count = min(map(len, self._times_by_rank))
        return slowest_per_sample([times[:count] for times in self._times_by_rank])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which would delay a sample on one rank."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list: a rank that stops alone would block others in a collective."""
    interrupts: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


# On text the mean loss must fall by this share from the first to the last fifth of samples.
_MUST_FALL = 0.01
_FEWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one rank, between the first sample and the last."""

    build_s: float
    first_s: float
    allocated_bytes: int | None
    reserved_bytes: int | None
    alloc_retries: int
    recompiles: int
    graph_breaks: int


class Counter:
    """Counts peaks, retries and new graphs from its creation on; graph breaks of the case."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs, self._retries = counters["stats"]["unique_graphs"], self._num_retries()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def since(self, build_s: float, first_s: float) -> Counts:
        on_gpu, device = self._device.type == "cuda", self._device
        return Counts(
            build_s=build_s,
            first_s=first_s,
            allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
            reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
            alloc_retries=self._num_retries() - self._retries,
            recompiles=counters["stats"]["unique_graphs"] - self._graphs,
            graph_breaks=sum(counters["graph_break"].values()),
        )

    def _num_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def steady_results(
    case: TrainCase,
    by_rank: Sequence[StepSamples],
    counts: Sequence[Counts],
    loss: tuple[float, ...],
) -> tuple[Samples, Training]:
    """Return steady samples and the training record; arguments are by rank."""
    start = by_rank[0].steady
    count = (min(len(rank.seconds) for rank in by_rank) - start) // case.cycle * case.cycle
    end = start + count

    def steady(name: str) -> tuple[tuple[float, ...], ...]:
        seconds = tuple(tuple(getattr(rank, name)[start:end]) for rank in by_rank)
        return seconds if any(any(values) for values in seconds) else ()

    clock = f"train-{case.schedule}-{'events' if case.device == 'cuda' else 'host'}"
    samples = Samples(seconds=steady("seconds"), method=f"{clock}/{VERSION}")
    return samples, Training(
        tokens_per_sample=case.tokens_per_step * case.micro_steps,
        cycle=case.cycle,
        num_params=case.model.num_params,
        warmup_s=tuple(tuple(rank.seconds[:start]) for rank in by_rank),
        loss=loss,
        fwd_s=steady("fwd_s"),
        bwd_s=steady("bwd_s"),
        optim_s=steady("optim_s"),
        data_s=steady("data_s"),
        build_s=max(rank.build_s for rank in counts),
        first_s=max(rank.first_s for rank in counts),
        allocated_bytes=tuple(rank.allocated_bytes for rank in counts),
        reserved_bytes=tuple(rank.reserved_bytes for rank in counts),
        alloc_retries=tuple(rank.alloc_retries for rank in counts),
        recompiles=max(rank.recompiles for rank in counts),
        graph_breaks=max(rank.graph_breaks for rank in counts),
    )


def check_losses(loss: Sequence[float], case: TrainCase) -> Check:
    """Check that every loss is finite and falls on text; num_wrong counts those that do not."""
    wrong = sum(not math.isfinite(value) for value in loss)
    falls = case.data != "random" and len(loss) >= _FEWEST
    ratio = 0.0
    if falls and not wrong:
        part = len(loss) // 5
        # A loss that diverged at once and then returned has not fallen.
        ratio = sum(loss[-part:]) / min(sum(loss[:part]), part * loss[0])
        wrong = part if ratio > 1 - _MUST_FALL else 0
    return Check(
        max_rel_err=ratio,
        tolerance=1 - _MUST_FALL if falls else 0.0,
        num_wrong=wrong,
        num_compared=len(loss),
        reference="finite; last fifth under the first, and under the start"
        if falls
        else "finite",
    )
