"""The simulated step: against a plain simulation, closed forms, and laws."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.timeline.swept_ledger import Event, ledger

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, GradSync, Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.model.layers import MoeConfig
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.predictions import simulation
from stepmark.predictions.simulation import SteadyStep, simulate
from stepmark.step.workload import (
    COMPUTE,
    CommOp,
    ComputeOp,
    Item,
    Kernel,
    Run,
    Stage,
    Workload,
)
from stepmark.step.workload import (
    Group as Ranks,
)
from stepmark.timeline.ledger import (
    CONTENTION,
    TRANSFER,
    WAITING,
    Group,
    Idle,
    Work,
)
from stepmark.timeline.step_cost import Costs, OpCost
from stepmark.timeline.timeline import LEFT_OUT, Span
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron import rule as megatron
from stepmark.workloads.rules.megatron.settings import Megatron
from stepmark.workloads.rules.pytorch.case import of_case

from .reference_timeline import Line, Reference, same_lines

WORKS, CALLS = tuple(Work), (COMMUNICATION, WAITING)
TINY = replace(
    find_model("llama-3.1-8b").tiny(), num_layers=4, hidden_size=64, vocab_size=512, seq_len=32
)


def costs(seed: int = 0, *, host: float = 0.3, contention: bool = True, **more: Any) -> Costs:
    """Costs in seconds that differ from operation to operation."""

    def drawn(key: object) -> random.Random:
        return random.Random(f"{seed} {key}")

    def compute(op: ComputeOp) -> OpCost:
        die = drawn((op.op, op.module, op.phase, op.recompute))
        works = die.sample(WORKS, die.randint(1, 2))
        return OpCost(
            time_s={work: die.randint(1, 9) / 8 for work in works},
            num_kernels=len(works),
            host_s=host * die.randint(0, 8) / 4,
        )

    plain: dict[str, Any] = {
        "compute": compute,
        "comm": lambda op, group: drawn((op.collective, op.count, group)).randint(1, 30) / 8,
        "gap_s": 0.0625,
        "host_comm_s": lambda op: host * (1 + len(op.module) % 3),
        "compute_slowdown": {Work.MATMUL: 1.5, Work.ATTENTION: 1.25} if contention else {},
        "comm_slowdown": 1.25 if contention else 1.0,
    }
    return Costs(**(plain | more))


def gemm(k: int = 8, **where: Any) -> ComputeOp:
    plain: dict[str, Any] = {"phase": Phase.FWD, "module": "mlp"}
    return ComputeOp(op=Gemm(m=8, n=8, k=k, dtype=DType.BF16), **(plain | where))


def random_stage(die: random.Random, *, across: bool) -> tuple[Item, ...]:
    """Return operations on a few streams that wait for one another in any way."""
    names: list[str] = []
    items: list[Item] = []
    for number in range(die.randint(4, 14)):
        after: tuple[str, ...] = ()
        if die.random() < 0.4:
            after = tuple(
                name + die.choice(("", "", "~1"))
                for name in die.sample(names, min(len(names), die.randint(0, 2)))
            )
        name = die.choice(("", f"n{number % 3}"))
        where: dict[str, Any] = {"phase": Phase.FWD, "name": name, "after": after}
        kind = die.random()
        if kind < 0.6:
            items.append(gemm(die.randint(1, 6) * 8, **where))
        elif kind < 0.7:
            wait = Kernel(name="wait", flops=0, bytes_moved=0)
            items.append(ComputeOp(op=wait, module="wait", **where))
        else:
            items.append(
                CommOp(
                    collective="all_reduce",
                    dtype=DType.BF16,
                    count=die.randint(1, 4),
                    group=die.choice(("all", "own")) if across else "own",
                    stream=die.choice((COMPUTE, "one", "two")),
                    module="sum",
                    fused=number > 0 and die.random() < 0.2,
                    **where,
                )
            )
        if name:
            names.append(name)
    return (*items, gemm())


def own_part(items: tuple[Item, ...], die: random.Random) -> tuple[Item, ...]:
    """Return the program of another stage: the same messages among other computation."""
    return tuple(
        replace(item, op=Gemm(m=8, n=8, k=die.randint(1, 6) * 8, dtype=DType.BF16))
        if isinstance(item, ComputeOp) and isinstance(item.op, Gemm)
        else item
        for item in items
    )


def random_workload(seed: int) -> Workload:
    """One stage of random operations in repeats, or two that agree in their common ones."""
    die = random.Random(seed)
    num_stages = die.choice((1, 1, 2))
    blocks: dict[str, tuple[Item, ...]] = {}
    first = random_stage(die, across=num_stages > 1)
    body = random_stage(die, across=num_stages > 1)
    times = die.randint(1, 4)
    common = {"collective": "all_reduce", "dtype": DType.BF16, "module": "clip"}
    meet = CommOp(count=1, group="all", phase=Phase.OPTIM, **common)
    for stage in range(num_stages):
        if stage:
            first, body = own_part(first, die), own_part(body, die)
        run = Run(block=f"body{stage}", times=times, microbatch_step=1)
        blocks |= {f"body{stage}": body, f"step{stage}": (*first, meet, run, gemm())}
    return Workload(
        name="random",
        rules="by hand",
        world_size=2 * num_stages,
        groups={
            "own": Ranks(digits=((2, 1),)),
            "all": Ranks(digits=((2 * num_stages, 1),)),
        },
        blocks=blocks,
        stages=tuple(Stage(step=f"step{stage}") for stage in range(num_stages)),
    )


def lines_of(timeline: SteadyStep, stage: int) -> Counter[Line]:
    return Counter({line: ns / 1e9 for line, ns in timeline.ledgers[stage].lines.items()})


def check_same(workload: Workload, prices: Costs, num_steps: int) -> None:
    ours = simulate(workload, prices)
    theirs = Reference(workload, prices, num_steps)
    assert ours.step_s == pytest.approx(theirs.step_s(), rel=1e-9)
    for stage in range(len(workload.stages)):
        # The step before the last one, whose successor has begun.
        assert same_lines(lines_of(ours, stage), theirs.lines[stage][-2], 1e-6)
        within = ours.ledgers[stage].within
        assert within[WAITING] / 1e9 == pytest.approx(theirs.waiting[stage][-2], abs=1e-6)
        assert within[CONTENTION] / 1e9 == pytest.approx(theirs.contention[stage][-2], abs=1e-6)
    check_spans(ours)


def spans_of(step: SteadyStep) -> list[Span]:
    """Return all spans; those of a stream do not overlap."""
    spans = sorted(step.timeline(), key=lambda span: (span.start_ns, span.name))
    ends: dict[tuple[int, str], int] = {}
    for span in spans:
        assert ends.get((span.rank, span.stream), 0) <= span.start_ns < span.end_ns
        ends[span.rank, span.stream] = span.end_ns
    assert max(ends.values()) == round(step.step_s * 1e9)
    return spans


def check_spans(timeline: SteadyStep, *, by_line: bool = True) -> None:
    """The ledger of the spans is that of the step, by line or by group of lines."""
    spans, idle = spans_of(timeline), (Group.IDLE, str(Idle.HOST))
    # A call that waited has begun with its waiting.
    waits = {(s.rank, s.stream, s.end_ns): s.start_ns for s in spans if s.kind == WAITING}
    for stage, own in enumerate(timeline.ledgers):
        events = []
        for span in (span for span in spans if span.rank == stage):
            is_call = span.kind in CALLS
            group = Group.COPIES if span.kind == Work.COPY else Group.COMPUTE
            name = span.name if is_call else span.kind
            start = waits.get((stage, span.stream, span.start_ns), span.start_ns)
            events.append(Event(Group.COMM if is_call else group, name, start, span.end_ns))
        events.sort(key=lambda event: (event.start_ns, event.name))
        redrawn = ledger(events, 0, own.window_ns, lambda a, b: [(Idle.HOST, b - a)])
        lines = Counter({line: ns for line, ns in own.lines.items() if line[0] != idle[0]})
        lines[idle] = own.total(Group.IDLE)
        lines.subtract(redrawn.lines)
        sums = Counter[object]()
        for line, ns in lines.items():
            sums[line if by_line else line[0]] += ns
        assert max(map(abs, sums.values())) <= 10
        moves = [
            Event(Group.COMM, TRANSFER, span.start_ns, span.end_ns)
            for span in spans
            if span.rank == stage and span.kind == COMMUNICATION
        ]
        moves += (event for event in events if event.group is not Group.COMM)
        moving = ledger(moves, 0, own.window_ns, lambda a, b: [(Idle.HOST, b - a)])
        assert abs(moving.total(Group.COMM) - own.within[TRANSFER]) <= 10


FEW_SEEDS, ALL_SEEDS = 24, 60


@pytest.mark.parametrize(
    "seed",
    [
        *range(FEW_SEEDS),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW_SEEDS, ALL_SEEDS)),
    ],
)
def test_random_workloads_are_simulated_as_by_a_plain_loop(seed: int) -> None:
    die = random.Random(seed)
    prices = costs(seed, host=die.choice((0, 0.1, 0.5, 2.0)), contention=die.random() < 0.7)
    workload = random_workload(seed)
    # A host that is faster than the other stage's gets ahead in many steps.
    check_same(workload, prices, 9 if len(workload.stages) == 1 else 30)


def check_free(workload: Workload, prices: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step by ends alone is that by events, each line but for rounding."""
    ours = simulate(workload, prices)
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "is_serial", lambda _programs: False)
        theirs = simulate(workload, prices)
    assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-12)
    assert ours.num_kernels == pytest.approx(theirs.num_kernels)
    assert ours.comm_s == pytest.approx(theirs.comm_s, abs=1e-7)
    for own, other in zip(ours.ledgers, theirs.ledgers, strict=True):
        for mine, plain in ((own.lines, other.lines), (own.within, other.within)):
            most = 2 * (1 + len(mine)) + round(2e-9 * own.window_ns)
            diffs = Counter(mine)  # type: ignore[arg-type]
            diffs.subtract(plain)  # type: ignore[arg-type]
            assert max(map(abs, diffs.values())) <= most
    if LEFT_OUT not in {span.kind for span in ours.timeline()}:
        check_spans(ours)


