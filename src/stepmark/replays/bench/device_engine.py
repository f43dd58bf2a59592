"""The engine of a GPU: one CUDA stream per stream of the workload, events between them.

What runs is prepared once. In an iteration the host issues as little as it can: events only
where another stream waits, and busy times in a row as one kernel. In a pass that times
operations, each stands between two events, and the device starts late, so that the host's
launches are not in a time.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from stepmark.measuring.clock import spin
from stepmark.replays.bench.computation import Action
from stepmark.replays.bench.engine import (
    Program,
    Span,
    calls_of,
    is_message,
    only_sends,
    wait_until,
)
from stepmark.step.rank_program import Step
from stepmark.step.workload import COMPUTE

_MOST_HEAD_START_S = 20e-3


@dataclass(slots=True, kw_only=True)
class _Launch:
    """Operations that the host issues at once. waits: for events of other streams."""

    operations: list[int]
    stream: Any
    waits: list[Any] = field(default_factory=list)
    action: Action | None = None
    busy_s: float = 0.0  # of which the action is made
    start_s: float = 0.0
    begin: Any = None  # events; end is also what others wait for
    end: Any = None
    is_waited_for: bool = False  # by the host


class DeviceEngine:
    """Runs a program on a GPU."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program = program
        self._device = device
        names = dict.fromkeys((COMPUTE, *(step.op.stream for step in program.steps)))
        self._streams = {name: torch.cuda.Stream(device) for name in names}
        self._awaited = {
            dep
            for step in program.steps
            for dep in step.deps
            if program.steps[dep].op.stream != step.op.stream
        }
        self._timed = self._launches(is_timed=True)
        self._untimed = self._launches(is_timed=False)
        self._host_s = 0.0  # that the last iteration took to issue
        self.blocked_s = math.nan

    def run(self, spans: list[Span] | None = None) -> None:
        launches = self._untimed if spans is None else self._timed
        torch.cuda.synchronize(self._device)
        compute = self._streams[COMPUTE]
        origin = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(compute):
            if spans is not None:
                spin(min(self._host_s, _MOST_HEAD_START_S))
            origin.record(compute)
            if spans is not None:  # no stream starts before
                for stream in self._streams.values():
                    stream.wait_event(origin)
            begin_s = time.perf_counter()
            self._issue(launches, begin_s)
            self._host_s = time.perf_counter() - begin_s
        torch.cuda.synchronize(self._device)
        for each in launches if spans is not None else ():
            if each.action is not None:
                span = (
                    origin.elapsed_time(each.begin) * 1e-3,
                    each.begin.elapsed_time(each.end) * 1e-3,
                )
                assert spans is not None
                for index in each.operations:
                    spans[index] = span

    def _issue(self, launches: Iterable[_Launch], begin_s: float) -> None:
        current = self._streams[COMPUTE]
        for each in launches:
            if each.start_s:
                wait_until(begin_s + each.start_s)
            if each.stream is not current:
                torch.cuda.set_stream(each.stream)
                current = each.stream
            for event in each.waits:
                current.wait_event(event)
            if each.begin is not None:
                each.begin.record(current)
            if each.action is not None:
                each.action()
            if each.end is not None:
                each.end.record(current)
            if each.is_waited_for:
                current.synchronize()

    def _launches(self, *, is_timed: bool) -> list[_Launch]:
        """Return what the host issues; busy times in a row are one, if nothing is timed."""
        merges = not (is_timed or self._program.blocking)
        launches: list[_Launch] = []
        ends: dict[int, Any] = {}
        busy: dict[Any, _Launch] = {}  # by stream: what may become longer
        for call in calls_of(self._program.steps):
            launch = self._launch(call, ends)
            is_awaited = not self._awaited.isdisjoint(call)
            before = busy.get(launch.stream)
            if before and merges and not (launch.action or launch.waits or launch.start_s):
                before.busy_s += launch.busy_s
                launch = before
            elif launch.action or launch.busy_s or launch.waits or is_awaited:
                launches.append(launch)
                busy.pop(launch.stream, None)
                if launch.busy_s:
                    busy[launch.stream] = launch
            if is_awaited:
                launch.end = torch.cuda.Event(enable_timing=is_timed)
                ends |= dict.fromkeys(call, launch.end)
                busy.pop(launch.stream, None)
        for launch in launches:
            if launch.busy_s:
                launch.action = self._program.computation.busy(launch.busy_s)
            launch.is_waited_for |= self._program.blocking and bool(launch.busy_s)
            if is_timed and launch.action is not None:
                launch.begin = torch.cuda.Event(enable_timing=True)
                launch.end = launch.end or torch.cuda.Event(enable_timing=True)
        return launches

    def _launch(self, call: list[int], ends: dict[int, Any]) -> _Launch:
        steps = self._program.steps
        deps = {dep for index in call for dep in steps[index].deps if dep in ends}
        stream = steps[call[0]].op.stream
        launch = _Launch(
            operations=call,
            stream=self._streams[stream],
            waits=[ends[dep] for dep in sorted(deps) if steps[dep].op.stream != stream],
            start_s=self._program.start_s(call[0]),
        )
        messages = [steps[index] for index in call if is_message(steps[index])]
        if messages:
            launch.action = partial(self._send, messages)
            launch.is_waited_for = self._program.blocking and not only_sends(messages)
        elif seconds := self._program.computation.busy_s(steps[call[0]]):
            launch.busy_s = seconds
        else:
            launch.action = self._program.computation.action(steps[call[0]])
        return launch

    def _send(self, steps: list[Step]) -> None:
        for work in self._program.messenger.issue(steps, self._program.buffers):
            work.wait()  # the stream waits, not the host
