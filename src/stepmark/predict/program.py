"""Programs of pipeline stages, from which step_events.py simulates a step.

Computation of one stream without a dependency on another stream in between is one Segment, and
collectives of a group call are one Call. Equal blocks share both.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from stepmark.core.ledger import Idle, Work
from stepmark.core.message import SEND
from stepmark.core.step_cost import Costs, OpCost
from stepmark.core.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Operation,
    Run,
    Workload,
    parse_after,
)
from stepmark.core.workload_stages import stages_of, transfer_of

Clock = Mapping[Work, float]
Kind = tuple[str, bool]  # Work, Idle of a gap, or a collective; whether it is recomputed
_WAIT = OpCost(time_s={}, num_kernels=0.0)


class Segment:
    """Computation on one stream that runs without a break once it is issued.

    Before the kernels of each operation come their launch gaps, which are pieces, too.
    kinds, owners: of the pieces, and the index of their operation. ends, slowed: when they end,
    alone and while a collective runs.
    issues: when the host has issued each operation. lead_s: the longest time from the start of
    the segment's issue to that of an operation, less the one to its start on the device: if the
    segment starts later, it never waits for the host. tail_s: from the start of the issue to
    the end, if it does.
    """

    def __init__(
        self, ops: Sequence[ComputeOp], costs: Sequence[OpCost], machine: Costs, clock: Clock
    ) -> None:
        self.ops: Sequence[Operation] = ops
        self._computes, self._costs, self._machine, self._clock = ops, costs, machine, clock
        self.kinds: list[Kind] = []
        self.owners: list[int] = []
        times, slowdowns, starts = list[float](), list[float](), list[int]()
        for owner, (op, cost) in enumerate(zip(ops, costs, strict=True)):
            starts.append(len(times))
            gap = machine.gap, cost.num_kernels * machine.gap_s
            parts: tuple[tuple[Work | Idle, float], ...] = (gap, *cost.time_s.items())
            for kind, time_s in parts:
                if time_s:
                    self.kinds.append((kind, op.recompute))
                    self.owners.append(owner)
                    work = kind if isinstance(kind, Work) else None
                    times.append(time_s * (clock.get(work, 1.0) if work else 1.0))
                    slowdowns.append(machine.compute_slowdown.get(work, 1.0) if work else 1.0)
        slow_times = [time * factor for time, factor in zip(times, slowdowns, strict=True)]
        self.ends = [0.0, *accumulate(times)]
        self.slowed = [0.0, *accumulate(slow_times)]
        self.total_s = self.ends[-1]
        self.issues = list(accumulate(cost.host_s for cost in costs))
        self.host_s = self.issues[-1]
        self.num_kernels = sum(cost.num_kernels for cost in costs)
        waits = [
            issue - self.ends[start] for issue, start in zip(self.issues, starts, strict=True)
        ]
        self.lead_s = max(waits)
        self.tail_s = self.total_s + self.lead_s
        self.named: tuple[Operation, ...] = (ops[0], *ops[1:][-1:])  # they wait or are awaited
        self.places: Sequence[tuple[int, int]] = ((0, 0),) * len(ops)
        self._whole: dict[bool, Mapping[Kind, float]] = {}

    @cached_property
    def singles(self) -> "tuple[Segment, ...]":
        """One segment per operation, for a host that is slower than the device."""
        pairs = zip(self._computes, self._costs, strict=True)
        return tuple(Segment((op,), (cost,), self._machine, self._clock) for op, cost in pairs)

    def time_of(self, progress: float, *, slow: bool) -> float:
        """Return the time until this progress, which is the time it takes alone."""
        return _mapped(self.ends, self.slowed, progress) if slow else progress

    def progress_after(self, time_s: float, *, slow: bool) -> float:
        return _mapped(self.slowed, self.ends, time_s) if slow else time_s

    def times(self, first: float, last: float, *, slow: bool) -> Mapping[Kind, float]:
        """Return the time by work from one progress to another."""
        is_whole = first == 0.0 and last == self.total_s
        if is_whole and slow in self._whole:
            return self._whole[slow]
        found: dict[Kind, float] = {}
        for index, time_s in self.pieces(first, last, slow=slow):
            kind = self.kinds[index]
            found[kind] = found.get(kind, 0.0) + time_s
        if is_whole:
            self._whole[slow] = found
        return found

    def pieces(self, first: float, last: float, *, slow: bool) -> Iterator[tuple[int, float]]:
        """Yield the pieces from one progress to another, and how long each takes."""
        ends = self.slowed if slow else self.ends
        for index in range(max(0, bisect_right(self.ends, first) - 1), len(self.kinds)):
            begin, end = self.ends[index], self.ends[index + 1]
            if begin >= last:
                break
            share = (min(end, last) - max(begin, first)) / (end - begin) if end > begin else 1
            yield index, (ends[index + 1] - ends[index]) * share


class Busy(NamedTuple):
    """Computation and launch gaps of a segment, from one progress to another at one speed."""

    step: int
    item: int
    segment: Segment
    start: float
    end: float
    first: float
    last: float
    slow: bool

    @property
    def times(self) -> Mapping[Kind, float]:
        return self.segment.times(self.first, self.last, slow=self.slow)

    @property
    def pieces(self) -> Iterator[tuple[int, float]]:
        return self.segment.pieces(self.first, self.last, slow=self.slow)

    @property
    def extra_s(self) -> float:
        """Return the time that communication adds."""
        return self.end - self.start - (self.last - self.first)


def _mapped(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x on the line through points that increase."""
    index = bisect_right(xs, x)
    if index == len(xs):
        return ys[-1]
    begin, end = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - begin) / (end - begin)


