"""Timers of calls, and the rule that decides when samples are enough.

Each timer is a named, versioned method; none is mixed with another.

event-rotate  k calls between two events, back to back, over operand sets that together exceed
              twice the L2 cache, so that no call finds its operands in it
graph-rotate  the same calls, unrolled in a CUDA graph: for kernels shorter than their launch
event-flush   a read of several times the L2 before each call; one call between two events
event-hot     one operand set, no flush: the result of a careless benchmark
host          perf_counter around k calls (CPU)

The host enqueues a batch behind a spinning kernel, so that launch latency is not in a time.
Where a launch may take longer than the kernel, each sample has a spinning kernel of its own
before it: event-rotate/2 and event-hot/2.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stepmark.cases.case import SAMPLE_S, SOAK_S, SOAK_SHARE, ClockName, Rate
from stepmark.cases.record import METHOD_VERSIONS
from stepmark.ground.stats import summarize

VERSION, _SHORT_VERSION = METHOD_VERSIONS["op"]
# event-flush/1 overwrote the L2: the timed call paid for the write-back of the dirty lines.
_FLUSH_VERSION = 2
# Minimum sample duration; longer samples amortize the overhead of their two events.
_SAMPLE_S = 1e-3
# Shorter kernels are replayed from a graph: the gap between two launches, 1 to 2 us on an
# H200, would exceed 1 %.
GRAPH_BELOW_S = 300e-6
_MAX_UNROLL = 512
_SPIN_MAX_S = 20e-3


class Timer(Protocol):
    """A clock bound to the calls of one case."""

    @property
    def method(self) -> str: ...

    @property
    def calls_per_sample(self) -> int: ...

    def sample(self, count: int) -> list[float]:
        """Return seconds per call, `count` times, after the device has finished."""


Calls = Sequence[Callable[[], object]]


class HostTimer:
    """perf_counter around k calls."""

    method = f"host/{VERSION}"

    def __init__(self, calls: Calls, estimate_s: float) -> None:
        self._calls = calls
        self._next = 0
        self.calls_per_sample = max(1, min(1000, math.ceil(_SAMPLE_S / max(estimate_s, 1e-9))))

    def sample(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            batch = [
                self._calls[(self._next + i) % len(self._calls)]
                for i in range(self.calls_per_sample)
            ]
            self._next += self.calls_per_sample
            start = time.perf_counter()
            for call in batch:
                call()
            seconds.append((time.perf_counter() - start) / self.calls_per_sample)
        return seconds


class EventTimer:
    """Calls on a device: pairs of events around `issue`.

    before: work between two samples, outside both.
    """

    def __init__(
        self,
        name: ClockName,
        calls_per_sample: int,
        launch_s: float,
        issue: Callable[[], object],
        *,
        before: Callable[[], object] = lambda: None,
        version: int = VERSION,
    ) -> None:
        self.method = f"{name}/{version}"
        self.calls_per_sample = calls_per_sample
        self._launch_s = launch_s
        self._issue = issue
        self._before = before

    def sample(self, count: int) -> list[float]:
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        spin(min(_SPIN_MAX_S, count * self._launch_s))
        for start, end in pairs:
            self._before()
            start.record()
            self._issue()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 / self.calls_per_sample for start, end in pairs]


def rotate_timer(
    calls: Calls, estimate_s: float, launch_s: float, name: ClockName = ClockName.ROTATE
) -> EventTimer:
    """Return a timer of calls back to back over all operand sets (for event-hot: over one)."""
    count = max(1, min(64, math.ceil(_SAMPLE_S / max(estimate_s, 1e-9))))
    turns = itertools.cycle(calls)

    def issue() -> None:
        for _ in range(count):
            next(turns)()

    if launch_s <= estimate_s:
        return EventTimer(name, count, launch_s * count, issue)
    head_start = functools.partial(spin, launch_s * count)
    return EventTimer(
        name, count, launch_s * count, issue, before=head_start, version=_SHORT_VERSION
    )


def flush_timer(calls: Calls, launch_s: float, l2_bytes: int) -> EventTimer:
    """Return a timer of one call after a read of several L2, which leaves clean lines."""
    turns = itertools.cycle(calls)
    filler = torch.zeros(max(l2_bytes, 2**24), dtype=torch.float32, device="cuda")
    total = torch.zeros((), dtype=torch.float32, device="cuda")

    def flush() -> None:
        torch.sum(filler, dim=0, out=total)
        spin(2 * launch_s)

    def issue() -> None:
        next(turns)()

    return EventTimer(ClockName.FLUSH, 1, launch_s, issue, before=flush, version=_FLUSH_VERSION)


def graph_timer(calls: Calls, estimate_s: float) -> EventTimer:
    """Return a timer of replays of a graph of unrolled calls over all operand sets."""
    rounds = math.ceil(_SAMPLE_S / max(estimate_s, 1e-7) / len(calls))
    unroll = max(1, min(rounds, _MAX_UNROLL // len(calls))) * len(calls)
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        raise RuntimeError("a graph is captured from a stream of its own")
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The graph owns the memory that its calls allocate; the calls own their operands.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(unroll):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return EventTimer(ClockName.GRAPH, unroll, 20e-6, graph.replay)


def spin(seconds: float) -> None:
    """Keep the device busy about this long, without memory traffic."""
    # _sleep counts clock cycles; 2 GHz is at or above every supported device's clock.
    torch.cuda._sleep(int(seconds * 2e9) + 1000)


def estimate_host(calls: Calls) -> tuple[float, float]:
    """Return the CPU's seconds per call, after one warm-up call."""
    calls[0]()
    start = time.perf_counter()
    count = 0
    while count < 3 or (time.perf_counter() - start < 5e-3 and count < 1000):
        calls[count % len(calls)]()
        count += 1
        if time.perf_counter() - start > 0.5:
            break
    return (time.perf_counter() - start) / count, 0.0


