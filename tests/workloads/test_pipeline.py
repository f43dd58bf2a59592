"""Schedules as laws: every stage a process that computes, sends, receives and waits."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step.workload import (
    Block,
    ComputeOp,
    Item,
    Kernel,
    Run,
    Stage,
    Workload,
    parse_after,
)
from stepmark.step_memory.rank_memory import ChunkMemory, fullest
from stepmark.workloads.pipeline import (
    Act,
    Action,
    Pipeline,
    Span,
    moved,
    passes,
    program,
    schedule,
)

SENDS = {Act.SEND_FORWARD: 1, Act.SEND_BACKWARD: -1}
RECVS = {Act.RECV_FORWARD: -1, Act.RECV_BACKWARD: 1}
COUNTERPART = {Act.SEND_FORWARD: Act.RECV_FORWARD, Act.SEND_BACKWARD: Act.RECV_BACKWARD}


def flat(spans: tuple[Span, ...]) -> Iterator[Action]:
    for span in spans:
        for time in range(span.times):
            for tick in span.ticks:
                for action in tick:
                    yield moved(action, time * span.step)


def apart(actions: Iterable[Action]) -> Iterator[Action]:
    """Two passes in turns as one after the other."""
    for action in actions:
        if action.act is not Act.COMBINED:
            yield action
            continue
        yield replace(action, act=Act.FORWARD)
        yield Action(
            act=Act.BACKWARD,
            chunk=action.backward_chunk,
            microbatch=action.backward_microbatch,
        )


@dataclass
class Transfer:
    action: Action
    posted: int
    stream: list["Transfer"]
    done: int | None = None

    def started(self) -> int | None:
        """A stream's transfers go one after the other."""
        index = self.stream.index(self)
        before = self.stream[index - 1].done if index else 0
        return None if before is None else max(self.posted, before)


@dataclass
class Process:
    actions: list[Action]
    clock: int = 0
    position: int = 0
    streams: dict[object, list[Transfer]] = field(default_factory=dict)
    posted: list[Transfer] = field(default_factory=list)
    have: dict[tuple[Act, int, int], int] = field(default_factory=dict)
    live: set[tuple[int, int]] = field(default_factory=set)
    most_live: int = 0


