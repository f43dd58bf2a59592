"""What megatron-core sent, message by message on every rank, and what the rules generate."""

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from stepmark.core.dtypes import DType
from stepmark.core.message import RECV, SEND
from stepmark.core.model import MlaConfig, ModelConfig, MoeConfig
from stepmark.core.ops import Phase
from stepmark.core.parallel import ParallelConfig
from stepmark.core.workload import COMPUTE, CommOp, Workload
from stepmark.workload.job import Job
from stepmark.workload.rules.megatron.rule import Megatron, workload

DATA = Path(__file__).parents[3] / "data" / "megatron"
CASES = sorted(path.stem for path in DATA.glob("*.json"))


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of one rank."""

    collective: str
    dtype: str
    count: int
    members: tuple[int, ...]
    phases: tuple[str, ...]  # one of them: where in the step it was, or may be, issued
    peer: int | None


def read(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())  # type: ignore[no-any-return]


def made(told: Mapping[str, Any]) -> Workload:
    model = dict(told["model"])
    model["moe"] = MoeConfig(**model["moe"]) if model["moe"] else None
    model["mla"] = MlaConfig(**model["mla"]) if model["mla"] else None
    job = Job(
        model=ModelConfig(**{**model, "aliases": ()}),
        parallel=ParallelConfig(**told["mesh"]),
        mbs=told["mbs"],
        gbs=told["gbs"],
        dtype=DType(told["dtype"]),
    )
    return workload(job, Megatron(**settings(told["settings"])))


def settings(told: Mapping[str, Any]) -> dict[str, Any]:
    kinds = typing.get_type_hints(Megatron)
    return {
        name: kinds[name](value)
        if isinstance(kinds[name], type) and issubclass(kinds[name], StrEnum)
        else value
        for name, value in told.items()
    }


def recorded(golden: Mapping[str, Any], rank: int, part: str = "step") -> list[Sent]:
    found = []
    for number in golden[part][rank]:
        collective, dtype, count, group, phase, peer = golden["messages"][number]
        members = tuple(golden["groups"][group])
        found.append(Sent(collective, dtype, count, members, (phase,), peer))
    return found


def generated(workload: Workload, rank: int, *, setup: bool = False) -> Iterator[Sent]:
    for op in workload.expand(workload.stage_of(rank), setup=setup):
        if not isinstance(op, CommOp) or is_elsewhere(op):
            continue
        members = workload.groups[op.group].members(rank)
        peer = None
        if op.peer is not None:
            peer = members[(members.index(rank) + op.peer) % len(members)]
        # Recorded calls with equal parts are no all_to_all_v.
        collective = op.collective.removesuffix("_v")
        yield Sent(collective, op.dtype, op.count, members, phases(op), peer)


def is_elsewhere(op: CommOp) -> bool:
    """megatron/training is no part of megatron-core; TransformerEngine's attention is none."""
    if op.module in ("data", "attention.core"):
        return True
    reported = op.module in ("success", "loss", "learning_rate") or op.redop == "max"
    return op.phase is Phase.OPTIM and reported and op.module != "overflow"


def phases(op: CommOp) -> tuple[str, ...]:
    if op.collective in (SEND, RECV):
        return ("schedule",)
    if op.phase is Phase.OPTIM:
        return ("optimizer",)
    if op.module == "gradients" and op.stream != COMPUTE:
        return ("backward", "schedule")
    if op.module == "parameters" and op.stream != COMPUTE:
        return ("forward", "schedule")
    if op.module.startswith(("gradients", "expert_bias", "tokens")):
        return ("gradients",)
    return ("forward",) if op.phase is Phase.FWD and not op.recompute else ("backward",)


@pytest.mark.parametrize("name", CASES)
def test_messages_are_those_of_megatron_core(name: str) -> None:
    golden = read(name)
    workload = made(golden["case"])
    workload.check()
    assert len(golden["step"]) == workload.world_size
    for rank in range(workload.world_size):
        truth = recorded(golden, rank)
        ours = [
            replace(one, phases=real.phases if real.phases[0] in one.phases else one.phases)
            for one, real in zip(generated(workload, rank), truth, strict=False)
        ]
        ours += list(generated(workload, rank))[len(ours) :]
        assert ours == truth, f"rank {rank}"


def test_there_are_goldens() -> None:
    assert len(CASES) >= 60