@pytest.mark.parametrize("seed", range(40))
def test_steps_without_contention_are_those_of_events(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_free(random_workload(seed), costs(seed, host=0, contention=False), monkeypatch)


@pytest.mark.parametrize("seed", range(12))
def test_computation_on_two_streams_counts_once(seed: int) -> None:
    workload, die = random_workload(seed), random.Random(seed)
    blocks = {
        name: tuple(
            replace(item, stream="other")
            if isinstance(item, ComputeOp) and die.random() < 0.5
            else item
            for item in items[:-1]
        )
        + items[-1:]
        for name, items in workload.blocks.items()
    }
    timeline = simulate(replace(workload, blocks=blocks), costs(seed, host=0))
    check_spans(timeline, by_line=False)


def case(**changes: Any) -> TrainCase:
    mesh = {name: changes.pop(name) for name in tuple(changes) if hasattr(ParallelConfig, name)}
    return replace(TrainCase(model=TINY, parallel=ParallelConfig(**mesh)), **changes)


FSDP = DataParallel.FSDP
EXPERTS = replace(TINY, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=32))
REAL: dict[str, TrainCase] = {
    "single": case(),
    "single, accumulated": case(grad_accum=3),
    "ddp": case(dp_replicate=2, data_parallel=DataParallel.DDP, bucket_mb=1),
    "ddp, last": case(
        dp_replicate=2, data_parallel=DataParallel.DDP, grad_accum=3, grad_sync=GradSync.LAST
    ),
    "fsdp": case(dp_shard=2, data_parallel=FSDP),
    "fsdp, kept": case(dp_shard=2, data_parallel=FSDP, reshard="no", prefetch=2),
    "fsdp, accumulated": case(dp_shard=2, data_parallel=FSDP, grad_accum=4),
    "hsdp": case(dp_shard=2, dp_replicate=2, data_parallel=FSDP),
    "fsdp x tp": case(dp_shard=2, tp=2, data_parallel=FSDP, recompute=Recompute.FULL),
    "fsdp x cp": case(dp_shard=2, cp=2, data_parallel=FSDP),
    "ep": replace(case(dp_shard=4, ep=2, data_parallel=FSDP), model=EXPERTS),
    "tp": case(tp=2),
    "pp": case(pp=2, mbs=4, pp_microbatches=4),
    "pp, passes": case(pp=2, mbs=2, pp_microbatches=2, grad_accum=2),
    "pp, interleaved": case(
        pp=2, mbs=4, pp_microbatches=4, pp_schedule=PipelineSchedule.INTERLEAVED
    ),
    "pp x fsdp": case(pp=2, dp_shard=2, data_parallel=FSDP, mbs=4, pp_microbatches=4),
}