def estimate_device(calls: Calls) -> tuple[float, float]:
    """Return device seconds per call and host seconds per launch, after three warm-up calls."""
    for i in range(3):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    count = 8
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(2e-3)
    first.record()
    begin = time.perf_counter()
    for i in range(count):
        calls[i % len(calls)]()
    launch = (time.perf_counter() - begin) / count
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e-3 / count, launch


def estimate(calls: Calls, device_type: str) -> tuple[float, float]:
    """Return seconds of one call, and host seconds of its launch (0 on a CPU)."""
    return estimate_host(calls) if device_type == "cpu" else estimate_device(calls)


def choose(
    name: ClockName,
    calls: Calls,
    *,
    call_s: float,
    launch_s: float,
    device_type: str,
    capturable: bool,
    l2_bytes: int,
) -> Timer:
    """Return the timer of these calls. Equal estimates give all ranks the same method and k."""
    if device_type == "cpu":
        return HostTimer(calls, call_s)
    # Twice the estimated launch: a host that is slower later must not leave the device idle.
    launch_s *= 2
    match name:
        case ClockName.AUTO if capturable and call_s < GRAPH_BELOW_S:
            try:
                return graph_timer(calls, call_s)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # calls that synchronize, or use a stream of their own
                torch.cuda.synchronize()
        case ClockName.GRAPH:
            return graph_timer(calls, call_s)
        case ClockName.FLUSH:
            return flush_timer(calls, launch_s, l2_bytes)
        case ClockName.HOT:
            return rotate_timer(calls[:1], call_s, launch_s, ClockName.HOT)
    return rotate_timer(calls, call_s, launch_s)


BURST_IDLE_S = 1.0
# At half load, so that the energy counter and the mean power are sure.
HALF_S = 2.0
_HALF_STRETCH = HALF_S / SAMPLE_S  # it has no soak
MIN_SAMPLES = 5
MAX_SAMPLES = 20_000
# A device at its power limit swings by 1 to 2 % once a second (H200, results/), so samples of
# one batch are alike: the confidence interval is that of batches, over at least a second.
MIN_BATCHES = 10
FLAT_BATCHES = 5
FLAT_SHARE = 0.5  # of the precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Duration of a case's samples, and the precision of their median, or their number."""

    sample_s: float = SAMPLE_S  # wall seconds of sampling at most
    soak_s: float = SOAK_S
    target_ci_rel: float = 0.01  # half-width of the median's 95 % interval
    min_batches: int = MIN_BATCHES
    num_samples: int | None = None  # exactly so many, however long they take

    def shortened(self, usable_s: float) -> "Effort":
        """Return an effort whose soak and samples fit in `usable_s`."""
        return replace(
            self,
            soak_s=min(self.soak_s, usable_s * SOAK_SHARE),
            sample_s=min(self.sample_s, max(usable_s * (1 - SOAK_SHARE), 0.01)),
        )


def is_enough(
    batches: list[list[float]], spent_s: float, effort: Effort, rate: Rate = Rate.SUSTAINED
) -> bool:
    """Return whether samples suffice. batches: the slowest rank's seconds per sample."""
    count = sum(map(len, batches))
    if effort.num_samples is not None:
        return count >= effort.num_samples
    burst = rate is Rate.BURST
    limit_s = effort.sample_s
    if burst:  # it idles a second per 20 ms of work, so its budget is counted in bursts
        limit_s += 4 * BURST_IDLE_S
    elif rate is Rate.HALF:
        limit_s *= _HALF_STRETCH
    if spent_s >= limit_s or count >= MAX_SAMPLES:
        return True
    if burst:
        samples = [value for batch in batches for value in batch]
        return count >= MIN_SAMPLES and summarize(samples).ci_rel < effort.target_ci_rel
    if len(batches) < effort.min_batches:
        return False
    is_sure = summarize(_medians(batches)).ci_rel < effort.target_ci_rel
    return is_sure and rate is not Rate.HALF


def is_flat(batches: list[list[float]], effort: Effort) -> bool:
    """Return whether batches are so alike that a device that nothing limits has no swing."""
    medians = _medians(batches)
    most = FLAT_SHARE * effort.target_ci_rel
    return len(batches) >= FLAT_BATCHES and max(medians) - min(medians) < most * min(medians)


def _medians(batches: list[list[float]]) -> list[float]:
    return [summarize(batch).median for batch in batches]
