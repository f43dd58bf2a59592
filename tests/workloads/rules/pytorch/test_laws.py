"""What holds for every workload that the rules of PyTorch make.

Over 250 lines: one law after the other.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from stepmark.cases import flops
from stepmark.cases.message import RECV, SEND
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, GradSync, Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Optimizer, Phase
from stepmark.model.parallel import PipelineSchedule
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Group, Kernel, Run, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch import rule, step
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.rules.pytorch.fsdp_recorder import REDUCE, REPLICATE
from stepmark.workloads.rules.pytorch.settings import PyTorch, StageEnds

from .jobs import (
    ALONE,
    BIASED,
    DDP,
    DENSE,
    EXPERTS,
    FP32,
    bus_bytes,
    comms,
    generated,
    jobs,
    make,
    matmul_flops,
)


@bounds(max_examples=40, deadline=None)
@given(jobs())
def test_flops_are_two_per_token_and_active_parameter(made: tuple[Job, PyTorch]) -> None:
    """Backward twice that: the embedding's gradient is taken, so the first layer's too."""
    job, settings = made
    found = matmul_flops(rule.workload(job, settings))
    tokens = job.tokens * job.num_microbatches
    assert found[Phase.FWD] * job.parallel.tp == 2 * tokens * job.model.num_active_matmul_params
    assert found[Phase.DGRAD] + found[Phase.WGRAD] == 2 * found[Phase.FWD]


def recomputed_flops(program: Workload) -> int:
    """Over the stages, of one rank each: products and attention that run again."""
    ops = (op for stage in range(len(program.stages)) for op in program.expand(stage))
    return sum(
        op.op.flops or 0
        for op in ops
        if isinstance(op, ComputeOp)
        and op.recompute
        and isinstance(op.op, Gemm | GroupedGemm | Attention | Kernel)
    )


@bounds(max_examples=40, deadline=None)
@given(jobs())
def test_what_runs_again_is_what_executed_flops_count(made: tuple[Job, PyTorch]) -> None:
    """Workload and HFU follow from one statement: cases/recompute.py."""
    job, settings = made
    case = TrainCase(model=job.model, recompute=settings.recompute)
    tokens = job.tokens * job.num_microbatches
    again = recomputed_flops(rule.workload(job, settings)) * job.parallel.tp
    assert again == flops.recomputed(case) * tokens


@pytest.mark.parametrize("name", load_models())
@pytest.mark.parametrize("recompute", Recompute)
def test_executed_flops_of_every_model_are_those_of_its_workload(
    name: str, recompute: Recompute
) -> None:
    case = TrainCase(model=find_model(name), recompute=recompute, recompute_blocks=(1, 2))
    assert recomputed_flops(of_case(case)) == flops.recomputed(case) * case.tokens_per_step


@bounds(max_examples=20, deadline=None)
@given(jobs())
def test_neighbours_send_what_the_others_receive(made: tuple[Job, PyTorch]) -> None:
    """In one order, with one size and micro-batch, forward as backward."""
    program = rule.workload(*made)
    last = len(program.stages) - 1
    for stage in range(last + 1):
        for ahead in (1, -1):
            sent = transfers(program, stage, SEND, ahead)
            received = transfers(program, (stage + ahead) % (last + 1), RECV, -ahead)
            assert sent == received
            assert len(set(sent)) == len(sent) or last == 0


def transfers(
    program: Workload, stage: int, side: str, ahead: int
) -> list[tuple[int, Phase, int | None, int]]:
    """To or from the stage that many ahead; of one micro-batch each chunk's in its turn."""
    seen: Counter[tuple[Phase, int | None]] = Counter()
    found: list[tuple[int, Phase, int | None, int]] = []
    for one in comms(program, stage):
        # Pieces of tensor parallelism are sent over another group.
        if one.collective == side and one.group == "pp" and one.peer == ahead:
            seen[one.phase, one.microbatch] += 1
            turn = seen[one.phase, one.microbatch]
            found.append((one.count, one.phase, one.microbatch, turn))
    return found


@bounds(max_examples=20, deadline=None)
@given(jobs())
def test_what_waits_finds_what_it_waits_for(made: tuple[Job, PyTorch]) -> None:
    """Copies out of gathers, transfers, and the ends of backward passes."""
    program = rule.workload(*made)
    program.check()
    for stage in range(len(program.stages)):
        issued: Counter[str] = Counter()
        names = {one.name for one in program.expand(stage)}
        for one in program.expand(stage):
            for word in one.after:
                name, _, back = word.partition("~")
                assert name in names, word
                # A buffer is free at first.
                may_miss = isinstance(one, CommOp) or is_copy_in(one)
                assert may_miss or issued[name] > int(back or 0), word
            issued[one.name] += 1