@pytest.mark.parametrize("name", REAL)
def test_cases_are_simulated_as_by_a_plain_loop(name: str) -> None:
    seed = sorted(REAL).index(name)
    check_same(of_case(REAL[name]), costs(seed, host=0.05), 5)


MANY = {
    "pp, many": case(pp=2, mbs=32, pp_microbatches=32, recompute=Recompute.FULL),
    "fsdp, many": case(dp_shard=2, tp=2, data_parallel=FSDP, grad_accum=32),
}


@pytest.mark.parametrize("name", [*REAL, *MANY])
def test_cases_without_contention_are_those_of_events(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = of_case({**REAL, **MANY}[name])
    check_free(workload, costs(len(name), host=0, contention=False), monkeypatch)


@pytest.mark.parametrize("name", ["single", "fsdp", "pp"])
def test_a_slow_host_is_simulated_as_by_a_plain_loop(name: str) -> None:
    workload, prices = of_case(REAL[name]), costs(5, host=1.5)
    assert simulate(workload, prices).is_host_bound
    check_same(workload, prices, 5)


@pytest.mark.parametrize(("name", "last"), [("fsdp, accumulated", 3), ("pp", 63)])
def test_repetitions_that_are_left_out_are_one_span(name: str, last: int) -> None:
    """Where micro-batches end the pipeline, they come after it."""
    many = {"grad_accum": 64} if name != "pp" else {"mbs": 64, "pp_microbatches": 64}
    timeline = simulate(of_case(replace(REAL[name], **many)), costs(3, host=0.0))
    spans = spans_of(timeline)
    left_out = [span for span in spans if span.kind == LEFT_OUT]
    assert [span.rank for span in left_out] == [*range(len(timeline.ledgers))]
    assert len(spans) < 3000
    assert max(span.microbatch or 0 for span in spans) == last
    for span in left_out:
        assert 0.5 < (span.end_ns - span.start_ns) / 1e9 / timeline.step_s < 1


@pytest.mark.parametrize(("pp", "vpp", "rounds"), [(4, 2, 9), (8, 2, 7), (8, 2, 8)])
def test_interleaved_rounds_left_out_change_nothing(
    pp: int, vpp: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a round repeat more often than the round, and never as often in all stages."""
    ranks, gbs = ParallelConfig(pp=pp), pp * rounds
    job = Job(model=replace(TINY, num_layers=pp * vpp), parallel=ranks, gbs=gbs)
    asked = Megatron(virtual_pipeline_model_parallel_size=vpp)
    workload = megatron.workload(job, asked)
    machine = costs(host=0.0, contention=False)
    few = simulate(workload, machine)
    assert any(span.kind == LEFT_OUT for span in few.timeline())
    monkeypatch.setattr(simulation, "_REPEATS", rounds)
    whole = simulate(workload, machine)
    assert few.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert few.ledgers == whole.ledgers


def test_gaps_on_a_cpu_are_the_hosts() -> None:
    workload, prices = of_case(REAL["single"]), costs(host=0)
    gaps = Group.IDLE, Idle.LAUNCH_GAP
    lines = simulate(workload, prices).ledgers[0].lines
    renamed = simulate(workload, replace(prices, gap=Idle.HOST)).ledgers[0].lines
    assert lines[gaps] > 0
    assert renamed == {
        (g, Idle.HOST if (g, n) == gaps else n): t for (g, n), t in lines.items()
    }


BESIDE = {"overlap_grad_reduce": True}
MEGATRON: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    "tp": (ParallelConfig(tp=2), {}),
    "tp, sequence": (ParallelConfig(tp=2, pp=2), {"sequence_parallel": True}),
    "tp, pp": (ParallelConfig(tp=2, pp=4, dp_shard=2), {}),
    "tp, dp beside": (ParallelConfig(tp=2, pp=2, dp_shard=2), BESIDE),
    "virtual": (ParallelConfig(tp=2, pp=2), {"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("contention", [False, True])
@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_regions_are_those_of_events(
    name: str, contention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel, settings = MEGATRON[name]
    job = Job(model=TINY, parallel=parallel, mbs=1, gbs=12)
    workload = megatron.workload(job, Megatron(**settings))
    check_free(workload, costs(len(name), host=0, contention=contention), monkeypatch)


def test_a_stage_without_layers_repeats_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model=TINY, parallel=ParallelConfig(pp=4), gbs=24)
    asked = Megatron(pipeline_model_parallel_layout="Ett|t||tL")
    workload = megatron.workload(job, asked)
    machine = costs(host=0.0, contention=False)
    few = simulate(workload, machine)
    assert few.num_omitted > 0
    monkeypatch.setattr(simulation, "_REPEATS", 24)
    assert few.step_s == pytest.approx(simulate(workload, machine).step_s, rel=1e-12)


def with_shared_blocks(workload: Workload) -> Workload:
    """The same program whose equal blocks have one name, in all stages."""
    blocks = dict(workload.blocks)
    while True:
        first: dict[Any, str] = {}
        names = {name: first.setdefault(items, name) for name, items in blocks.items()}
        if len(first) == len(blocks):
            return replace(workload, blocks=blocks)
        blocks = {
            name: tuple(
                replace(item, block=names[item.block]) if isinstance(item, Run) else item
                for item in items
            )
            for items, name in first.items()
        }
        stages = tuple(replace(each, step=names[each.step]) for each in workload.stages)
        workload = replace(workload, stages=stages)


def test_stages_may_share_blocks_of_messages_between_stages() -> None:
    """Each stage has its own neighbours."""
    job = Job(
        model=TINY,
        parallel=ParallelConfig(dp_shard=2, pp=4),
        mbs=1,
        gbs=16,
    )
    own = megatron.workload(job, Megatron())
    shared = with_shared_blocks(own)
    assert len(shared.blocks) < len(own.blocks)
    for contention in (False, True):
        prices = costs(contention=contention)
        assert simulate(shared, prices).step_s == simulate(own, prices).step_s