@dataclass(frozen=True, slots=True)
class Part:
    """A transfer of a call. key: what a number of stages begin together; None: one stage's."""

    time_s: float
    key: object | None = None
    num_stages: int = 1


@dataclass(slots=True, eq=False)
class Call:
    """Collectives that are issued together and end together."""

    ops: tuple[CommOp, ...]
    parts: tuple[Part, ...]
    host_s: float
    num_kernels = 1.0

    @property
    def named(self) -> tuple[CommOp, ...]:
        return self.ops


class Program:
    """One stage's items in issue order, each a Segment or a Call.

    begins, issues: when the host begins to issue an item, and when it can start. deps: items of
    the step on other streams that it waits for; dependents wait for it, next_dependents do in
    the next step. queues: items by stream; the first is COMPUTE. bounds: items at which a
    repetition of the steady state begins, and where the last ends.
    """

    def __init__(self, size: int) -> None:
        self.works: list[Segment | Call] = []
        self.offsets: list[tuple[int, int]] = []  # layer and micro-batch
        self.streams: list[int] = []
        self.begins: list[float] = []
        self.issues: list[float] = []
        self.deps: list[list[int]] = []
        self.dependents: list[list[int]] = [[] for _ in range(size)]
        self.next_dependents: list[list[int]] = [[] for _ in range(size)]
        self.queues: list[list[int]] = [[]]
        self.ordinals: list[list[int]] = []  # of a call's parts, among those of their key
        self._num_parts: Counter[object] = Counter()
        self.host_s = 0.0
        self.bounds: list[int] = []

    def add(
        self, work: Segment | Call, offset: tuple[int, int], stream: int, deps: Iterable[int]
    ) -> None:
        index = len(self.works)
        self.works.append(work)
        self.offsets.append(offset)
        self.streams.append(stream)
        self.deps.append([dep for dep in deps if self.streams[dep] != stream])
        for dep in self.deps[index]:
            self.dependents[dep].append(index)
        if stream == len(self.queues):
            self.queues.append([])
        self.queues[stream].append(index)
        ordinals: list[int] = []
        for part in work.parts if isinstance(work, Call) else ():
            ordinals.append(self._num_parts[part.key])
            self._num_parts[part.key] += 1
        self.ordinals.append(ordinals)
        self.begins.append(self.host_s)
        first_s = work.host_s if isinstance(work, Call) else work.issues[0]
        self.issues.append(self.host_s + first_s)
        self.host_s += work.host_s

    def waits_for(self, item: int, other: int) -> bool:
        """Return whether an item waits for another, or for a later one of its stream."""
        stream = self.streams[other]
        return any(dep >= other and self.streams[dep] == stream for dep in self.deps[item])


