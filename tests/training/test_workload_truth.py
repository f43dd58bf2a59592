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
from tests.training.workload_cases import CASES, DDP, GPIPE, WITH_LORA, WITH_ROOT
from tests.training.workload_on_ranks import sent_by_all
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining import schedules as torch_schedules

from stepmark.cases.train_case import TrainCase
from stepmark.model.ops import Phase
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads.pipeline import WITH_MICROBATCH, Act
from stepmark.workloads.rules.pytorch import rule, schedules
from stepmark.workloads.rules.pytorch.case import (
    job_of,
    of_case,
    settings_of,
)
from stepmark.workloads.rules.pytorch.schedules import Order, Schedule
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
        made = of_case(replace(case, pp_schedule="gpipe") if name in GPIPE else case)
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
    "1f1b x fsdp": {"pp_schedule": "gpipe"},
    "interleaved": {"pp_schedule": "1f1b"},
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
    torch_schedules.UNSHARD: Act.GATHER,
    torch_schedules.RESHARD: Act.RELEASE,
    torch_schedules.REDUCE_GRAD: Act.REDUCE,
    torch_schedules.SEND_F: Act.SEND_FORWARD,
    torch_schedules.SEND_B: Act.SEND_BACKWARD,
    torch_schedules.RECV_F: Act.RECV_FORWARD,
    torch_schedules.RECV_B: Act.RECV_BACKWARD,
}
Done = tuple[Act, int, int | None]  # with chunk and micro-batch


def torch_interleaved(ranks: int, count: int, chunks: int) -> list[list[Done]]:
    """What ScheduleInterleaved1F1B would run, without stages."""
    made: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, count
    made.number_of_rounds = max(1, count // ranks)
    made.microbatches_per_round = count // made.number_of_rounds
    orders = {
        rank: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(made._calculate_single_rank_operations(rank)),
            count,
        )
        for rank in range(ranks)
    }
    lowered = torch_schedules._add_send_recv(
        orders,  # type: ignore[arg-type]
        stage_to_rank=lambda stage: stage % ranks,
        num_stages=ranks * chunks,
    )
    return [
        [(ACTS[a.computation_type], a.stage_index // ranks, a.microbatch_index) for a in found]
        for found in lowered.values()
    ]


def ours(ranks: int, count: int, chunks: int) -> Iterator[list[Done]]:
    order = Order(
        schedule=Schedule.INTERLEAVED,
        num_ranks=ranks,
        num_microbatches=count,
        num_chunks=chunks,
    )
    for spans in schedules.spans(order):
        yield [
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
        ]


@pytest.mark.parametrize(
    ("ranks", "chunks"), [(2, 1), (2, 3), (3, 2), (4, 2), (4, 5), (5, 3), (8, 2)]
)
def test_interleaved_stages_run_in_the_order_of_torch(ranks: int, chunks: int) -> None:
    """Fewer micro-batches than ranks, rounds that are longer than ranks, and many rounds."""
    for count in (1, ranks, 2 * ranks, 3 * ranks, 3 * ranks + 3, 7 * ranks):
        if count % max(1, count // ranks) == 0:
            found = list(ours(ranks, count, chunks))
            assert found == torch_interleaved(ranks, count, chunks), count
