"""How a rank's program runs; the engine of a CPU, where the host computes and waits.

An operation starts when the one before it on its stream has ended, and what it waits for. The
host issues operations in the order of the program. Messages on the stream "compute" are waited
for; a send never is before the end of the step, because a receive may follow it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stepmark.cases.message import RECV, SEND
from stepmark.replays.bench.computation import Computation
from stepmark.replays.bench.messages import Buffers, Messenger, Work
from stepmark.step.rank_program import Step
from stepmark.step.workload import COMPUTE, CommOp, Operation

# Start of an operation since that of the step, and its duration, in seconds.
Span = tuple[float, float]
UNKNOWN: Span = (math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a rank runs, and with what. is_paced: not before the starts that its steps have."""

    steps: Sequence[Step]
    messenger: Messenger
    buffers: Buffers
    computation: Computation
    blocking: bool = False
    is_paced: bool = False

    def start_s(self, index: int) -> float:
        """Return the seconds since the begin of the step before which this one waits."""
        return (self.steps[index].op.start_s or 0.0) if self.is_paced else 0.0


class Engine(Protocol):
    """Runs a program. blocked_s: how long the host has waited for messages."""

    blocked_s: float

    def run(self, spans: list[Span] | None = None) -> None:
        """Run the program once, to its end. spans: of its operations, to be filled in."""


def calls_of(steps: Sequence[Step]) -> list[list[int]]:
    """Return the operations, by index, that are issued together: fused messages are."""
    calls: list[list[int]] = []
    for index, step in enumerate(steps):
        before = steps[calls[-1][-1]].op if calls else None
        is_fused = isinstance(step.op, CommOp) and step.op.fused
        if is_fused and isinstance(before, CommOp) and _is_pair(before) is _is_pair(step.op):
            calls[-1].append(index)
        else:
            calls.append([index])
    return calls


def _is_pair(op: Operation) -> bool:
    return isinstance(op, CommOp) and op.collective in (SEND, RECV)


def is_message(step: Step) -> bool:
    """Return whether a step communicates: alone in its group a rank has nothing to send."""
    return len(step.members) > 1


def only_sends(steps: Sequence[Step]) -> bool:
    """Return whether a call is of sends alone, which end when others receive."""
    return all(isinstance(step.op, CommOp) and step.op.collective == SEND for step in steps)


def wait_until(moment: float) -> None:
    """Return at this time of perf_counter, or at once if it is over."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left if left < 1e-4 else left - 5e-5)


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
        self._members = members
        self._spans = spans
        self._origin = origin
        self._begin = time.perf_counter()
        self._works = issue()
        self._is_over = False
        self._num_left = len(self._works)
        for work in self._works if spans is not None else ():
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(lambda _future: self._end_one())

    def wait(self, *, at_once: bool) -> None:
        """Wait for the end. A work of gloo must not be waited for twice."""
        if not self._is_over:
            self._is_over = True
            for work in self._works:
                work.wait()
            if at_once:
                self._note()

    def _end_one(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._note()

    def _note(self) -> None:
        if self._spans is not None and math.isnan(self._spans[self._members[0]][1]):
            span = self._begin - self._origin, time.perf_counter() - self._begin
            for index in self._members:
                self._spans[index] = span


class HostEngine:
    """Runs a program on a CPU."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._steps = program.steps
        self._calls = calls_of(program.steps)
        self._actions = [program.computation.action(step) for step in program.steps]
        self.blocked_s = 0.0

    def run(self, spans: list[Span] | None = None) -> None:
        self.blocked_s, origin = 0.0, time.perf_counter()
        pending: dict[int, _Call] = {}
        for numbers in self._calls:
            for dep in {dep for index in numbers for dep in self._steps[index].deps}:
                self._wait(pending.get(dep))
            wait_until(origin + self._program.start_s(numbers[0]))
            members = [index for index in numbers if is_message(self._steps[index])]
            if not members:
                self._compute(numbers[0], spans, origin)
                continue
            steps = [self._steps[index] for index in members]
            issue = partial(self._program.messenger.issue, steps, self._program.buffers)
            call = _Call(members, issue, spans, origin)
            pending |= dict.fromkeys(members, call)
            at_once = self._program.blocking or steps[0].op.stream == COMPUTE
            if at_once and not only_sends(steps):
                self._wait(call, at_once=True)
        for call in pending.values():
            self._wait(call)
        if spans is not None:
            self._put_in_a_row(spans)

    def _put_in_a_row(self, spans: list[Span]) -> None:
        """Begin each message where the one before it on its stream ends.

        gloo takes what is issued while another runs at once, and it waits inside of gloo.
        """
        ends: dict[str, float] = {}
        for call in self._calls:
            members = [index for index in call if is_message(self._steps[index])]
            if not members or math.isnan(spans[members[0]][1]):
                continue
            start, time_s = spans[members[0]]
            stream = self._steps[members[0]].op.stream
            end = start + time_s
            before = ends.get(stream, 0.0)
            if start < before < end:
                for index in members:
                    spans[index] = before, end - before
            ends[stream] = max(before, end)

    def _compute(self, index: int, spans: list[Span] | None, origin: float) -> None:
        action = self._actions[index]
        if action is None:
            return
        begin = time.perf_counter()
        action()
        if spans is not None:
            spans[index] = begin - origin, time.perf_counter() - begin

    def _wait(self, call: _Call | None, *, at_once: bool = False) -> None:
        if call is not None:
            begin = time.perf_counter()
            call.wait(at_once=at_once)
            self.blocked_s += time.perf_counter() - begin
