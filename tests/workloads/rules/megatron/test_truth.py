"""What megatron-core sent, message by message on every rank, and what the rules generate."""

import dataclasses
import json
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.rule import Megatron, workload

DATA = Path(__file__).parents[3] / "data" / "megatron"
CASES = sorted(path.stem for path in DATA.glob("*.json"))


Products = Mapping[tuple[str, int, int, int], int]  # calls by phase, m, n and k


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
    job = Job(
        model=msgspec.convert(told["model"], ModelConfig),
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


def recorded(golden: Mapping[str, Any], rank: int, part: str) -> list[Sent]:
    found = []
    for number in golden[part][rank]:
        collective, dtype, count, group, phase, peer = golden["messages"][number]
        members = tuple(golden["groups"][group])
        found.append(Sent(collective, dtype, count, members, (phase,), peer))
    return found


def generated(workload: Workload, rank: int, *, setup: bool = False) -> Iterator[Sent]:
    for op in workload.expand(workload.stage_of(rank), setup=setup):
        if not isinstance(op, CommOp) or op.module == "attention.core":
            continue  # TransformerEngine sends those over cp
        members = workload.groups[op.group].members(rank)
        peer = None
        if op.peer is not None:
            peer = members[(members.index(rank) + op.peer) % len(members)]
        # Recorded calls with equal parts are no all_to_all_v.
        collective = op.collective.removesuffix("_v")
        yield Sent(collective, op.dtype, op.count, members, phases(op), peer)


def phases(op: CommOp) -> tuple[str, ...]:
    if op.collective in (SEND, RECV):
        return ("schedule",)
    if op.phase is Phase.OPTIM:
        reported = op.module in ("success", "loss", "learning_rate")
        found = reported or (op.module == "gradient_norm" and op.redop == "max")
        return ("step",) if found else ("optimizer",)
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
        truth = recorded(golden, rank, "step")
        assert matched(generated(workload, rank), truth) == truth, f"rank {rank}"
        begun = [replace(one, phases=()) for one in generated(workload, rank, setup=True)]
        real = [replace(one, phases=()) for one in recorded(golden, rank, "setup")]
        assert begun == real, f"setup of rank {rank}"


def matched(ours: Iterator[Sent], truth: Sequence[Sent]) -> list[Sent]:
    """With the recorded phase where it is one of those that a message may be issued in."""
    return [
        one
        if real is None or real.phases[0] not in one.phases
        else replace(one, phases=real.phases)
        for one, real in zip_longest(ours, truth)
        if one is not None
    ]


@pytest.mark.parametrize("name", CASES)
def test_matrix_products_are_those_of_megatron_core(name: str) -> None:
    """Rows, columns and width of every linear layer's, forward, backward and recomputed."""
    golden = read(name)
    workload = made(golden["case"])
    by_rank = [real_products(golden, rank) for rank in range(workload.world_size)]
    for rank, truth in enumerate(by_rank):
        if golden["case"]["settings"].get("optimizer") == "dist_muon":
            # Ranks update different matrices: that with most is the one that is generated.
            same_stage = [
                real
                for other, real in enumerate(by_rank)
                if workload.stage_of(other) == workload.stage_of(rank)
            ]
            expected = max(same_stage, key=update_flops)
        else:
            expected = truth
        assert products(workload, workload.stage_of(rank)) == expected, f"rank {rank}"


def real_products(golden: Mapping[str, Any], rank: int) -> Products:
    rows = golden["matmuls"][rank]
    rows = golden["matmuls"][rows] if isinstance(rows, int) else rows
    return {(phase, *mnk): calls for phase, *mnk, calls in rows}


def update_flops(products: Products) -> int:
    return sum(
        2 * m * n * k * calls
        for (phase, m, n, k), calls in products.items()
        if phase == "optimizer"
    )


def products(workload: Workload, stage: int) -> Counter[tuple[str, int, int, int]]:
    """An expert's product is one of its own there."""
    found: Counter[tuple[str, int, int, int]] = Counter()
    for op in workload.expand(stage):
        if not isinstance(op, ComputeOp):
            continue
        forward = op.phase is Phase.FWD and not op.recompute
        phase, inner = "forward" if forward else "backward", op.op
        phase = "optimizer" if op.phase is Phase.OPTIM else phase
        if isinstance(inner, Gemm):
            found[phase, inner.m, inner.n, inner.k] += 1
        elif isinstance(inner, GroupedGemm):
            rows = inner.tokens // inner.num_groups
            shape = {
                Phase.FWD: (rows, inner.n, inner.k),
                Phase.DGRAD: (rows, inner.k, inner.n),
                Phase.WGRAD: (inner.n, inner.k, rows),
            }[op.phase]
            found[phase, *shape] += inner.num_groups
    return found


def test_all_ways_to_train_are_there() -> None:
    """A mesh axis, a setting or a model that no golden has would be unchecked."""
    told = [read(name)["case"] for name in CASES]
    assert len(told) == 103
    meshes = {axis for case in told for axis, size in case["mesh"].items() if size > 1}
    assert meshes == {"tp", "pp", "cp", "ep", "dp_shard", "dp_replicate"}
    seen = {name for case in told for name in case["settings"]}
    unseen = {field.name for field in dataclasses.fields(Megatron)} - seen
    unseen -= {name for name in unseen if name.startswith("tp_comm_")}  # userbuffers: GPU
    assert unseen == {
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "ddp_average_in_collective",  # gloo does not average
        "delay_wgrad_compute",  # TransformerEngine's
        "lora_rank",  # Megatron-Bridge's
        "lora_targets",
        "make_vocab_size_divisible_by",
        "accumulate_allreduce_grads_in_fp32",  # with fp16 and the default, no: not recorded
        # DeepEP runs on GPUs with NVLink and a network; a job of ours has its dispatch in fp8.
        "moe_flex_dispatcher_backend",
        "moe_deepep_gpus_per_host",
        "dispatch_dtype",
        # Kernels, which send nothing.
        "attention_backend",
        "attention_dropout",
        "hidden_dropout",
        "masked_softmax_fusion",
        "bias_swiglu_fusion",
        "gradient_accumulation_fusion",
        # TransformerEngine's Adam runs on GPUs.
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        # Copies, which send nothing; test_activation_offload.py compares their order.
        "fine_grained_activation_offloading",
        "offload_modules",
        "min_offloaded_tensor_size",
        # TransformerEngine multiplies narrow types on GPUs.
        "fp8_format",
        "fp8_recipe",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention",
        "fp8_param_gather",
        "fp4_format",
        "fp4_recipe",
        "tp_only_amax_red",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    }
