"""A plain simulation of steps, to compare with: each operation by itself, no repeats left out.

At every moment all operations that can start do; then time moves to the next end or issue.
Returned are sums of time by ledger line of the last step of each stage.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from stepmark.cases.message import RECV, SEND
from stepmark.step.workload import COMPUTE, CommOp, Operation, Workload
from stepmark.timeline.ledger import Group, Idle, Work
from stepmark.timeline.step_cost import Costs

Line = tuple[Group, str]


@dataclass(eq=False)
class Node:
    """An operation of a step. phases: (work or None for launch gaps, seconds)."""

    op: Operation
    step: int
    stage: int
    deps: "list[Node]" = field(default_factory=list)
    call: "list[Node]" = field(default_factory=list)  # of one group call, this one too
    host_s: float = 0.0
    issue: float | None = None
    phases: list[tuple[Work | None, float]] = field(default_factory=list)
    start: float | None = None
    end: float | None = None

    @property
    def done(self) -> bool:
        """Return whether it has ended, and what was issued in one call with it."""
        return all(node.end is not None for node in self.call or [self])


def members(workload: Workload, stage: int, group: str) -> tuple[int, ...]:
    return workload.groups[group].members(stage * workload.world_size // len(workload.stages))


def stage_of(workload: Workload, rank: int) -> int:
    return rank * len(workload.stages) // workload.world_size


class Reference:
    """Steps of all stages. `lines` and `ends` are by stage and step."""

    def __init__(
        self, workload: Workload, costs: Costs, num_steps: int, *, host: bool = True
    ) -> None:
        self.workload, self.costs, self.host = workload, costs, host
        self.num_stages = len(workload.stages)
        self.streams: list[dict[str, list[Node]]] = []
        self.nodes = [self._build(stage, num_steps) for stage in range(self.num_stages)]
        self.partners: dict[int, list[Node]] = {}
        self._match()
        self.lines: list[list[Counter[Line]]] = [
            [Counter() for _ in range(num_steps)] for _ in self.nodes
        ]
        self.ends: list[list[float]] = [[] for _ in self.nodes]
        self.waiting = [[0.0] * num_steps for _ in self.nodes]
        self.contention = [[0.0] * num_steps for _ in self.nodes]
        self.now, self.host_free = 0.0, [0.0] * self.num_stages
        self.issued = [0] * self.num_stages
        self.place = [dict.fromkeys(streams, 0) for streams in self.streams]
        self.running: dict[int, list[Any]] = {}  # computation: node, phase, seconds left
        self.moving: dict[int, list[Any]] = {}  # transfers: sides, seconds left
        self.calls: list[list[Node]] = [[] for _ in self.nodes]  # started, not all done
        self._run(num_steps)

    def _build(self, stage: int, num_steps: int) -> list[Node]:
        nodes: list[Node] = []
        named: dict[str, list[Node]] = defaultdict(list)
        names = {op.name for op in self.workload.expand(stage) if op.name}
        for step in range(num_steps):
            last: Node | None = None
            for op in self.workload.expand(stage):
                node = Node(op, step, stage)
                node.host_s = self.costs.host_comm_s(node.op)
                for text in op.after:
                    name, back = text, 0
                    if text not in names:
                        name, _, digits = text.rpartition("~")
                        back = int(digits)
                    if back < len(named[name]):
                        node.deps.append(named[name][-1 - back])
                if isinstance(op, CommOp):
                    fused = last and isinstance(last.op, CommOp) and op.fused
                    if fused and last and last.op.stream == op.stream:
                        node.call = last.call
                    node.call.append(node)
                elif op.is_wait:
                    node.host_s = 0.0
                else:
                    cost = self.costs.compute(op)
                    gap = cost.num_kernels * self.costs.gap_s
                    node.host_s = cost.host_s
                    node.phases = [(None, gap), *cost.time_s.items()]
                nodes.append(node)
                last = node
                if op.name:
                    named[op.name].append(node)
        streams: dict[str, list[Node]] = defaultdict(list)
        for node in nodes:
            streams[node.op.stream].append(node)
        self.streams.append(streams)
        return nodes

    def _match(self) -> None:
        """Find the operations of other stages with which one communicates."""
        waiting: dict[Any, list[Node]] = defaultdict(list)
        for stage, nodes in enumerate(self.nodes):
            count: Counter[Any] = Counter()
            for node in nodes:
                op = node.op
                if not isinstance(op, CommOp):
                    continue
                ranks = members(self.workload, stage, op.group)
                stages = sorted({stage_of(self.workload, rank) for rank in ranks})
                key: Any = op.group, tuple(stages)
                if op.peer is not None:
                    own = ranks.index(stage * self.workload.world_size // self.num_stages)
                    rank = ranks[(own + op.peer) % len(ranks)]
                    other = stage_of(self.workload, rank)
                    pair = (stage, other) if op.collective == SEND else (other, stage)
                    key, stages = (*pair, op.phase), sorted(set(pair))
                if len(stages) == 1:
                    self.partners[id(node)] = [node]
                    continue
                both = waiting[key, count[key]]
                count[key] += 1
                both.append(node)
                self.partners[id(node)] = both

    def _duration(self, sides: list[Node]) -> float:
        node = sides[0]
        if len(sides) > 1:
            return max(self._own(side.op) for side in sides)
        times = Counter[str]()
        for other in self._local(node):
            assert isinstance(other.op, CommOp)
            kind = other.op.collective if other.op.peer is not None else ""
            times[kind] += self._own(other.op)
        return times[""] + max(times[SEND], times[RECV])

    def _own(self, op: Operation) -> float:
        assert isinstance(op, CommOp)
        return self.costs.comm(op, self.workload.groups[op.group])

    def _run(self, num_steps: int) -> None:
        while True:
            for stage in range(self.num_stages):
                self._issue(stage)
            while self._settle():
                pass
            if all(len(ends) >= num_steps for ends in self.ends):
                return
            self._advance()

    def _issue(self, stage: int) -> None:
        """Issue what the host can, at most two steps ahead."""
        nodes = self.nodes[stage]
        while self.issued[stage] < len(nodes):
            number = self.issued[stage]
            node = nodes[number]
            if node.step > 2 and nodes[number - 1].step < node.step:
                if len(self.ends[stage]) <= node.step - 3:
                    return
                limit = self.ends[stage][node.step - 3]
                self.host_free[stage] = max(self.host_free[stage], limit)
            self.host_free[stage] += node.host_s if self.host else 0.0
            node.issue = self.host_free[stage]
            self.issued[stage] += 1

    def _settle(self) -> bool:
        """Start and end what does so now. Return whether there was anything."""
        again = False
        for stage, streams in enumerate(self.streams):
            for name, nodes in streams.items():
                if self.place[stage][name] < len(nodes):
                    node = nodes[self.place[stage][name]]
                    if node.start is None and self._can_start(node):
                        self._start(node)
                        again = True
                    again |= self._pass(stage, name)
        for key, (node, phase, left) in list(self.running.items()):
            if left <= 1e-15:
                again = True
                if phase + 1 < len(node.phases):
                    self.running[key] = [node, phase + 1, node.phases[phase + 1][1]]
                else:
                    node.end = self.now
                    del self.running[key]
        for key, (sides, left) in list(self.moving.items()):
            if left <= 1e-15:
                again = True
                for side in sides:
                    for node in self._local(side) if len(sides) == 1 else [side]:
                        node.end = self.now
                del self.moving[key]
        return again

    def _pass(self, stage: int, name: str) -> bool:
        """Go on to the next operation of a stream if this one has ended."""
        nodes, place = self.streams[stage][name], self.place[stage][name]
        node = nodes[place]
        if not node.done:
            return False
        place = self.place[stage][name] = place + max(1, len(node.call))
        if name == COMPUTE and (place == len(nodes) or nodes[place].step > node.step):
            self.ends[stage].append(self.now)
        return True

    def _can_start(self, node: Node) -> bool:
        calls = node.call or [node]
        issue = calls[-1].issue
        if node.step > len(self.ends[node.stage]) or issue is None:
            return False
        awaited = (dep for one in calls for dep in one.deps if dep not in calls)
        return issue <= self.now and all(dep.done for dep in awaited)

    def _start(self, node: Node) -> None:
        for one in node.call or [node]:
            one.start = self.now
        self.calls[node.stage] += node.call
        if not node.call:
            seconds = node.phases[0][1] if node.phases else 0.0
            self.running[id(node)] = [node, 0, seconds]
        for one in node.call:
            sides = self.partners[id(one)]
            is_first = len(sides) > 1 or one is self._local(one)[0]
            if is_first and all(side.start is not None for side in sides):
                self.moving[id(sides)] = [sides, self._duration(sides)]

    def _local(self, node: Node) -> list[Node]:
        """Return the operations of a group call inside a stage."""
        return [one for one in node.call if len(self.partners[id(one)]) == 1]

    def _advance(self) -> None:
        """Go to the next moment at which anything ends or is issued."""
        stages = range(self.num_stages)
        computing = [any(n.stage == s for n, _, _ in self.running.values()) for s in stages]
        sending = [
            any(side.stage == s for sides, _ in self.moving.values() for side in sides)
            for s in stages
        ]
        rates: dict[int, float] = {}
        for key, (node, phase, _) in self.running.items():
            work = node.phases[phase][0]
            contended = work is not None and sending[node.stage]
            slowdown = self.costs.compute_slowdown.get(work, 1.0)
            rates[key] = 1 / slowdown if contended else 1.0
        for key, (sides, _) in self.moving.items():
            busy = any(computing[side.stage] for side in sides)
            rates[key] = 1 / self.costs.comm_slowdown if busy else 1.0
        active = self.running | self.moving
        waits = [entry[-1] / rates[key] for key, entry in active.items()]
        on_host = set()
        for stage, streams in enumerate(self.streams):
            for name, nodes in streams.items():
                if self.place[stage][name] < len(nodes):
                    head = nodes[self.place[stage][name]]
                    issue = (head.call or [head])[-1].issue
                    if head.start is None and issue is not None and issue > self.now:
                        waits.append(issue - self.now)
                        on_host.add(stage)
        assert waits, "deadlock"
        step = min(waits)
        for stage in stages:
            self._count(stage, step, rates, is_host=stage in on_host)
        self.now += step
        for key, entry in active.items():
            entry[-1] -= step * rates[key]

    def _count(
        self, stage: int, step: float, rates: dict[int, float], *, is_host: bool
    ) -> None:
        """Add this time to a line of the stage's current step."""
        number = len(self.ends[stage])
        if number >= len(self.lines[stage]):
            return
        computes = [
            (node.start, node.phases[phase][0], rates[key])
            for key, (node, phase, _) in self.running.items()
            if node.stage == stage
        ]
        works = sorted((w, start) for start, w, _ in computes if w is not None)
        if works:
            self.contention[stage][number] += step * (1 - computes[0][2])
        copies = [work for work in works if work[0] is Work.COPY]
        works = [work for work in works if work[0] is not Work.COPY]
        is_moving = any(
            side.stage == stage for sides, _ in self.moving.values() for side in sides
        )
        self.calls[stage] = [node for node in self.calls[stage] if not node.done]
        comms = sorted((node.start, node.call[0].op.collective) for node in self.calls[stage])
        if works:
            line = (Group.OVERLAPPED if comms else Group.COMPUTE, str(works[0][0]))
        elif comms:
            line = Group.COMM, str(comms[0][1])
            if not is_moving:
                self.waiting[stage][number] += step
        elif copies:
            line = Group.COPIES, str(copies[0][0])
        elif computes:
            line = Group.IDLE, str(Idle.LAUNCH_GAP)
        else:
            line = Group.IDLE, str(Idle.HOST if is_host else Idle.RANK)
        self.lines[stage][number][line] += step

    def step_s(self, stage: int = 0) -> float:
        return self.ends[stage][-1] - self.ends[stage][-2]


def same_lines(ours: Counter[Line], theirs: Counter[Line], most: float) -> bool:
    """Return whether all lines agree."""
    keys = {*ours, *theirs}
    return all(math.isclose(ours[key], theirs[key], rel_tol=1e-6, abs_tol=most) for key in keys)
