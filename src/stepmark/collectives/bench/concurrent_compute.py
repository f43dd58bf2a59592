"""Compute that runs concurrently with a collective, timed alone and together.

On a GPU the compute is queued on a stream of its own and outlasts the collectives that are
timed meanwhile; only calls of it that lie wholly within their span count as together. On a
CPU it runs in a thread. It has one operand set, so caches help it alone and together alike.
"""

import itertools
import math
import threading
import time
from typing import Any

import torch

from stepmark.collectives.bench import timing
from stepmark.ground.dtypes import DType
from stepmark.measuring.context import MeasureContext
from stepmark.model.ops import FAMILY_OF, from_shorthand
from stepmark.operators.bench import IMPLS
from stepmark.operators.bench.call import Call

_ALONE_S = 0.3
_MARK_S = 0.5e-3
_MOST_MARKS = 300


class ThreadCompute:
    """Compute in a thread of this process; torch releases the interpreter meanwhile."""

    longest_s = math.inf  # maximum duration of the compute

    def __init__(self, call: Call) -> None:
        self._call = call.run
        self.backend_run = call.backend_run
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._times: list[tuple[float, float]] = []
        self._error: Exception | None = None
        for _ in range(2):
            self._call()

    def alone(self) -> list[float]:
        """Return seconds per call without a collective."""
        end = time.perf_counter() + _ALONE_S
        seconds: list[float] = []
        while time.perf_counter() < end or len(seconds) < 3:
            start = time.perf_counter()
            self._call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def start(self, cover_s: float) -> None:
        """Begin work that lasts at least cover_s seconds."""
        self._stop.clear()
        self._times = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self, span: tuple[Any, Any] | None) -> list[float] | None:
        """Return seconds of the calls within span; None if they ended before it."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        first, last = span or (0.0, 0.0)
        return [end - start for start, end in self._times if first <= start and end <= last]

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.perf_counter()
                self._call()
                self._times.append((start, time.perf_counter()))
        except Exception as error:  # noqa: BLE001  raised by stop(), in the calling thread
            self._error = error


class StreamCompute:
    """Compute queued on a stream of its own; short calls are replayed many at a time.

    A device takes about a thousand launches ahead, and the host must not wait for it: so an
    event follows about half a millisecond of work, and the number of events is limited.
    """

    def __init__(self, call: Call) -> None:
        self._call = call.run
        self.backend_run = call.backend_run
        self._stream = torch.cuda.Stream()
        self._marks: list[torch.cuda.Event] = []
        self._calls_per_mark = 1
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self._call()
            torch.cuda.synchronize()
            self._mark_s = min(self._between(self._queue(5)))
            self._calls_per_mark = max(1, math.ceil(_MARK_S / self._mark_s))
            if self._calls_per_mark > 1:
                graph = timing.capture(self._call, self._calls_per_mark)
                self._call = graph.replay
                self._mark_s *= self._calls_per_mark
        torch.cuda.synchronize()

    @property
    def longest_s(self) -> float:
        return _MOST_MARKS * self._mark_s

    def alone(self) -> list[float]:
        return self._between(self._queue(self._marks_for(_ALONE_S)))

    def start(self, cover_s: float) -> None:
        self._marks = self._queue(self._marks_for(cover_s))

    def stop(self, span: tuple[Any, Any] | None) -> list[float] | None:
        covered = not self._marks[-1].query()
        torch.cuda.synchronize()
        if span is None or not covered:
            return None
        first, last = span
        within = [
            mark
            for mark in self._marks
            if first.elapsed_time(mark) >= 0 and mark.elapsed_time(last) >= 0
        ]
        return self._between(within)

    def _marks_for(self, seconds: float) -> int:
        return min(_MOST_MARKS, math.ceil(seconds / self._mark_s) + 1)

    def _queue(self, count: int) -> list[torch.cuda.Event]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self._stream):
            marks[0].record()
            for mark in marks[1:]:
                self._call()
                mark.record()
        return marks

    def _between(self, marks: list[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize()
        return [
            before.elapsed_time(after) * 1e-3 / self._calls_per_mark
            for before, after in itertools.pairwise(marks)
        ]


ConcurrentCompute = ThreadCompute | StreamCompute


def make(shorthand: str, context: MeasureContext) -> ConcurrentCompute:
    """Return the compute of an operator's shorthand, on this rank's device."""
    on_gpu = context.ranks.device.type == "cuda"
    op = from_shorthand(shorthand, DType.BF16 if on_gpu else DType.FP32)
    for impl in IMPLS[FAMILY_OF[type(op)]].values():
        if impl.unsupported(op, context.capabilities) is None:
            call = impl.make(op, context.ranks.device)
            return StreamCompute(call) if on_gpu else ThreadCompute(call)
    raise RuntimeError(f"nothing here runs {shorthand}")