@dataclass
class Simulation:
    pipeline: Pipeline

    def __post_init__(self) -> None:
        stages = range(self.pipeline.num_stages)
        self.processes = [
            Process(list(apart(flat(schedule(self.pipeline, one))))) for one in stages
        ]

    def run(self) -> int:
        """Time until all are done, a pass of a chunk taking 1 and a transfer 0."""
        moving = True
        while moving:
            steps = [self.step(stage) for stage in range(self.pipeline.num_stages)]
            moving = any(steps) or self.match()
        for stage, process in enumerate(self.processes):
            assert process.position == len(process.actions), f"stage {stage} waits for ever"
            assert all(transfer.done is not None for transfer in process.posted)
        return max(process.clock for process in self.processes)

    def step(self, stage: int) -> bool:
        process, moved = self.processes[stage], False
        while process.position < len(process.actions):
            action = process.actions[process.position]
            if action.act in (Act.FORWARD, Act.BACKWARD):
                self.compute(stage, action)
            elif action.act is Act.WAIT:
                newest = [self.newest(process, name) for name in action.after]
                if any(one.done is None for one in newest):
                    break
                process.clock = max([process.clock, *(one.done or 0 for one in newest)])
            elif not self.post(stage, action):
                break
            process.position += 1
            moved = True
        return moved

    def newest(self, process: Process, text: str) -> Transfer:
        name, back = parse_after(text)
        found = [one for one in reversed(process.posted) if one.action.act == name]
        return found[back]

    def post(self, stage: int, action: Action) -> bool:
        """Overlapped transfers go on; a batched call ends when its last one is done."""
        process = self.processes[stage]
        if self.pipeline.num_chunks > 1 and self.pipeline.overlap:
            towards = SENDS.get(action.act) or RECVS[action.act]
            key = (action.act in SENDS) if self.pipeline.num_stages == 2 else towards
            stream = process.streams.setdefault(key, [])
            stream.append(Transfer(action, process.clock, stream))
            process.posted.append(stream[-1])
            return True
        batch = [action]
        for following in process.actions[process.position + 1 :]:
            if not following.fused:
                break
            batch.append(following)
        known = {id(one.action): one for one in process.posted}
        if id(action) not in known:
            for one in batch:
                process.posted.append(Transfer(one, process.clock, []))
                process.posted[-1].stream.append(process.posted[-1])
            return False
        if any(known[id(one)].done is None for one in batch):
            return False
        process.clock = max([process.clock, *(known[id(one)].done or 0 for one in batch)])
        process.position += len(batch) - 1
        return True

    def match(self) -> bool:
        """The first open send of one to another with the first open receive there."""
        moved, size = False, self.pipeline.num_stages
        for source in range(size):
            for target in {(source + 1) % size, (source - 1) % size} - {source}:
                sent = self.first_open(source, target, SENDS)
                received = self.first_open(target, source, RECVS)
                if not sent or not received:
                    continue
                starts = sent.started(), received.started()
                if starts[0] is None or starts[1] is None:
                    continue
                self.check_pair(source, sent.action, received.action)
                sent.done = received.done = max(starts[0], starts[1])
                got = received.action
                self.processes[target].have[got.act, got.chunk, got.microbatch] = sent.done
                moved = True
        return moved

    def first_open(self, stage: int, peer: int, kinds: dict[Act, int]) -> Transfer | None:
        size = self.pipeline.num_stages
        for one in self.processes[stage].posted:
            act = one.action.act
            if act in kinds and (stage + kinds[act]) % size == peer and one.done is None:
                return one
        return None

    def check_pair(self, source: int, sent: Action, received: Action) -> None:
        assert received.act is COUNTERPART[sent.act]
        assert received.microbatch == sent.microbatch
        wraps = 0
        if sent.act is Act.SEND_FORWARD and source == self.pipeline.num_stages - 1:
            wraps = 1
        if sent.act is Act.SEND_BACKWARD and source == 0:
            wraps = -1
        assert received.chunk == sent.chunk + wraps

    def compute(self, stage: int, action: Action) -> None:
        process, chunks = self.processes[stage], self.pipeline.num_chunks
        forward = action.act is Act.FORWARD
        here = (action.chunk, action.microbatch)
        ends = (
            stage == 0 and action.chunk == 0
            if forward
            else stage == self.pipeline.num_stages - 1 and action.chunk == chunks - 1
        )
        if not ends:
            needed = Act.RECV_FORWARD if forward else Act.RECV_BACKWARD
            assert process.have[(needed, *here)] <= process.clock
        if forward:
            process.live.add(here)
            process.most_live = max(process.most_live, len(process.live))
        else:
            process.live.remove(here)  # backward comes after forward
        process.clock += 1


def pipelines() -> st.SearchStrategy[Pipeline]:
    return st.one_of(
        st.builds(Pipeline, num_stages=st.integers(1, 7), num_microbatches=st.integers(1, 20)),
        st.builds(
            lambda size, groups, chunks, overlap: Pipeline(
                num_stages=size,
                num_microbatches=size * groups,
                num_chunks=chunks,
                overlap=overlap or size == 2,
            ),
            st.integers(2, 6),
            st.integers(1, 5),
            st.integers(2, 4),
            st.booleans(),
        ),
    )


@given(pipelines())
def test_all_stages_finish_and_every_pass_runs_once(pipeline: Pipeline) -> None:
    simulation = Simulation(pipeline)
    simulation.run()
    chunks, total = pipeline.num_chunks, pipeline.num_microbatches
    for process in simulation.processes:
        for act in (Act.FORWARD, Act.BACKWARD):
            done = Counter((a.chunk, a.microbatch) for a in process.actions if a.act is act)
            assert done == {(c, m): 1 for c in range(chunks) for m in range(total)}
        assert not process.live