@bounds(max_examples=20, deadline=None)
@given(jobs())
def test_gradients_are_waited_for_before_they_are_clipped(made: tuple[Job, PyTorch]) -> None:
    program = rule.workload(*made)
    for stage in range(len(program.stages)):
        open_names: set[str] = set()
        for one in program.expand(stage):
            if one.phase is Phase.OPTIM:
                break
            if isinstance(one, CommOp) and one.stream in (REDUCE, REPLICATE):
                open_names.add(one.name)
            elif isinstance(one, ComputeOp) and not is_copy_in(one):
                open_names -= set(one.after)
        else:
            pytest.fail("no update")
        assert open_names == set()


def is_copy_in(one: ComputeOp) -> bool:
    return isinstance(one.op, Kernel) and one.op.name == "fsdp_reduce_copy_in"


@bounds(max_examples=15, deadline=None)
@given(jobs())
def test_programs_are_the_same_after_writing_and_reading(made: tuple[Job, PyTorch]) -> None:
    program = rule.workload(*made)
    again = native.decode(native.encode(program))
    for stage in range(len(program.stages)):
        assert list(again.expand(stage)) == list(program.expand(stage))


def test_a_block_of_llama_3_70b_over_8_ranks_has_106956800_elements_on_each() -> None:
    made = generated(make(find_model("llama-3-70b"), mbs=1, dp_shard=8))
    counts = Counter(
        (one.collective, one.count) for one in comms(made) if one.module == "blocks"
    )
    assert counts == {
        (Collective.ALL_GATHER, 106_956_800): 2 * 80,
        (Collective.REDUCE_SCATTER, 106_956_800): 80,
    }


WHOLE = [{"dp_shard": 2}, {"dp_shard": 8}, {"dp_shard": 2, "dp_replicate": 1, "cp": 2}]


@pytest.mark.parametrize("model", [DENSE, BIASED], ids=["dense", "biased"])
@pytest.mark.parametrize("mesh", WHOLE)
def test_fully_sharded_is_half_as_much_again_as_ddp(
    model: ModelConfig, mesh: dict[str, int]
) -> None:
    """Less one gather of the root, which is not given back after the forward pass."""
    shards = make(model, **mesh)
    copies = make(model, dp_replicate=mesh["dp_shard"], cp=mesh.get("cp", 1))
    sharded = generated(shards, **FP32, ends=StageEnds.ROOT)
    of_tensors = lambda one: one.group != "cp"  # noqa: E731
    reduced = bus_bytes(rule.workload(copies, DDP(**{"autocast": False})), of_tensors)
    root = bus_bytes(
        sharded,
        lambda one: one.module == "root" and one.collective == Collective.ALL_GATHER,
    )
    assert root > 0
    assert bus_bytes(sharded, of_tensors) == pytest.approx(1.5 * reduced - root, rel=1e-12)
    kept = generated(shards, **FP32, ends=StageEnds.ROOT, reshard_after_forward="no")
    assert bus_bytes(kept, of_tensors) == pytest.approx(reduced, rel=1e-12)


@given(st.integers(1, 2**20), st.integers(2, 512), st.sampled_from((DType.FP32, DType.BF16)))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    count: int, ranks: int, dtype: DType
) -> None:
    group = Group(digits=((ranks, 1),))

    def bus(collective: Collective, elements: int) -> float:
        made = CommOp(
            collective=str(collective),
            dtype=dtype,
            count=elements,
            group="dp",
            phase=Phase.BWD,
            module="",
        )
        return made.bus_bytes(group)

    parts = bus(Collective.REDUCE_SCATTER, count) + bus(Collective.ALL_GATHER, count)
    assert bus(Collective.ALL_REDUCE, count * ranks) == pytest.approx(parts)


