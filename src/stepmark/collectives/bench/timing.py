"""Timers of collectives, in four modes:

queued-ahead  k calls back to back between two readings, which the host enqueues while a kernel
              spins before them: the device alone, no host
queued        the same without that kernel: what nccl-tests measures, and a framework that never
              waits. Where the host's launch overhead exceeds the time on the device, that
              overhead is measured, as in nccl-tests. Calls of libnccl come from a compiled
              loop (queued-compiled), else from Python.
graph         k calls in a CUDA graph: the device alone, no host
blocking      the host waits for each call; ranks start each together, unless told not to

A stream's readings are events, a host's are its monotonic clock. `seconds` is per call.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stepmark.cases.record import METHOD_VERSIONS
from stepmark.measuring.ranks import Ranks
from stepmark.model.collectives import Mode

if TYPE_CHECKING:
    from stepmark.collectives.bench.issue_loop import CompiledRotation

(VERSION,) = METHOD_VERSIONS["comm"]
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one rank. began_s: on rank 0's clock; issue_s: host seconds per call.

    span: first and last moment, as events of a stream or seconds of the host's clock. is_late:
    the device may have waited for the host although nothing of the host should be in a sample.
    """

    seconds: list[float]
    began_s: float
    issue_s: float
    span: tuple[Any, Any] | None = None
    is_late: bool = False


class Timer(Protocol):
    """A clock bound to the calls of one case on one rank.

    lead_s: time that the next batch has to be enqueued, in queued-ahead mode; the same on all
    ranks.
    """

    lead_s: float

    @property
    def method(self) -> str: ...

    @property
    def calls_per_sample(self) -> int: ...

    def sample(self, count: int) -> Batch:
        """Return `count` samples, begun together with all ranks and finished."""


class Rotation:
    """Makes the next of several calls, one per operand set, so that caches do not help."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._next = 0

    def __call__(self) -> None:
        self._calls[self._next]()
        self._next = (self._next + 1) % len(self._calls)

    def issue(self, count: int) -> None:
        """Make this many calls."""
        for _ in range(count):
            self()


class IdleTimer:
    """The timer of ranks outside the communicator, which only align with the others."""

    calls_per_sample = 1
    lead_s = 0.0

    def __init__(self, ranks: Ranks, method: str, starts_per_sample: bool) -> None:
        self.method = method
        self._ranks = ranks
        self._each = starts_per_sample

    def sample(self, count: int) -> Batch:
        for _ in range(count if self._each else 1):
            self._ranks.align()
        return Batch(seconds=[], began_s=self._ranks.now(), issue_s=0.0)


class HostTimer:
    """Times a CPU's collectives, which return when done. wait_s: arrival delay of this rank."""

    lead_s = 0.0

    def __init__(
        self, calls: Calls, ranks: Ranks, calls_per_sample: int, *, name: str, wait_s: float
    ) -> None:
        self.method = f"{name}/{VERSION}"
        self.calls_per_sample = calls_per_sample
        self._call = Rotation(calls)
        self._ranks = ranks
        self._wait_s = wait_s
        self._each = name == "blocking"
        self._queued = name == "queued"

    def sample(self, count: int) -> Batch:
        seconds: list[float] = []
        began_s = 0.0
        first = 0.0
        last = 0.0
        for i in range(count):
            if self._each or i == 0:
                self._ranks.align()
                began_s = began_s or self._ranks.now()
            if self._queued and i == 0:
                self._call()  # the first rank waits here, as on a stream
            if self._wait_s:
                _spin_host(self._wait_s)
            start = time.perf_counter()
            for _ in range(self.calls_per_sample):
                self._call()
            last = time.perf_counter()
            first = first or start
            seconds.append((last - start) / self.calls_per_sample)
        return Batch(
            seconds=seconds, began_s=began_s, issue_s=median_high(seconds), span=(first, last)
        )


# Calls enqueued ahead. CUDA holds about a thousand operations; then the host waits.
MOST_AHEAD = 100


