"""Compiles pipeline stages of a workload to programs.

Computation of one stream without a dependency on another stream in between is one Segment, and
collectives of a group call are one Call. Equal blocks share both.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from stepmark.cases.message import SEND
from stepmark.predictions.free_steps import FreeSteps
from stepmark.predictions.program import Program
from stepmark.predictions.regions import Region, expanded
from stepmark.predictions.step_events import Lane, Simulator
from stepmark.predictions.works import Call, Clock, Part, Placed, Segment
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
_FEWEST = 2  # items of a Region


class _Link(NamedTuple):
    """Names for which an operation waits with how many to go back, and its own or "".

    is_inside: the own one is of a Region, which others cannot wait for.
    """

    waits: list[tuple[str, int]]
    name: str
    is_inside: bool = False


class _InsideError(Exception):
    """An item waits for, or meets, another inside of this Region."""

    def __init__(self, region: Segment | Call) -> None:
        super().__init__()
        assert isinstance(region, Region)
        self.region = region


class _Group:
    """Items that may become a Region. size: of those until it could end.

    names: how often its items had each name. open: calls beside its computation for which none
    of it waited yet, by name and number.
    """

    def __init__(self) -> None:
        self.items: list[Placed] = []
        self.size = 0
        self._names = Counter[str]()
        self._open = set[tuple[str, int]]()

    def takes(self, work: Segment | Call, links: Sequence[_Link]) -> bool:
        """Return whether a work can be inside: the first may wait for what is before."""
        is_main = work.ops[0].stream == COMPUTE
        if isinstance(work, Segment):
            is_alone = is_main
        else:
            is_alone = all(part.key is None for part in work.parts)
        if not is_alone:
            return False
        if not self.items:
            return is_main
        knows = all(back < self._names[name] for link in links for name, back in link.waits)
        return knows and (is_main or any(link.name for link in links))

    def add(self, placed: Placed, links: Sequence[_Link]) -> None:
        """Add a work that can be inside."""
        is_main = placed[0].ops[0].stream == COMPUTE
        self.items.append(placed)
        for link in links:
            for name, back in link.waits:
                self._open.discard((name, self._names[name] - 1 - back))
            if link.name:
                if not is_main:
                    self._open.add((link.name, self._names[link.name]))
                self._names[link.name] += 1
        if is_main and not self._open:
            self.size = len(self.items)


class Compiler:
    """Compiles the stages of a workload. Costs are those of operations with relative layers.

    joins: what begins and ends on the computation's stream becomes a Region where it can, but
    for those that were opened.
    """

    def __init__(self, workload: Workload, costs: Costs, clock: Clock, *, joins: bool) -> None:
        self._workload = workload
        self._costs = costs
        self._clock = clock
        self._joins = joins
        self._op_costs: dict[int, OpCost] = {}
        self._blocks: dict[tuple[str, int], list[Placed]] = {}
        self._is_of_stage: dict[str, bool] = {}
        # By their items, which are there as long as an id tells them.
        self._regions: dict[tuple[int, ...], tuple[Sequence[Placed], Region]] = {}
        self._names = {
            item.name
            for block in workload.blocks.values()
            for item in block
            if not isinstance(item, Run) and item.name
        }
        self._after: dict[str, tuple[str, int]] = {}
        self._links_of: dict[Segment | Call, list[_Link]] = {}
        self._opened = set[tuple[int, ...]]()  # by key
        self._awaited = {
            self._parsed(text)[0]
            for block in workload.blocks.values()
            for item in block
            if not isinstance(item, Run)
            for text in item.after
        }

    def program(self, stage: int, items: Block, repeated: Run | None = None) -> Program:
        """Return a stage's step of these items. repeated: the one whose bounds are wanted."""
        while True:
            try:
                return self._program(stage, items, repeated)
            except _InsideError as error:
                if not self.open([error.region]):
                    raise

    def _program(self, stage: int, items: Block, repeated: Run | None) -> Program:
        place = items.index(repeated) if repeated else len(items)
        placed = [*self._open(self._placed(items[:place], stage))]
        bounds: list[int] = []
        if repeated:
            first = len(placed)
            placed += self._open(self._repeated(repeated, stage))
            size = (len(placed) - first) // repeated.times
            bounds = [first + size * index for index in range(repeated.times + 1)]
            placed += self._open(self._placed(items[place + 1 :], stage))
        program = self._linked(placed)
        program.bounds = bounds
        return program

    def open(self, works: Iterable[Segment | Call]) -> bool:
        """Open Regions, of which programs have the items from now on. Return whether any is."""
        keys = {work.key for work in works if isinstance(work, Region)} - self._opened
        self._opened |= keys
        if keys:
            self._regions.clear()
        return bool(keys)

    def _open(self, placed: Iterable[Placed]) -> Iterator[Placed]:
        for work, layer, microbatch in placed:
            if isinstance(work, Region) and work.key in self._opened:
                yield from expanded((work, layer, microbatch))
            else:
                yield work, layer, microbatch

    def _repeated(self, run: Run, stage: int) -> Iterator[Placed]:
        """Yield the Segments and Calls of a block as often as it runs; it is compiled once."""
        key = run.block, stage if self._depends_on_stage(run.block) else -1
        if key not in self._blocks:
            self._blocks[key] = self._placed(self._workload.blocks[run.block], stage)
        for layer, microbatch in run.places(0, 0):
            for work, own, mb in self._blocks[key]:
                yield work, layer + own, microbatch + mb

    def _depends_on_stage(self, block: str) -> bool:
        """Return whether a block has messages between stages."""
        if block not in self._is_of_stage:
            self._is_of_stage[block] = any(
                self._depends_on_stage(item.block)
                if isinstance(item, Run)
                else isinstance(item, CommOp) and self._joins_stages[item.group]
                for item in self._workload.blocks[block]
            )
        return self._is_of_stage[block]

    @cached_property
    def _joins_stages(self) -> Mapping[str, bool]:
        """Whether ranks of a group are in several stages, by its name."""
        workload = self._workload
        numbers = range(len(workload.stages))
        return {
            name: any(len(stages_of(workload, stage, group)) > 1 for stage in numbers)
            for name, group in workload.groups.items()
        }

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
        return self._joined(placed) if self._joins else placed

    def _joined(self, placed: Sequence[Placed]) -> list[Placed]:
        """Make Regions of what begins and ends on the computation's stream."""
        joined: list[Placed] = []
        group = _Group()
        for each in placed:
            links = self._links(each[0])
            if not group.takes(each[0], links):
                joined += self._closed(group)
                group = _Group()
            if group.takes(each[0], links):
                group.add(each, links)
            else:
                joined.append(each)
        return joined + self._closed(group)

    def _closed(self, group: "_Group") -> list[Placed]:
        """Return the items of a group, those until it could end as a Region."""
        if group.size < _FEWEST:
            return group.items
        _, layer, microbatch = group.items[0]
        items = [
            (work, own - layer, mb - microbatch) for work, own, mb in group.items[: group.size]
        ]
        key = tuple(number for work, own, mb in items for number in (id(work), own, mb))
        if key not in self._regions:
            self._regions[key] = items, self._joined_region(items)
        return [(self._regions[key][1], layer, microbatch), *group.items[group.size :]]

    def _joined_region(self, items: Sequence[Placed]) -> Region:
        """Make items one Region, which repeats share."""
        inside = [*self._open(items)]
        has_calls_beside = any(work.ops[0].stream != COMPUTE for work, _, _ in inside)
        if has_calls_beside:  # which may slow what is in a Region
            inside = [own for each in inside for own in expanded(each)]
        region = self._region(inside, has_calls_beside=has_calls_beside)
        links = [self._links(work) for work, _, _ in inside]
        self._links_of[region] = [
            *(link._replace(name="") for link in links[0]),
            *(link._replace(waits=[], is_inside=True) for own in links[:-1] for link in own),
            *(link._replace(waits=[]) for link in links[-1]),
        ]
        return region

    def _region(self, placed: Sequence[Placed], *, has_calls_beside: bool) -> Region:
        """Run items alone."""
        program = self._linked(placed)
        if has_calls_beside and self._costs.has_contention:
            simulator = Simulator([program], self._costs.comm_slowdown)
            simulator.run(1)
            (lane,) = simulator.lanes
            return Region(placed, lane.ends[0], lambda: lane)
        free = FreeSteps([program])
        free.run(1)
        (lane,) = free.lanes

        def run_alone() -> Lane:
            free.record(lane, 0)
            return lane

        return Region(placed, lane.ends[0], run_alone)

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
        placed.append((work, 0, 0))
        pending.clear()

    def _call(self, ops: list[CommOp], stage: int) -> Call:
        """Return a call; sends and receipts inside a stage run at the same time."""
        workload = self._workload
        parts = list[Part]()
        sent = received = inside = 0.0
        is_inside = False
        sends_contend = self._costs.sends_contend
        for op in ops:
            group = workload.groups[op.group]
            time_s = self._costs.comm(op, group)
            if op.peer is not None:
                if transfer := transfer_of(workload, stage, op):
                    parts.append(Part(time_s, transfer, 2, contends=sends_contend))
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
            contends = sends_contend or inside > 0.0
            parts.append(Part(inside + max(sent, received), contends=contends))
        return Call(tuple(ops), tuple(parts), sum(map(self._costs.host_comm_s, ops)))

    def _parsed(self, text: str) -> tuple[str, int]:
        if text not in self._after:
            is_name = text in self._names
            self._after[text] = (text, 0) if is_name else parse_after(text)
        return self._after[text]

    def _links(self, work: Segment | Call) -> Sequence[_Link]:
        """Return what the work's operations wait for, and names by which others wait for them.

        Repeats share a work, and so what is returned for it.
        """
        if work not in self._links_of:
            links = (
                _Link(
                    [*map(self._parsed, op.after)], op.name if op.name in self._awaited else ""
                )
                for op in work.named
            )
            self._links_of[work] = [link for link in links if link.waits or link.name]
        return self._links_of[work]

    def _linked(self, placed: Sequence[Placed]) -> Program:
        """Resolve the names for which items wait. Raises _InsideError."""
        numbers = {COMPUTE: 0}
        streams = [
            numbers.setdefault(work.ops[0].stream, len(numbers)) for work, _, _ in placed
        ]
        deps: list[Collection[int]] = []
        newest: dict[str, list[int]] = defaultdict(list)  # items by name; ~item: inside of it
        # Item, name, how many back from the step's end.
        earlier: list[tuple[int, str, int]] = []
        for index, (work, _, _) in enumerate(placed):
            own = set[int]()
            for waits, name, is_inside in self._links(work):
                for awaited, back in waits:
                    items = newest[awaited]
                    if back >= len(items):
                        earlier.append((index, awaited, back - len(items)))
                    else:
                        own.add(_visible(items[-1 - back], placed))
                if name:
                    newest[name].append(~index if is_inside else index)
            deps.append([dep for dep in own if streams[dep] != streams[index]] if own else ())
        next_dependents = defaultdict[int, list[int]](list)
        for index, name, back in earlier:
            if back < len(newest[name]):
                dep = _visible(newest[name][-1 - back], placed)
                # The step begins when the computation before has ended.
                if streams[dep] not in (0, streams[index]):
                    next_dependents[dep].append(index)
        _check_streams(placed, streams, deps, numbers)
        return Program(placed, streams, deps, next_dependents)


