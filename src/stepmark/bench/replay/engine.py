"""Engines that run a rank's program: on a CPU by the host, on a GPU on streams.

An operation starts when the one before it on its stream has ended, and what it waits for. The
host issues operations in the order of the program. Messages on the stream "compute" are waited
for; a send never is before the end of the step, because a receive may follow it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from stepmark.bench.replay.messages import Buffers, Messenger, Work
from stepmark.core.message import SEND
from stepmark.core.rank_program import Step
from stepmark.core.workload import COMPUTE, CommOp

_SPIN_CYCLES = 10_000_000  # some 5 ms
# Start of an operation since that of the step, and its duration, in seconds.
Span = tuple[float, float]
UNKNOWN: Span = (math.nan, math.nan)


class Engine(Protocol):
    """Runs a program. blocked_s: how long the host has waited for messages."""

    blocked_s: float

    def run(self, spans: list[Span] | None = None) -> None:
        """Run the program once, to its end. spans: of its operations, to be filled in."""


def calls_of(steps: Sequence[Step]) -> list[list[int]]:
    """Return the operations, by index, that are issued together: fused messages are."""
    calls: list[list[int]] = []
    for index, step in enumerate(steps):
        is_fused = isinstance(step.op, CommOp) and step.op.fused and calls
        if is_fused and isinstance(steps[calls[-1][-1]].op, CommOp):
            calls[-1].append(index)
        else:
            calls.append([index])
    return calls


def is_message(step: Step) -> bool:
    """Return whether a step communicates: alone in its group a rank has nothing to send."""
    return len(step.members) > 1


class _Call:
    """Messages that are under way together.

    Where gloo does not tell when a message ends (sends, receives and some collectives), its
    time is known only if the host waits for it at once.
    """

    def __init__(
        self,
        members: list[int],
        issue: Callable[[], list[Work]],
        spans: list[Span] | None,
        origin: float,
    ) -> None:
        self._members, self._spans, self._origin = members, spans, origin
        self._begin = time.perf_counter()
        self._works = issue()
        self._is_over = False
        for work in self._works if spans is not None else ():
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(lambda _future: self._note())

    def wait(self, *, at_once: bool) -> None:
        """Wait for the end. A work of gloo must not be waited for twice."""
        if not self._is_over:
            self._is_over = True
            for work in self._works:
                work.wait()
            if at_once:
                self._note()

    def _note(self) -> None:
        if self._spans is not None and math.isnan(self._spans[self._members[0]][1]):
            span = self._begin - self._origin, time.perf_counter() - self._begin
            for index in self._members:
                self._spans[index] = span


class HostEngine:
    """Runs a program on a CPU: the host computes, and waits for messages."""

    def __init__(
        self,
        steps: Sequence[Step],
        messenger: Messenger,
        buffers: Buffers,
        *,
        sleeps: bool,
        blocking: bool,
    ) -> None:
        self._steps, self._calls = steps, calls_of(steps)
        self._messenger, self._buffers = messenger, buffers
        self._sleeps, self._blocking = sleeps, blocking
        self.blocked_s = 0.0

    def run(self, spans: list[Span] | None = None) -> None:
        self.blocked_s, origin = 0.0, time.perf_counter()
        pending: dict[int, _Call] = {}
        for numbers in self._calls:
            for dep in {dep for index in numbers for dep in self._steps[index].deps}:
                self._wait(pending.get(dep))
            first = self._steps[numbers[0]]
            members = [index for index in numbers if is_message(self._steps[index])]
            if not members:
                begin = time.perf_counter()
                if self._compute(first) and spans is not None:
                    end = time.perf_counter()
                    spans[numbers[0]] = begin - origin, end - begin
                continue
            steps = [self._steps[index] for index in members]
            issue = partial(self._messenger.issue, steps, self._buffers)
            call = _Call(members, issue, spans, origin)
            pending |= dict.fromkeys(members, call)
            is_send = all(step.op.collective == SEND for step in steps)  # type: ignore[union-attr]
            if not is_send and (self._blocking or first.op.stream == COMPUTE):
                self._wait(call, at_once=True)
        for call in pending.values():
            self._wait(call)

    def _compute(self, step: Step) -> bool:
        """Return whether the step computes, and took its time."""
        time_s = step.op.time_s
        if isinstance(step.op, CommOp) or not (self._sleeps and time_s):
            return False
        time.sleep(time_s)
        return True

    def _wait(self, call: _Call | None, *, at_once: bool = False) -> None:
        if call is not None:
            begin = time.perf_counter()
            call.wait(at_once=at_once)
            self.blocked_s += time.perf_counter() - begin


class DeviceEngine:
    """Runs a program on a GPU: one stream per stream of the workload, events between them."""

    def __init__(
        self,
        steps: Sequence[Step],
        messenger: Messenger,
        buffers: Buffers,
        device: torch.device,
        *,
        sleeps: bool,
        blocking: bool,
    ) -> None:
        self._steps, self._calls = steps, calls_of(steps)
        self._messenger, self._buffers, self._device = messenger, buffers, device
        self._blocking = blocking
        self._cycles_per_s = _spin_rate(device) if sleeps else 0.0
        names = dict.fromkeys((COMPUTE, *(step.op.stream for step in steps)))
        self._streams = {name: torch.cuda.Stream(device) for name in names}
        self._awaited = {dep for step in steps for dep in step.deps}
        self.blocked_s = math.nan

    def run(self, spans: list[Span] | None = None) -> None:
        torch.cuda.synchronize(self._device)
        ends: dict[int, Any] = {}
        events: list[tuple[list[int], Any, Any]] = []
        origin = torch.cuda.Event(enable_timing=True)
        origin.record(self._streams[COMPUTE])
        for call in self._calls:
            first = self._steps[call[0]]
            stream = self._streams[first.op.stream]
            for dep in {dep for index in call for dep in self._steps[index].deps}:
                if dep in ends:
                    stream.wait_event(ends[dep])
            members = [index for index in call if is_message(self._steps[index])]
            issue = self._issue(first, members)
            if issue is None and not self._awaited.intersection(call):
                continue
            with torch.cuda.stream(stream):
                begin = torch.cuda.Event(enable_timing=True) if spans is not None else None
                if begin is not None:
                    begin.record()
                if issue is not None:
                    issue()
                end = torch.cuda.Event(enable_timing=spans is not None)
                end.record()
            ends |= dict.fromkeys(call, end)
            if issue is not None and begin is not None:
                events.append((call, begin, end))
            if self._blocking:
                torch.cuda.synchronize(self._device)
        torch.cuda.synchronize(self._device)
        for call, begin, end in events:
            span = origin.elapsed_time(begin) * 1e-3, begin.elapsed_time(end) * 1e-3
            for index in call:
                assert spans is not None
                spans[index] = span

    def _issue(self, first: Step, members: list[int]) -> Callable[[], None] | None:
        if members:
            return partial(self._send, [self._steps[index] for index in members])
        time_s = first.op.time_s
        if isinstance(first.op, CommOp) or not (self._cycles_per_s and time_s):
            return None
        return partial(torch.cuda._sleep, round(time_s * self._cycles_per_s))

    def _send(self, steps: list[Step]) -> None:
        for work in self._messenger.issue(steps, self._buffers):
            work.wait()  # the stream waits, not the host


def _spin_rate(device: torch.device) -> float:
    """Return the cycles per second of the kernel that keeps a device busy."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first call loads the kernel
        begin.record()
        torch.cuda._sleep(_SPIN_CYCLES)
        end.record()
        torch.cuda.synchronize(device)
    return float(_SPIN_CYCLES / (begin.elapsed_time(end) * 1e-3))
