"""Generated workloads against real jobs: every message of every rank of a steady step.

Two and four gloo ranks train with the project's own trainer; what its recorder saw at torch's
dispatcher is what the rules of PyTorch say, element for element and in the same order.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.ranks_pool import Pool
from tests.selected import parameters, slowly
from tests.training.workload_cases import CASES, DDP, WITH_LORA, WITH_ROOT
from tests.training.workload_on_ranks import sent_by_all
from torch.distributed.pipelining import schedules as torch_schedules

from stepmark.cases.train_case import TrainCase
from stepmark.model.ops import Phase
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads.pipeline import WITH_MICROBATCH, Act
from stepmark.workloads.rules.pytorch import rule, schedules
from stepmark.workloads.rules.pytorch.case import (
    job_of,
    of_case,
    settings_of,
)
from stepmark.workloads.rules.pytorch.order import Order
from stepmark.workloads.rules.pytorch.settings import StageEnds

# collective, dtype, call bytes, message bytes, members, peer, phase
Row = list[Any]


Recorded = dict[str, list[list[Row]]]


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> dict[int, Recorded]:
    """Selected cases by number of ranks, from a pool for each number."""
    selected = parameters(request, "name")
    answers: dict[int, Recorded] = {}
    for num_ranks, cases in CASES.items():
        names = [name for name in cases if name in selected]
        with Pool(num_ranks) as pool:
            answer = pool.run(sent_by_all, names, timeout_s=900)[0]
            answers[num_ranks] = json.loads(json.dumps(answer))  # tuples as lists
    return answers


def generated(case: TrainCase, name: str = "") -> Workload:
    if name in DDP:
        made = rule.workload(job_of(case), replace(settings_of(case), **DDP[name]))
    elif name in WITH_LORA:
        settings = replace(settings_of(case), lora_rank=WITH_LORA[name])
        made = rule.workload(job_of(case), settings)
    elif name in WITH_ROOT:
        made = rule.workload(job_of(case), replace(settings_of(case), ends=StageEnds.ROOT))
    else:
        made = of_case(case)
    made.check()
    return made


def rows(made: Workload, rank: int, *, setup: bool = False) -> list[Row]:
    return [
        row(one, made, rank)
        for one in made.expand(made.stage_of(rank), setup=setup)
        if isinstance(one, CommOp)
    ]


def row(one: CommOp, made: Workload, rank: int) -> Row:
    group = made.groups[one.group]
    members = group.members(rank)
    peer = None if one.peer is None else (members.index(rank) + one.peer) % group.size
    phase = {Phase.FWD: "forward", Phase.OPTIM: "optimizer"}.get(one.phase, "backward")
    return [
        one.collective.removesuffix("_v"),  # torch cannot tell when all parts are equal
        one.dtype.value,
        one.call_bytes(),
        one.message_bytes(group),
        list(members),
        peer,
        "backward" if one.recompute else phase,
    ]


# What these send is also in the cases of four ranks, or in others of two.
OF_TWO = ("ddp", "fsdp", "fsdp without reshard", "tp", "1f1b", "interleaved", "gpipe", "ep")
OF_FOUR = (
    *("1f1b", "1f1b x fsdp with a root", "1f1b x tp with masters", "tp with masters"),
    *(
        "fsdp held",
        "fsdp reshard over 2",
        "fsdp x tp, tied",
        "fsdp x tp of whole logits",
        "1f1b of even stages",
    ),
    *("ddp held", "ep x fsdp", "interleaved x fsdp"),
)


def compare(case: TrainCase, name: str, seen: list[list[Row]]) -> None:
    made = generated(case, name)
    assert len(seen) == made.world_size
    for rank, messages in enumerate(seen):
        assert rows(made, rank) == messages, f"rank {rank}"


@pytest.mark.parametrize("name", slowly(list(CASES[2]), OF_TWO))
def test_two_ranks_send_what_is_generated(name: str, recorded: dict[int, Recorded]) -> None:
    compare(CASES[2][name], name, recorded[2][name])


@pytest.mark.parametrize("name", slowly(list(CASES[4]), OF_FOUR))
def test_four_ranks_send_what_is_generated(name: str, recorded: dict[int, Recorded]) -> None:
    compare(CASES[4][name], name, recorded[4][name])


@pytest.mark.parametrize("name", DDP)
def test_ddp_starts_with_what_is_generated(name: str, recorded: dict[int, Recorded]) -> None:
    made = generated(CASES[2][name], name)
    for rank, seen in enumerate(recorded[2][f"{name}, setup"]):
        assert [one[:-1] for one in rows(made, rank, setup=True)] == [one[:-1] for one in seen]


CHANGED: dict[str, dict[str, Any]] = {
    "ddp in buckets": {"bucket_mb": 2},
    "fsdp padded": {"reshard": "no"},
    "fsdp in groups": {"blocks_per_group": 2},
    "fsdp prefetch 3": {"prefetch": 2},
    "hsdp": {"reshard": "no"},
    "1f1b x fsdp": {"pp_schedule": PipelineSchedule.GPIPE},
    "interleaved": {"pp_schedule": PipelineSchedule.ONE_F_ONE_B},
    "zb1p": {"pp_schedule": PipelineSchedule.INTERLEAVED},
    "zbv x fsdp": {"pp_schedule": PipelineSchedule.DUALPIPE_V},
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_comparison_would_tell_another_way_to_train(
    name: str, recorded: dict[int, Recorded]
) -> None:
    other = generated(replace(CASES[4][name], **CHANGED[name]))
    assert any(rows(other, rank) != seen for rank, seen in enumerate(recorded[4][name]))


ACTS = {
    torch_schedules.FORWARD: Act.FORWARD,
    torch_schedules.FULL_BACKWARD: Act.BACKWARD,
    torch_schedules.BACKWARD_INPUT: Act.BACKWARD_INPUT,
    torch_schedules.BACKWARD_WEIGHT: Act.BACKWARD_WEIGHT,
    torch_schedules.UNSHARD: Act.GATHER,
    torch_schedules.RESHARD: Act.RELEASE,
    torch_schedules.REDUCE_GRAD: Act.REDUCE,
    torch_schedules.SEND_F: Act.SEND_FORWARD,
    torch_schedules.SEND_B: Act.SEND_BACKWARD,
    torch_schedules.RECV_F: Act.RECV_FORWARD,
    torch_schedules.RECV_B: Act.RECV_BACKWARD,
}
OF_TORCH: dict[PipelineSchedule, Any] = {
    PipelineSchedule.INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    PipelineSchedule.ZB1P: torch_schedules.ScheduleInterleavedZeroBubble,
    PipelineSchedule.ZBV: torch_schedules.ScheduleZBVZeroBubble,
    PipelineSchedule.DUALPIPE_V: torch_schedules.ScheduleDualPipeV,
}
Done = tuple[Act, int, int | None]  # with chunk and micro-batch


def torch_order(order: Order) -> list[list[Done]]:
    """What torch's schedule would run, without stages."""
    ranks, count, chunks = order.num_ranks, order.num_microbatches, order.num_chunks
    made: Any = OF_TORCH[order.schedule].__new__(OF_TORCH[order.schedule])
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, count
    made.num_stages = ranks * chunks
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    planned = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    if order.schedule is PipelineSchedule.ZB1P:
        made.pipeline_order = planned
        planned = made._add_bubbles_to_actions(ranks * chunks)
    orders = {
        rank: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(actions),
            count,
        )
        for rank, actions in planned.items()
    }
    places = {
        stage: (rank, chunk)
        for rank, actions in planned.items()
        for chunk, stage in enumerate(stages_of(actions))
    }
    lowered = torch_schedules._add_send_recv(
        orders,  # type: ignore[arg-type]
        stage_to_rank=lambda stage: places[stage][0],
        num_stages=ranks * chunks,
    )
    return [
        in_order(
            (ACTS[one.computation_type], places[one.stage_index][1], one.microbatch_index)
            for action in actions
            for one in action.sub_actions or (action,)
        )
        for actions in lowered.values()
    ]


