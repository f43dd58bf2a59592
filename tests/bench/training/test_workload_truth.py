"""Generated workloads against real jobs: every message of every rank of a steady step.

Two and four gloo ranks train with the project's own trainer; what its recorder saw at torch's
dispatcher is what the rules of PyTorch say, element for element and in the same order.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.bench.on_ranks import said_on_ranks
from tests.bench.training.workload_cases import CASES, GPIPE

from stepmark.core.ops import Phase
from stepmark.core.train_case import TrainCase
from stepmark.core.workload import CommOp, Workload
from stepmark.workload.rules.pytorch.case import of_case

# collective, dtype, call bytes, message bytes, members, peer, phase
Row = list[Any]
NAMES = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@cache
def recorded(ranks: int) -> dict[str, list[list[Row]]]:
    """All cases of so many ranks, in one launch."""
    said = said_on_ranks("tests.bench.training.workload_on_ranks", ranks, timeout_s=300)
    found: dict[str, list[list[Row]]] = json.loads(said.splitlines()[-1])
    return found


def generated(case: TrainCase, name: str = "") -> Workload:
    made = of_case(replace(case, pp_schedule="gpipe") if name in GPIPE else case)
    made.check()
    return made


def rows(made: Workload, rank: int) -> list[Row]:
    return [
        row(one, made, rank)
        for one in made.expand(made.stage_of(rank))
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


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_every_message_of_every_rank_is_the_real_one(ranks: int, name: str) -> None:
    made = generated(CASES[ranks][name], name)
    for rank, seen in enumerate(recorded(ranks)[name]):
        assert rows(made, rank) == seen, f"rank {rank}"


CHANGED: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp in buckets": (4, {"bucket_mb": 2}),
    "fsdp padded": (4, {"reshard": "no"}),
    "fsdp in groups": (4, {"blocks_per_group": 2}),
    "fsdp prefetch 3": (4, {"prefetch": 2}),
    "hsdp": (4, {"reshard": "no"}),
    "1f1b x fsdp": (4, {"pp_schedule": "gpipe"}),
    "interleaved": (4, {"pp_schedule": "1f1b"}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_comparison_would_tell_another_way_to_train(name: str) -> None:
    ranks, changes = CHANGED[name]
    other = generated(replace(CASES[ranks][name], **changes))
    assert any(rows(other, rank) != seen for rank, seen in enumerate(recorded(ranks)[name]))