@given(pipelines())
def test_bubble_and_activations_in_flight(pipeline: Pipeline) -> None:
    """(p - 1) / (m v) of the work (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    simulation = Simulation(pipeline)
    size, chunks, total = (
        pipeline.num_stages,
        pipeline.num_chunks,
        pipeline.num_microbatches,
    )
    time, work = simulation.run(), 2 * total * chunks
    assert time - work == 2 * (size - 1)  # of passes of one chunk, so / work = (p-1) / (m v)
    for stage, process in enumerate(simulation.processes):
        bound = pipeline.num_warmup(stage) + 1
        assert process.most_live == min(bound, total * chunks)
        if chunks == 1:
            assert process.most_live <= size - stage


@st.composite
def grouped(draw: st.DrawFn) -> Pipeline:
    """Groups that are larger than the pipeline, a smaller last one, passes in turns or not."""
    size = draw(st.integers(2, 5))
    group = size + draw(st.integers(1, 4))
    rest = draw(st.sampled_from((0, *range(size, group))))
    return Pipeline(
        num_stages=size,
        num_microbatches=group * draw(st.integers(1, 6)) + rest,
        num_chunks=draw(st.integers(2, 3)),
        overlap=draw(st.booleans()) or size == 2,
        combines=draw(st.booleans()),
        group_size=group,
    )


@given(grouped(), st.data())
def test_larger_groups_run_every_pass_once(pipeline: Pipeline, data: st.DataObject) -> None:
    simulation = Simulation(pipeline)
    simulation.run()
    expected = {
        (act, chunk, microbatch)
        for act in (Act.FORWARD, Act.BACKWARD)
        for chunk in range(pipeline.num_chunks)
        for microbatch in range(pipeline.num_microbatches)
    }
    for stage, process in enumerate(simulation.processes):
        passes = Counter((a.act, a.chunk, a.microbatch) for a in process.actions)
        assert all(passes[each] == 1 for each in expected)
        most = pipeline.num_warmup(stage) + 1
        assert process.most_live == min(most, pipeline.num_microbatches * pipeline.num_chunks)
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    spans = schedule(pipeline, stage, gathers=True, reduces=True)
    edges = [each for each in flat(spans) if each.edge]
    assert len(edges) == 2 * pipeline.num_chunks


def test_order_of_a_larger_group() -> None:
    """PP 2, VP 2, groups of 3 and 5 micro-batches: the table that schedules.py has in words."""
    pipeline = Pipeline(num_stages=2, num_microbatches=5, num_chunks=2, group_size=3)
    passes = [one for one in flat(schedule(pipeline, 0)) if one.act is Act.FORWARD]
    assert [one.microbatch for one in passes] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [one.chunk for one in passes] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@given(pipelines(), st.data())
def test_passes_need_the_memory_of_the_schedule(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    sizes = st.integers(0, 9)
    chunks = [
        ChunkMemory(saved=data.draw(sizes), working=data.draw(sizes), head=data.draw(sizes))
        for _ in range(pipeline.num_chunks)
    ]
    done = [
        (action.chunk, action.act is Act.FORWARD)
        for action in apart(flat(schedule(pipeline, stage)))
        if action.act in (Act.FORWARD, Act.BACKWARD)
    ]
    peak = fullest(done, chunks)
    assert sum(fullest(passes(pipeline, stage), chunks).values()) == sum(peak.values())


def combining() -> st.SearchStrategy[Pipeline]:
    return (
        pipelines()
        .map(lambda each: replace(each, combines=True))
        .filter(lambda each: each.num_stages == 1 or each.num_chunks > 1)
    )


@given(combining())
def test_passes_in_turns_are_independent(pipeline: Pipeline) -> None:
    """Each has what it needs before both begin; first and last passes run alone."""
    simulation = Simulation(pipeline)
    simulation.run()
    chunks, total = pipeline.num_chunks, pipeline.num_microbatches
    for stage, process in enumerate(simulation.processes):
        passes = Counter((a.act, a.chunk, a.microbatch) for a in process.actions)
        assert all(
            passes[act, chunk, microbatch] == 1
            for act in (Act.FORWARD, Act.BACKWARD)
            for chunk in range(chunks)
            for microbatch in range(total)
        )
        assert process.most_live == min(pipeline.num_warmup(stage) + 1, total * chunks)
        known: set[tuple[int, int]] = set()
        for action in flat(schedule(pipeline, stage)):
            if action.act is Act.COMBINED:
                assert not action.edge
                assert (action.backward_chunk, action.backward_microbatch) in known
            if action.act in (Act.FORWARD, Act.COMBINED):
                known.add((action.chunk, action.microbatch))


@given(st.one_of(pipelines(), combining()), st.data())
def test_a_program_expands_to_its_ticks(pipeline: Pipeline, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    spans = schedule(pipeline, stage, gathers=data.draw(st.booleans()), reduces=True)
    workload = _workload(spans)
    shown = [(op.module, op.microbatch) for op in workload.expand()]
    own = (Act.WAIT, Act.GATHER, Act.REDUCE)
    assert shown == [
        (_name(one), None if one.act in own else one.microbatch) for one in flat(spans)
    ]


def test_reduces_and_gathers_come_once_per_chunk() -> None:
    pipeline = Pipeline(num_stages=4, num_microbatches=8, num_chunks=3)
    for stage in range(4):
        actions = list(flat(schedule(pipeline, stage, gathers=True, reduces=True)))
        for act in (Act.GATHER, Act.REDUCE):
            assert sorted(one.chunk for one in actions if one.act is act) == [0, 1, 2]
        reduced = [one.chunk for one in actions if one.act is Act.REDUCE]
        assert reduced == [2, 1, 0]


@pytest.mark.parametrize("chunks", [1, 4])
def test_memory_is_the_same_for_any_number_of_microbatches(chunks: int) -> None:
    def size(total: int) -> int:
        pipeline = Pipeline(num_stages=8, num_microbatches=total, num_chunks=chunks)
        workload = _workload(schedule(pipeline, 3))
        return sum(len(block) for block in workload.blocks.values())

    assert size(2**20) == size(2**10)
    assert size(2**20) < 300


def test_orders_of_schedules_py() -> None:
    """PP 2, VP 2 and 4 micro-batches on the first stage: as its schedule table lists them."""
    pipeline = Pipeline(num_stages=2, num_microbatches=4, num_chunks=2)
    passes = [
        f"{one.act[0]}{one.chunk}{one.microbatch}"
        for one in flat(schedule(pipeline, 0))
        if one.act in (Act.FORWARD, Act.BACKWARD)
    ]
    assert passes == (
        [
            "f00",
            "f01",
            "f10",
            "f11",
            "f02",
            "b10",
            "f03",
            "b11",
            "f12",
            "b00",
            "f13",
            "b01",
            "b12",
            "b13",
            "b02",
            "b03",
        ]
    )


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"num_stages": 4, "num_microbatches": 6, "num_chunks": 2}, "4 or 8"),
        ({"num_stages": 1, "num_microbatches": 6, "num_chunks": 2}, "vpp"),
        (
            {"num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "group_size": 3},
            "microbatch_group_size_per_vp_stage 3 .* from pp \\(4\\) to .* \\(8\\)",
        ),
        (
            {"num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "group_size": 6},
            "micro-batches 8 .* a multiple of .* \\(6\\), or pp \\(4\\) or more above one",
        ),
        ({"num_stages": 2, "num_microbatches": 6, "num_chunks": 2, "overlap": False}, "pp"),
    ],
)
def test_what_megatron_refuses_is_refused(bad: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pipeline(**bad)  # type: ignore[arg-type]


def _name(action: Action) -> str:
    return f"{action.act}{action.chunk}{action.edge}{action.fused}{action.after}"


def _workload(spans: tuple[Span, ...]) -> Workload:
    def lower(action: Action) -> tuple[Item, ...]:
        own = action.act in (Act.WAIT, Act.GATHER, Act.REDUCE)
        microbatch = None if own else action.microbatch
        op = ComputeOp(
            op=Kernel(name="x"), phase=Phase.FWD, module=_name(action), microbatch=microbatch
        )
        if action.act is not Act.FORWARD:
            return (op,)
        blocks[op.module] = (replace(op, microbatch=0),)
        return (Run(block=op.module, microbatch=action.microbatch),)

    blocks: dict[str, Block] = {}
    blocks["step"] = program(spans, lower, blocks, "")
    made = Workload(name="x", rules="x", blocks=blocks, stages=(Stage(step="step"),))
    made.check()
    return made