@bounds(max_examples=40, deadline=None)
@given(
    width=st.integers(8, 80).map(lambda n: 2 * n),
    vocab=st.integers(20, 300),
    ranks=st.sampled_from((2, 3, 4, 7)),
    ends=st.sampled_from(StageEnds),
)
def test_shards_hold_all_parameters_and_padding_of_rows(
    width: int, vocab: int, ranks: int, ends: StageEnds
) -> None:
    model = replace(DENSE, ffn_hidden_size=width, vocab_size=vocab)
    made = generated(make(model, dp_shard=ranks), ends=ends, **FP32)
    padding = model.num_layers * 2 * (-width % ranks) * 64  # gate and up, by rows
    padding += model.num_layers * (-(-128 // ranks) * ranks - 128) * 64  # q, k and v
    padding += model.num_layers * 3 * (-64 % ranks) * 64  # rows of out, as many of down
    padding += model.num_layers * (-64 % ranks) * (width - 128)
    padding += model.num_layers * 2 * (-64 % ranks) + (-64 % ranks)  # norms
    padding += 2 * (-vocab % ranks) * 64
    gathered = sum(
        one.count * ranks
        for one in comms(made)
        if one.collective == Collective.ALL_GATHER and one.phase is Phase.FWD
    )
    reduced = sum(
        one.count * ranks for one in comms(made) if one.collective == Collective.REDUCE_SCATTER
    )
    assert gathered == reduced == model.num_params + padding
    assert updates(made) * ranks == gathered


def updates(made: Workload) -> int:
    """Parameters that a rank's optimizer steps over."""
    return sum(
        one.op.num_params
        for one in made.expand()
        if isinstance(one, ComputeOp) and isinstance(one.op, Optimizer)
    )


def test_types_on_the_wire_are_those_of_the_policy() -> None:
    job = make(DENSE, dp_shard=4, dp_replicate=2)
    made = generated(job, param_dtype=DType.BF16, reduce_dtype=DType.FP32)
    kinds = {(one.collective, one.dtype) for one in comms(made) if one.phase is not Phase.OPTIM}
    assert kinds == {
        (Collective.ALL_GATHER, DType.BF16),
        (Collective.REDUCE_SCATTER, DType.FP32),
        (Collective.ALL_REDUCE, DType.FP32),
    }


def test_replicas_reduce_what_shards_have_scattered() -> None:
    made = generated(make(DENSE, dp_shard=4, dp_replicate=2))
    order = [one for one in comms(made) if one.phase is Phase.BWD]
    pairs = [(a, b) for a, b in pairwise(order) if a.collective == Collective.REDUCE_SCATTER]
    assert len(pairs) == DENSE.num_layers + 2  # embedding, and norm with head
    for scattered, reduced in pairs:
        assert (reduced.collective, reduced.count, reduced.group) == (
            Collective.ALL_REDUCE,
            scattered.count,
            "replicate",
        )


@pytest.mark.parametrize(
    ("reshard", "group", "gathers"), [("yes", "fsdp", 8), ("2", "fsdp_inner", 8), ("no", "", 0)]
)
def test_backward_gathers_from_where_weights_were_left(
    reshard: str, group: str, gathers: int
) -> None:
    job = make(DENSE, dp_shard=8)
    made = generated(job, ends=StageEnds.ROOT, reshard_after_forward=reshard)
    again = [
        one
        for one in comms(made)
        if one.collective == Collective.ALL_GATHER and one.phase is Phase.BWD
    ]
    assert len(again) == gathers
    assert {one.group for one in again} == ({group} if group else set())
    if group:
        sizes = {one.count * made.groups[group].size for one in again}
        assert sizes == {DENSE.layer_params()}


@pytest.mark.parametrize("prefetch", [2, 3, 8])
def test_prefetching_moves_gathers_and_changes_none(prefetch: int) -> None:
    plain = [
        one.layer for one in comms(generated(make(DENSE, dp_shard=4))) if one.stream == "fsdp"
    ]
    ahead = [
        one.layer
        for one in comms(generated(make(DENSE, dp_shard=4), prefetch=prefetch))
        if one.stream == "fsdp"
    ]
    assert Counter(plain) == Counter(ahead)


SPREAD: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("fsdp", {}, {"dp_shard": 4}),
    ("fsdp", {"grad_sync": GradSync.LAST}, {"dp_shard": 2, "tp": 2}),
    ("fsdp", {}, {"dp_shard": 2, "pp": 4}),
    ("fsdp", {"pp_schedule": PipelineSchedule.GPIPE}, {"dp_shard": 2, "pp": 4}),
    ("fsdp", {"pp_schedule": PipelineSchedule.INTERLEAVED}, {"dp_shard": 2, "pp": 4}),
    ("ddp", {}, {"dp_replicate": 4}),
    ("tp", {}, {"tp": 4}),
    ("pp", {}, {"pp": 4}),
    ("pp", {"pp_schedule": PipelineSchedule.INTERLEAVED}, {"pp": 2, "tp": 2}),
]


@pytest.mark.parametrize(
    ("mesh", "given", "alias"),
    [
        ({"dp_shard": 4}, {}, "fsdp"),
        ({"cp": 2}, {}, "fsdp"),
        ({"dp_shard": 2, "dp_replicate": 2}, {}, "fsdp"),
        ({"dp_replicate": 4}, {"data_parallel": DataParallel.FSDP}, "fsdp"),
        ({"dp_replicate": 4}, {}, "ddp"),
        ({"dp_shard": 4}, {"data_parallel": DataParallel.DDP}, "ddp"),
        ({"tp": 4}, {}, "tp"),
        ({"pp": 2, "microbatches": 2}, {}, "pp"),
        ({}, {}, "tp"),
    ],
)
def test_data_parallelism_follows_from_the_axes_as_in_torchtitan(
    mesh: dict[str, int], given: dict[str, Any], alias: str
) -> None:
    """parallel_dims.fsdp_enabled: dp_shard_enabled or cp_enabled."""
    job = make(**mesh)
    chosen = RULES["pytorch"].workload(job, RULES["pytorch"].make(**given))
    older = RULES[alias].workload(job, RULES[alias].make())
    names = ("rules", "settings")
    assert replace(chosen, **{name: getattr(older, name) for name in names}) == older
    assert (chosen.rules, older.rules) == ("pytorch", alias)
    assert older.settings.items() <= chosen.settings.items()


@pytest.mark.parametrize(("model", "ep"), [(DENSE, 1), (EXPERTS, 2), (EXPERTS, 4)])
def test_weights_are_sharded_over_data_and_context_ranks(model: ModelConfig, ep: int) -> None:
    """parallel_dims: dp_shard_cp is the mesh of fully_shard; experts have 1 / ep of it."""

    def sent(**mesh: int) -> Counter[tuple[str, int, str]]:
        made = generated(make(model, ep=ep, **mesh))
        return Counter(
            (op.collective, op.count, op.group)
            for op in comms(made)
            if op.group in ("fsdp", "expert_fsdp")
        )

    assert sent(dp_shard=4, cp=2) == sent(dp_shard=8)


@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}])
def test_gathers_in_fp8_have_a_byte_for_each_narrow_weight(mesh: dict[str, int]) -> None:
    """Products of a block are narrow; its norms, the table and the head are not."""
    job = replace(make(**mesh), products=by_recipe(Recipe.TENSORWISE))
    plain, low = (generated(job, fp8_all_gather=is_low) for is_low in (False, True))
    gathers = [
        [op.count * op.dtype.itemsize for op in comms(made) if op.collective == "all_gather"]
        for made in (plain, low)
    ]
    tp = mesh.get("tp", 1)
    narrow = DENSE.layer_matmul_params() // tp // mesh["dp_shard"]
    saved = [before - after for before, after in zip(*gathers, strict=True)]
    assert sorted(set(saved)) == [0, narrow]
    assert saved.count(narrow) == 2 * DENSE.num_layers
    scales = [op for op in comms(low) if op.module == "scales"]
    assert [op.count for op in scales] == [5 * DENSE.num_layers] * len(mesh)
    assert all(op.redop is RedOp.MAX for op in scales)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_shard": 2, "pp": 2, "microbatches": 4}])