class StreamTimer:
    """Times calls back to back on the current stream, an event after every k calls.

    name: queued-ahead, where a kernel spins first while the host enqueues the calls, queued, or
    queued-compiled. wait_s > 0: before each call this rank's stream spins that long, outside of
    its time.
    """

    lead_s = 0.0

    def __init__(
        self,
        rotation: "Rotation | CompiledRotation",
        ranks: Ranks,
        calls_per_sample: int,
        *,
        name: str,
        wait_s: float = 0.0,
    ) -> None:
        self.method = f"{name}/{VERSION}"
        self.calls_per_sample = 1 if wait_s else calls_per_sample
        self._rotation = rotation
        self._ranks = ranks
        self._is_ahead = name == Mode.AHEAD
        self._cycles = round(wait_s * spin_hz()) if wait_s else 0
        self._hz = spin_hz() if self._is_ahead else 0.0

    def sample(self, count: int) -> Batch:
        stream = torch.cuda.current_stream()
        stream.synchronize()
        starts = _events(count)
        ends = _events(count)
        spun = _events(2)
        self._ranks.align()
        began_s = self._ranks.now()
        cycles = round(self.lead_s * self._hz)
        spun[0].record()
        if cycles:
            torch.cuda._sleep(cycles)
        spun[1].record()
        issued = 0.0
        # The first rank waits in this call, so that no sample includes the others' delay.
        self._rotation.issue(1)
        for i in range(count):
            if self._cycles:
                torch.cuda._sleep(self._cycles)
            starts[i].record()
            begin = time.perf_counter()
            self._rotation.issue(self.calls_per_sample)
            issued = issued or time.perf_counter() - begin
            ends[i].record()
        is_late = self._is_ahead and spun[1].query()
        stream.synchronize()
        if cycles:  # the clock of the device is not always that of the first measurement
            self._hz = cycles / (spun[0].elapsed_time(spun[1]) * 1e-3)
        seconds = [
            start.elapsed_time(end) * 1e-3 / self.calls_per_sample
            for start, end in zip(starts, ends, strict=True)
        ]
        return Batch(
            seconds=seconds,
            began_s=began_s,
            issue_s=issued / self.calls_per_sample,
            span=(starts[0], ends[-1]),
            is_late=is_late,
        )


class GraphTimer:
    """Times replays of a graph of k calls. wait_s: a spin before each call, subtracted."""

    lead_s = 0.0

    def __init__(
        self, calls: Calls, ranks: Ranks, calls_per_sample: int, *, wait_s: float = 0.0
    ) -> None:
        self.method = f"graph/{VERSION}"
        self.calls_per_sample = calls_per_sample
        self._ranks = ranks
        self._wait_s = wait_s
        cycles = round(wait_s * spin_hz()) if wait_s else 0
        self._graph = capture(Rotation(calls), calls_per_sample, cycles)

    def sample(self, count: int) -> Batch:
        stream = torch.cuda.current_stream()
        stream.synchronize()
        marks = _events(count + 1)
        self._ranks.align()
        began_s = self._ranks.now()
        self._graph.replay()
        marks[0].record()
        begin = time.perf_counter()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        issued = (time.perf_counter() - begin) / count
        stream.synchronize()
        seconds = [
            before.elapsed_time(after) * 1e-3 / self.calls_per_sample - self._wait_s
            for before, after in itertools.pairwise(marks)
        ]
        return Batch(
            seconds=seconds,
            began_s=began_s,
            issue_s=issued / self.calls_per_sample,
            span=(marks[0], marks[-1]),
        )


class BlockingTimer:
    """Times calls with a synchronization after each, as in code that needs the result."""

    calls_per_sample = 1
    lead_s = 0.0

    def __init__(self, calls: Calls, ranks: Ranks, *, aligned: bool, wait_s: float) -> None:
        self.method = f"blocking/{VERSION}" if aligned else f"blocking-free/{VERSION}"
        self._call = Rotation(calls)
        self._ranks = ranks
        self._aligned = aligned
        self._wait_s = wait_s

    def sample(self, count: int) -> Batch:
        stream = torch.cuda.current_stream()
        stream.synchronize()
        marks = _events(2)
        marks[0].record()
        seconds = []
        issued = []
        began_s = 0.0
        for i in range(count):
            if self._aligned or i == 0:
                self._ranks.align()
                began_s = began_s or self._ranks.now()
            if self._wait_s:
                _spin_host(self._wait_s)
            start = time.perf_counter()
            self._call()
            issued.append(time.perf_counter() - start)
            stream.synchronize()
            seconds.append(time.perf_counter() - start)
        marks[1].record()
        stream.synchronize()
        return Batch(
            seconds=seconds,
            began_s=began_s,
            issue_s=median_high(issued),
            span=(marks[0], marks[1]),
        )


def capture(call: Callable[[], object], count: int, cycles: int = 0) -> torch.cuda.CUDAGraph:
    """Return a graph of `count` calls on the current stream, each after a spin of `cycles`."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(
        graph,
        stream=torch.cuda.current_stream(),
        capture_error_mode="thread_local",  # NCCL's watchdog queries events meanwhile
    ):
        for _ in range(count):
            if cycles:
                torch.cuda._sleep(cycles)
            call()
    return graph


def spin_hz() -> float:
    """Return cycles per second of a spinning kernel on this device, measured once."""
    if not _spin_hz:
        torch.cuda._sleep(1000)
        start, end = _events(2)
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        _spin_hz.append(10_000_000 / (start.elapsed_time(end) * 1e-3))
    return _spin_hz[0]


_spin_hz: list[float] = []


def _spin_host(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]
