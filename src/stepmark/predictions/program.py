"""Programs of pipeline stages, from which step_events.py or free_steps.py simulates a step.

Computation of one stream without a dependency on another stream in between is one Segment, and
collectives of a group call are one Call. Equal blocks share both.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from stepmark.cases.message import SEND
from stepmark.predictions.works import Call, Clock, Merged, Part, Placed, Segment
from stepmark.step.workload import (
    COMPUTE,
    Block,
    CommOp,
    ComputeOp,
    Operation,
    Run,
    Workload,
    parse_after,
)
from stepmark.step.workload_stages import stages_of, transfer_of
from stepmark.timeline.step_cost import Costs, OpCost

_WAIT = OpCost(time_s={}, num_kernels=0.0)
# Names for which an operation waits with how many to go back, and the operation's own or "".
_Link = tuple[list[tuple[str, int]], str]


class Program:
    """One stage's items in issue order, each a Segment or a Call.

    offsets: layer and micro-batch of each. streams: their numbers; 0 is COMPUTE. deps: items of
    the step on other streams that an item waits for; next_dependents wait for one in the next
    step. bounds: items at which a repetition of the steady state begins, and where the last
    ends.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        streams: Sequence[int],
        deps: Sequence[Collection[int]],
        next_dependents: Mapping[int, Sequence[int]],
    ) -> None:
        self.works = [work for work, _, _ in placed]
        self.offsets = [(layer, microbatch) for _, layer, microbatch in placed]
        self.streams = streams
        self.deps = deps
        self.next_dependents = next_dependents
        self.host_s = sum(work.host_s for work in self.works)
        self.bounds: Sequence[int] = ()

    @cached_property
    def queues(self) -> list[list[int]]:
        """Items by stream."""
        queues: list[list[int]] = [[] for _ in range(max(self.streams, default=0) + 1)]
        for item, stream in enumerate(self.streams):
            queues[stream].append(item)
        return queues

    @cached_property
    def dependents(self) -> Mapping[int, Sequence[int]]:
        """Items that wait for an item of the same step."""
        dependents = defaultdict[int, list[int]](list)
        for item, deps in enumerate(self.deps):
            for dep in deps:
                dependents[dep].append(item)
        return dependents

    @cached_property
    def begins(self) -> list[float]:
        """Seconds of the host before it begins to issue each item."""
        return [0.0, *accumulate(work.host_s for work in self.works)][:-1]

    @cached_property
    def issues(self) -> list[float]:
        """Seconds of the host before each item can start."""
        return [
            begin + (work.host_s if isinstance(work, Call) else work.issues[0])
            for begin, work in zip(self.begins, self.works, strict=True)
        ]

    @cached_property
    def calls(self) -> list[tuple[int, Call]]:
        """Items that are calls."""
        return [(item, work) for item, work in enumerate(self.works) if isinstance(work, Call)]

    @cached_property
    def ordinals(self) -> Mapping[int, Sequence[int]]:
        """Of the parts of a call, their number among those of the same key."""
        counts = Counter[object]()
        ordinals = dict[int, list[int]]()
        for item, call in self.calls:
            own = ordinals[item] = list[int]()
            for part in call.parts:
                own.append(counts[part.key])
                counts[part.key] += 1
        return ordinals

    def waits_for(self, item: int, other: int) -> bool:
        """Return whether an item waits for another, or for a later one of its stream."""
        stream = self.streams[other]
        return any(dep >= other and self.streams[dep] == stream for dep in self.deps[item])