def test_only_adapters_are_reduced_and_updated(
    model: ModelConfig, mesh: dict[str, int]
) -> None:
    """Frozen weights are gathered as before."""
    job = make(model, **mesh)
    full, low = (generated(job, lora_rank=rank) for rank in (None, 4))
    for stage, layers in enumerate(low.stages):
        sent, before = (
            {
                kind: sum(
                    op.count * op.dtype.itemsize
                    for op in comms(made, stage)
                    if op.collective == kind and op.module in ("blocks", "embedding", "output")
                )
                for kind in ("all_gather", "reduce_scatter")
            }
            for made in (low, full)
        )
        adapters = sum(
            4 * (linear.width + linear.out)
            for layer in layers.layers
            for linear in model.linears(model.layers[layer])
            if linear.name != "ffn.router" and not linear.is_routed
        )
        assert sent["reduce_scatter"] == 4 * adapters // mesh["dp_shard"] * (
            job.num_microbatches if len(low.stages) == 1 else 1
        )
        assert sent["all_gather"] > before["all_gather"]
        (updated,) = (
            op.op.num_params
            for op in low.expand(stage)
            if isinstance(op, ComputeOp) and isinstance(op.op, Optimizer)
        )
        assert updated == adapters // mesh["dp_shard"]


@pytest.mark.parametrize("rank", [None, 4])
def test_a_loss_in_chunks_is_the_same_work_sooner(rank: int | None) -> None:
    """Gradients of the head are taken in the forward pass; only their factor is left."""
    whole, parts = (
        generated(make(dp_shard=2), loss_chunks=chunks, lora_rank=rank) for chunks in (1, 4)
    )
    assert matmul_flops(parts) == matmul_flops(whole)
    assert list(comms(parts)) == list(comms(whole))
    head = [op for op in parts.expand() if isinstance(op, ComputeOp) and op.module == "head"]
    assert len(head) == 4 * (3 if rank is None else 2)
    assert not any(op.module == "head" for op in parts.blocks["output.bwd"])
    sums = Counter(
        op.op.name
        for op in parts.expand()
        if isinstance(op, ComputeOp) and isinstance(op.op, Kernel) and op.module == "loss"
    )
    assert sums["grad_copy"] == 4
    assert sums["grad_sum"] == (4 if rank is None else 0)