def _visible(item: int, placed: Sequence[Placed]) -> int:
    """Return an item. Raises _InsideError if it is inside of a Region."""
    if item < 0:
        raise _InsideError(placed[~item][0])
    return item


def _check_streams(
    placed: Sequence[Placed],
    streams: Sequence[int],
    deps: Sequence[Collection[int]],
    numbers: Mapping[str, int],
) -> None:
    """Raise _InsideError where calls of a stream in and out of Regions may meet.

    Those before a Region have ended if computation has waited for them, and those after it
    begin later if they wait for computation after it. numbers: of streams out of Regions.
    """
    running = defaultdict[int, list[int]](list)  # calls for which nothing waited yet, by stream
    newest = dict[int, int]()  # Regions by stream
    for index, (work, _, _) in enumerate(placed):
        stream = streams[index]
        if stream:
            region = newest.get(stream, -1)
            if region >= 0 and all(dep < region or streams[dep] for dep in deps[index]):
                raise _InsideError(placed[region][0])
            running[stream].append(index)
            continue
        for dep in deps[index]:
            running[streams[dep]] = [call for call in running[streams[dep]] if call > dep]
        if isinstance(work, Region):
            for own in work.streams & numbers.keys():
                if running[numbers[own]]:
                    raise _InsideError(work)
                newest[numbers[own]] = index
    for stream, region in newest.items():
        if running[stream]:
            raise _InsideError(placed[region][0])  # one may meet it in the next step