_Placed = tuple[Segment | Call, int, int]  # layer and micro-batch to add


class Merged(Segment):
    """Segments and calls on one stream that nothing outside waits for or slows inside.

    Hosts are ahead of it. places: layer and micro-batch of each operation.
    """

    def __init__(self, works: Sequence[_Placed], awaited: Collection[str]) -> None:
        ops, places = list[Operation](), list[tuple[int, int]]()
        self.kinds, self.owners, self.ends = [], [], [0.0]
        named = list[Operation]()
        for work, layer, microbatch in works:
            first, begin = len(ops), self.ends[-1]
            named += work.named
            if isinstance(work, Call):
                ops.append(work.ops[0])
                places.append((layer, microbatch))
                self.kinds.append((work.ops[0].collective, False))
                self.owners.append(first)
                self.ends.append(begin + work.parts[0].time_s)
            else:
                ops += work.ops
                places += [(own + layer, mb + microbatch) for own, mb in work.places]
                self.kinds += work.kinds
                self.owners += [first + owner for owner in work.owners]
                self.ends += [begin + end for end in work.ends[1:]]
        self.ops, self.places = ops, places
        self.slowed, self.total_s = self.ends, self.ends[-1]
        self.host_s = sum(work.host_s for work, _, _ in works)
        self.issues = [self.host_s]
        self.num_kernels = sum(work.num_kernels for work, _, _ in works)
        self.named = tuple(op for op in named if op.after or op.name in awaited)
        self._whole = {}


def _moved(placed: Iterable[_Placed], layer: int, microbatch: int) -> Iterator[_Placed]:
    for work, own, mb in placed:
        yield work, layer + own, microbatch + mb