def items(made: Workload) -> int:
    return sum(map(len, made.blocks.values()))


@pytest.mark.parametrize(("rule", "settings", "mesh"), SPREAD)
def test_a_program_does_not_grow_with_micro_batches(
    rule: str, settings: dict[str, Any], mesh: dict[str, int]
) -> None:
    kind = RULES[rule]
    few, many = (
        kind.workload(make(microbatches=count, **mesh), kind.make(**settings))
        for count in (32, 4096)
    )
    assert items(few) == items(many)
    for count, made in ((32, few), (4096, many)):
        for index, stage in enumerate(made.stages):
            cores = [
                times
                for one, times in made.tally(index).items()
                if one.module == "attention.core" and one.phase is Phase.FWD
            ]
            assert sum(cores) == count * len(stage.layers)


@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 1}])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_program_does_not_grow_with_layers(model: ModelConfig, mesh: dict[str, int]) -> None:
    if model.moe:
        mesh = {name: size for name, size in mesh.items() if name != "tp"}
    short, long = (
        generated(make(replace(model, num_layers=layers), **mesh)) for layers in (12, 1200)
    )
    assert items(short) == items(long)
    assert len(long.stages[0].layers) == 1200


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_stages_have_all_layers_and_micro_batches_once(schedule: PipelineSchedule) -> None:
    job = make(replace(DENSE, num_layers=11), microbatches=8, pp=4)
    made = rule.workload(job, ALONE(pp_schedule=schedule))
    made.check()
    assert sorted(one for stage in made.stages for one in stage.layers) == list(range(11))
    for stage, has in enumerate(made.stages):
        for phase in (Phase.FWD, Phase.BWD):
            seen = Counter(
                (one.layer, one.microbatch)
                for one in made.expand(stage)
                if isinstance(one, ComputeOp)
                and one.module == "attention.core"
                and one.phase is phase
            )
            assert seen == Counter((layer, mb) for layer in has.layers for mb in range(8))


def test_a_pipelines_gradients_are_reduced_once_a_pass() -> None:
    job = make(microbatches=16, pp=2, dp_shard=2)
    made = generated(job, pp_microbatches=4, pp_schedule=PipelineSchedule.INTERLEAVED)
    for stage in range(2):
        scattered = Counter(
            one.layer
            for one in comms(made, stage)
            if one.collective == Collective.REDUCE_SCATTER and one.module == "blocks"
        )
        assert scattered == Counter(dict.fromkeys(made.stages[stage].layers, 4))
        passes = Counter(
            one.microbatch
            for one in made.expand(stage)
            if one.module == "attention.core" and one.phase is Phase.FWD
        )
        assert passes == Counter(dict.fromkeys(range(16), len(made.stages[stage].layers)))


@bounds(max_examples=20, deadline=None)
@given(jobs())
def test_what_is_the_same_again_is_what_going_on_would_give(made: tuple[Job, PyTorch]) -> None:
    """Passes of a pipeline that are repeated against all of them one by one."""
    repeated = rule.workload(*made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.PipelineStage, "_skipped", lambda *_args: 0)
        single = rule.workload(*made)
    for stage in range(len(repeated.stages)):
        assert list(repeated.expand(stage)) == list(single.expand(stage))


def test_blocks_of_runs_are_shared() -> None:
    """What a stage repeats is a Run, not a copy."""
    made = generated(make(microbatches=512, pp=4, dp_shard=2))
    step = made.blocks[made.stages[0].step]
    assert max(one.times for one in step if isinstance(one, Run)) > 500