class Compiler:
    """Compiles the stages of a workload. Costs are those of operations with relative layers.

    merges: what is on the computation's stream and inside a stage becomes Merged.
    """

    def __init__(self, workload: Workload, costs: Costs, clock: Clock, *, merges: bool) -> None:
        self._workload = workload
        self._costs = costs
        self._clock = clock
        self._merges = merges
        self._op_costs: dict[int, OpCost] = {}
        self._blocks: dict[tuple[str, int], list[Placed]] = {}
        self._names = {
            item.name
            for block in workload.blocks.values()
            for item in block
            if not isinstance(item, Run) and item.name
        }
        self._after: dict[str, tuple[str, int]] = {}
        self._links_of: dict[Segment | Call, list[_Link]] = {}
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
            first = len(placed)
            placed += self._repeated(repeated, stage)
            size = (len(placed) - first) // repeated.times
            bounds = [first + size * index for index in range(repeated.times + 1)]
            placed += self._placed(items[place + 1 :], stage)
        program = self._linked(placed)
        program.bounds = bounds
        return program

    def _repeated(self, run: Run, stage: int) -> Iterator[Placed]:
        """Yield the Segments and Calls of a block as often as it runs; it is compiled once."""
        key = run.block, stage
        if key not in self._blocks:
            self._blocks[key] = self._placed(self._workload.blocks[run.block], stage)
        for layer, microbatch in run.places(0, 0):
            for work, own, mb in self._blocks[key]:
                yield work, layer + own, microbatch + mb

    def _placed(self, items: Block, stage: int) -> list[Placed]:
        """Return the Segments and Calls of a block's items."""
        placed: list[Placed] = []
        pending: list[Operation] = []
        for item in items:
            if isinstance(item, Run):
                self._close(placed, pending, stage)
                placed += self._repeated(item, stage)
                continue
            if pending and not self._continues(pending[-1], item):
                self._close(placed, pending, stage)
            pending.append(item)
        self._close(placed, pending, stage)
        return self._merged(placed) if self._merges else placed

    def _merged(self, placed: Sequence[Placed]) -> list[Placed]:
        groups: list[list[Placed]] = []
        for each in placed:
            if groups and groups[-1][-1][0].leads and each[0].follows:
                groups[-1].append(each)
            else:
                groups.append([each])
        return [
            group[0] if len(group) == 1 else (Merged(group, self._awaited), 0, 0)
            for group in groups
        ]

    def _continues(self, last: Operation, item: Operation) -> bool:
        if isinstance(item, CommOp):
            return item.fused and isinstance(last, CommOp) and last.stream == item.stream
        is_free = not item.after and last.name not in self._awaited
        return is_free and isinstance(last, ComputeOp) and last.stream == item.stream

    def _close(self, placed: list[Placed], pending: list[Operation], stage: int) -> None:
        """Make operations a Segment or a Call."""
        if not pending:
            return
        computes = [op for op in pending if isinstance(op, ComputeOp)]
        if computes:
            for op in computes:
                if id(op) not in self._op_costs:
                    self._op_costs[id(op)] = _WAIT if op.is_wait else self._costs.compute(op)
            op_costs = [self._op_costs[id(op)] for op in computes]
            work: Segment | Call = Segment(computes, op_costs, self._costs, self._clock)
        else:
            work = self._call([op for op in pending if isinstance(op, CommOp)], stage)
        is_inside = isinstance(work, Segment) or [part.key for part in work.parts] == [None]
        if is_inside and work.ops[0].stream == COMPUTE:
            work.follows = not any(op.after for op in work.named)
            work.leads = not any(op.name in self._awaited for op in work.named)
        placed.append((work, 0, 0))
        pending.clear()

    def _call(self, ops: list[CommOp], stage: int) -> Call:
        """Return a call; sends and receipts inside a stage run at the same time."""
        workload = self._workload
        parts = list[Part]()
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

    def _links(self, work: Segment | Call) -> list[_Link]:
        """Return what the work's operations wait for, and names by which others wait for them.

        Repeats share a work, and so what is returned for it.
        """
        if work not in self._links_of:
            links = [
                ([*map(self._parsed, op.after)], op.name if op.name in self._awaited else "")
                for op in work.named
            ]
            self._links_of[work] = [(waits, name) for waits, name in links if waits or name]
        return self._links_of[work]

    def _linked(self, placed: Sequence[Placed]) -> Program:
        """Resolve the names for which items wait."""
        numbers = {COMPUTE: 0}
        streams = [
            numbers.setdefault(work.ops[0].stream, len(numbers)) for work, _, _ in placed
        ]
        deps: list[Collection[int]] = []
        newest: dict[str, list[int]] = defaultdict(list)  # items by name
        # Item, name, how many back from the step's end.
        earlier: list[tuple[int, str, int]] = []
        for index, (work, _, _) in enumerate(placed):
            links = self._links(work)
            if not links:
                deps.append(())
                continue
            own = set[int]()
            for waits, name in links:
                for awaited, back in waits:
                    items = newest[awaited]
                    if back >= len(items):
                        earlier.append((index, awaited, back - len(items)))
                    elif streams[items[-1 - back]] != streams[index]:
                        own.add(items[-1 - back])
                if name:
                    newest[name].append(index)
            deps.append(own)
        next_dependents = defaultdict[int, list[int]](list)
        for index, name, back in earlier:
            if back < len(newest[name]):
                dep = newest[name][-1 - back]
                # The step begins when the computation before has ended.
                if streams[dep] not in (0, streams[index]):
                    next_dependents[dep].append(index)
        return Program(placed, streams, deps, next_dependents)