def stages_of(actions: list[Any]) -> list[int]:
    flat = [one for action in actions if action for one in action.sub_actions or (action,)]
    return sorted({one.stage_index for one in flat})


def in_order(actions: Iterator[Done]) -> list[Done]:
    """Sort the last releases, which torch has in the order of a set."""
    flat = list(actions)
    end = len(flat)
    while flat[end - 1][0] is Act.RELEASE:
        end -= 1
    return [*flat[:end], *sorted(flat[end:])]


def ours(order: Order) -> Iterator[list[Done]]:
    for spans in schedules.spans(order):
        yield in_order(
            (
                one.act,
                one.chunk,
                one.microbatch + time * span.step if one.act in WITH_MICROBATCH else None,
            )
            for span in spans
            for time in range(span.times)
            for tick in span.ticks
            for one in tick
            if one.act is not Act.WAIT
        )


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB1P])
@pytest.mark.parametrize(
    ("ranks", "chunks"), [(2, 1), (2, 3), (3, 2), (4, 2), (4, 5), (5, 3), (8, 2)]
)
def test_looped_stages_run_in_the_order_of_torch(
    schedule: PipelineSchedule, ranks: int, chunks: int
) -> None:
    """Fewer micro-batches than ranks, rounds that are longer than ranks, and many rounds."""
    for count in (1, ranks, 2 * ranks, 3 * ranks, 3 * ranks + 3, 7 * ranks):
        if count % max(1, count // ranks) == 0:
            order = Order(
                schedule=schedule,
                num_ranks=ranks,
                num_microbatches=count,
                num_chunks=chunks,
            )
            assert list(ours(order)) == torch_order(order), count


@pytest.mark.parametrize("schedule", [PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_stages_in_a_v_run_in_the_order_of_torch(
    schedule: PipelineSchedule, ranks: int
) -> None:
    for count in (1, ranks, 2 * ranks, 2 * ranks + 1, 4 * ranks + 1, 4 * ranks + 2, 9 * ranks):
        if schedule is PipelineSchedule.DUALPIPE_V and count < 2 * ranks:
            continue
        order = Order(schedule=schedule, num_ranks=ranks, num_microbatches=count, num_chunks=2)
        assert list(ours(order)) == torch_order(order), count