class Compiler:
    """Compiles the stages of a workload. Costs are those of operations with relative layers.

    merges: what is on the computation's stream and inside a stage becomes Merged.
    """

    def __init__(self, workload: Workload, costs: Costs, clock: Clock, *, merges: bool) -> None:
        self._workload, self._costs, self._clock = workload, costs, clock
        self._merges = merges
        self._op_costs: dict[int, OpCost] = {}
        self._blocks: dict[tuple[str, int], list[_Placed]] = {}
        self._names = {
            item.name
            for block in workload.blocks.values()
            for item in block
            if not isinstance(item, Run) and item.name
        }
        self._after: dict[str, tuple[str, int]] = {}
        self._awaited = {
            self._parsed(text)[0]
            for block in workload.blocks.values()
            for item in block
            if not isinstance(item, Run)
            for text in item.after
        }

    def program(self, stage: int, repeated: Run | None = None) -> Program:
        """Return a stage's step. repeated: the Run of its step whose bounds are wanted."""
        items = self._workload.blocks[self._workload.stages[stage].step]
        place = items.index(repeated) if repeated else len(items)
        placed = self._placed(items[:place], stage)
        bounds: list[int] = []
        if repeated:
            body = self._block(repeated.block, stage)
            first = len(placed)
            bounds = [first + len(body) * index for index in range(repeated.times + 1)]
            for layer, microbatch in repeated.places(0, 0):
                placed += _moved(body, layer, microbatch)
            placed += self._placed(items[place + 1 :], stage)
        program = self._linked(placed)
        program.bounds = bounds
        return program

    def _block(self, name: str, stage: int) -> list[_Placed]:
        if (name, stage) not in self._blocks:
            self._blocks[name, stage] = self._placed(self._workload.blocks[name], stage)
        return self._blocks[name, stage]

    def _placed(self, items: Block, stage: int) -> list[_Placed]:
        """Return the Segments and Calls of a block's items."""
        placed: list[_Placed] = []
        pending: list[Operation] = []
        for item in items:
            if isinstance(item, Run):
                self._close(placed, pending, stage)
                body = self._block(item.block, stage)
                for layer, microbatch in item.places(0, 0):
                    placed += _moved(body, layer, microbatch)
                continue
            if pending and not self._continues(pending[-1], item):
                self._close(placed, pending, stage)
            pending.append(item)
        self._close(placed, pending, stage)
        return self._merged(placed) if self._merges else placed

    def _merged(self, placed: Sequence[_Placed]) -> list[_Placed]:
        groups: list[list[_Placed]] = []
        for each in placed:
            if groups and self._is_closed(groups[-1][-1][0], each[0]):
                groups[-1].append(each)
            else:
                groups.append([each])
        return [
            group[0] if len(group) == 1 else (Merged(group, self._awaited), 0, 0)
            for group in groups
        ]

    def _is_closed(self, work: Segment | Call, following: Segment | Call) -> bool:
        """Return whether nothing else can begin or end between two works."""
        is_inside = all(
            each.ops[0].stream == COMPUTE
            and (isinstance(each, Segment) or [part.key for part in each.parts] == [None])
            for each in (work, following)
        )
        is_awaited = any(op.name in self._awaited for op in work.named)
        return is_inside and not is_awaited and not any(op.after for op in following.named)

    def _continues(self, last: Operation, item: Operation) -> bool:
        if isinstance(item, CommOp):
            return item.fused and isinstance(last, CommOp) and last.stream == item.stream
        is_free = not item.after and last.name not in self._awaited
        return is_free and isinstance(last, ComputeOp) and last.stream == item.stream

    def _close(self, placed: list[_Placed], pending: list[Operation], stage: int) -> None:
        """Make operations a Segment or a Call."""
        if not pending:
            return
        computes = [op for op in pending if isinstance(op, ComputeOp)]
        if computes:
            op_costs = [self._cost(op) for op in computes]
            work: Segment | Call = Segment(computes, op_costs, self._costs, self._clock)
        else:
            work = self._call([op for op in pending if isinstance(op, CommOp)], stage)
        placed.append((work, 0, 0))
        pending.clear()

    def _cost(self, op: ComputeOp) -> OpCost:
        if op.is_wait:
            return _WAIT
        if id(op) not in self._op_costs:
            self._op_costs[id(op)] = self._costs.compute(op)
        return self._op_costs[id(op)]

    def _call(self, ops: list[CommOp], stage: int) -> Call:
        """Return a call; sends and receipts inside a stage run at the same time."""
        workload, parts = self._workload, list[Part]()
        sent = received = inside = 0.0
        is_inside = False
        for op in ops:
            group = workload.groups[op.group]
            time_s = self._costs.comm(op, group)
            if op.peer is not None:
                if transfer := transfer_of(workload, stage, op):
                    parts.append(Part(time_s, transfer, 2))
                    continue
                if op.collective == SEND:
                    sent += time_s
                else:
                    received += time_s
            elif len(stages := stages_of(workload, stage, group)) > 1:
                parts.append(Part(time_s, (op.group, stages), len(stages)))
                continue
            else:
                inside += time_s
            is_inside = True
        if is_inside:
            parts.append(Part(inside + max(sent, received)))
        return Call(tuple(ops), tuple(parts), sum(map(self._costs.host_comm_s, ops)))

    def _parsed(self, text: str) -> tuple[str, int]:
        if text not in self._after:
            is_name = text in self._names
            self._after[text] = (text, 0) if is_name else parse_after(text)
        return self._after[text]

    def _linked(self, placed: Sequence[_Placed]) -> Program:
        """Resolve the names for which items wait."""
        program = Program(len(placed))
        numbers = {COMPUTE: 0}
        newest: dict[str, list[int]] = defaultdict(list)  # items by name
        earlier: list[
            tuple[int, str, int]
        ] = []  # item, name, how many back from the step's end
        for index, (work, layer, microbatch) in enumerate(placed):
            deps = set[int]()
            for op in work.named:
                for name, back in map(self._parsed, op.after):
                    if back < len(newest[name]):
                        deps.add(newest[name][-1 - back])
                    else:
                        earlier.append((index, name, back - len(newest[name])))
                if op.name in self._awaited:
                    newest[op.name].append(index)
            stream = numbers.setdefault(work.ops[0].stream, len(numbers))
            program.add(work, (layer, microbatch), stream, deps - {index})
        for index, name, back in earlier:
            if back < len(newest[name]):
                dep = newest[name][-1 - back]
                # The step begins when the computation before has ended.
                if program.streams[dep] not in (0, program.streams[index]):
                    program.next_dependents[dep].append(index)
        return program
