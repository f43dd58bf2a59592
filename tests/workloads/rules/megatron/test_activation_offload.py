"""Offloaded activations: megatron-core's order of copies, bytes, memory, time, refusals."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.cli.process import stepmark

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.ops import HostCopy, Phase
from stepmark.predictions.simulation import simulate
from stepmark.predictions.step import offload_share
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import Costs, OpCost
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.activation_offload import (
    TO_DEVICE,
    TO_HOST,
    Group,
    StageCopies,
)
from stepmark.workloads.rules.megatron.narrow import Fp8Format
from stepmark.workloads.rules.megatron.plan import make_plan
from stepmark.workloads.rules.megatron.rule import workload
from stepmark.workloads.rules.megatron.saved_tensors import saved_bytes
from stepmark.workloads.rules.megatron.settings import (
    OFFLOAD_MODULES,
    AttentionBackend,
    Granularity,
    Megatron,
)

from .jobs import DENSE, EXPERTS, GATED, HYBRID, LATENT, PREDICTING, jobs, make

RECORDED = json.loads(Path("tests/data/megatron_offload.json").read_text())
MODULES = {
    name: (f"{'attention' if 'att' in name or 'qkv' in name else 'mlp'}.x",)
    for name in OFFLOAD_MODULES
}
NAMES = {DENSE: "qkv_linear,core_attn,attn_proj", LATENT: ",".join(OFFLOAD_MODULES)}


def offloaded(words: str, **changes: Any) -> Megatron:
    return Megatron(
        fine_grained_activation_offloading=True,
        offload_modules=words,
        **{"min_offloaded_tensor_size": 1, **changes},
    )


def copies(made: Workload, stage: int = 0) -> list[ComputeOp]:
    return [
        op
        for op in made.expand(stage)
        if isinstance(op, ComputeOp) and isinstance(op.op, HostCopy)
    ]


def copied_bytes(made: Workload, direction: str) -> Counter[str]:
    """Bytes of all stages by module."""
    total: Counter[str] = Counter()
    for stage in range(len(made.stages)):
        for op in copies(made, stage):
            assert isinstance(op.op, HostCopy)
            if op.op.direction == direction:
                total[op.module.removeprefix("offload.")] += op.op.num_bytes
    return total


@pytest.mark.parametrize("case", RECORDED)
def test_copies_are_those_of_megatron_core(case: dict[str, Any]) -> None:
    chunks = [
        [[Group(name, MODULES[name], 1, 1) for name in layer] for layer in layers]
        for layers in case["chunks"]
    ]
    order = [(chunk, microbatch, forward) for chunk, microbatch, forward, _ in case["passes"]]
    ours = StageCopies(chunks, order)
    for *place, recorded in case["passes"]:
        made = ours.passes[tuple(place)]  # type: ignore[index]
        sent = [[at, group.name] for at, sends in enumerate(made.sends) for group in sends]
        assert sent == (recorded if place[2] else [])
        rows = [
            ("own", at, one.name, one.name)
            for at, layer in enumerate(made.reloads)
            for one in layer
            if one.late_bytes
        ]
        rows += [
            ("load", at, one.name, one.loads)
            for at, layer in enumerate(made.reloads)
            for one in layer
            if one.loads
        ]
        assert sorted(rows) == ([] if place[2] else sorted(map(tuple, recorded)))


def test_the_recorded_cases_have_each_kind_of_copy() -> None:
    kinds = Counter(
        "sent" if forward else copy[0]
        for case in RECORDED
        for _, _, forward, recorded in case["passes"]
        for copy in recorded
    )
    assert min(kinds["sent"], kinds["own"], kinds["load"]) > 0


def tensors(model: ModelConfig, *, experts: bool) -> dict[str, int]:
    """Bytes of bf16 tensors of a layer that are copied, per module, by their shapes."""
    rows, size = 2 * model.seq_len, 2  # of micro-batches of 2 sequences
    hidden = rows * model.hidden_size * size
    q = rows * model.num_heads * model.d_qk * size
    kv = rows * model.num_kv_heads * (model.d_qk + model.d_v) * size
    out = rows * model.num_heads * model.d_v * size
    softmax = 4 * rows * model.num_heads
    sizes = {
        "qkv_linear": 2 * hidden + 4 * rows,  # before and behind the norm, and its statistic
        "core_attn": q + kv + out + softmax,
        "attn_proj": out,
    }
    if model.mla is not None:
        latent = size * rows * 2 * (model.mla.q_lora_rank + model.mla.kv_lora_rank)  # type: ignore[operator]
        sizes["qkv_linear"] = 2 * hidden + latent  # the input of both down projections
        sizes["attn_norm"] = hidden + 4 * rows
    if experts:
        assert model.moe is not None
        sent = model.moe.top_k * rows * size
        sizes["mlp_norm"] = hidden + 4 * rows
        sizes["expert_fc1"] = sent * model.hidden_size
        sizes["moe_act"] = sent * 2 * model.moe.ffn_hidden_size
    return sizes


@pytest.mark.parametrize("model", [DENSE, LATENT])
@pytest.mark.parametrize("mesh", [{}, {"pp": 2}, {"pp": 4, "vpp": 2}])
def test_bytes_to_the_host_are_those_back_and_those_of_the_tensors(
    model: ModelConfig, mesh: dict[str, int]
) -> None:
    count = 4
    axes = {name: size for name, size in mesh.items() if name != "vpp"}
    settings = offloaded(NAMES[model], virtual_pipeline_model_parallel_size=mesh.get("vpp", 1))
    made = workload(make(model, microbatches=count, **axes), settings)
    made.check()
    down, up = (copied_bytes(made, direction) for direction in ("d2h", "h2d"))
    assert down == up
    assert set(down) == set(settings.offload_words)
    dense = model.moe.first_dense_layers if model.moe else model.num_layers
    layers = [tensors(model, experts=at >= dense) for at in range(model.num_layers)]
    for name, size in down.items():
        own = {layer[name] for layer in layers if name in layer}
        (tensor,) = own
        num_layers = sum(name in layer for layer in layers)
        num_copies = size // tensor
        assert size == num_copies * tensor
        if not axes:  # the last layer's stays on the device
            assert num_copies == count * (num_layers - 1)
        else:
            # A stage's first micro-batch has one that stays, the last stage's all have.
            assert count * (num_layers - 2) <= num_copies < count * num_layers


@pytest.mark.parametrize("model", [DENSE, LATENT, EXPERTS, PREDICTING])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2, "dp_shard": 2}])
def test_computation_and_messages_are_those_without(
    model: ModelConfig, mesh: dict[str, int]
) -> None:
    words = "core_attn" if model in (DENSE, EXPERTS) else NAMES[LATENT]
    overlaps = {
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    job = make(model, microbatches=4, **mesh)
    plain, made = (
        workload(job, settings)
        for settings in (Megatron(**overlaps), offloaded(words, **overlaps))
    )
    for stage in range(len(made.stages)):
        assert copies(made, stage)
        assert work(plain, stage) == work(made, stage)


def work(made: Workload, stage: int) -> list[tuple[Any, ...]]:
    """Computation and messages in order, without copies, waits and names."""
    return [
        (op.op, op.phase, op.module, op.layer, op.microbatch, op.recompute)
        if isinstance(op, ComputeOp)
        else (op.collective, op.count, op.group, op.stream, op.module, op.layer, op.microbatch)
        for op in made.expand(stage)
        if isinstance(op, CommOp) or not (op.is_wait or isinstance(op.op, HostCopy))
    ]


@given(jobs(), st.sets(st.sampled_from(OFFLOAD_MODULES), min_size=1))
def test_any_job_copies_back_what_it_sends(
    drawn: tuple[Job, Megatron], words: set[str]
) -> None:
    job, settings = drawn
    if "attn_proj" in words:
        words |= {"core_attn"}
    if job.model.mla is None:
        words -= {"attn_norm"}
    if job.model.moe is None:
        words -= {"mlp_norm", "expert_fc1", "moe_act"}
    copying = replace(
        settings,
        fine_grained_activation_offloading=True,
        offload_modules=",".join(words or {"core_attn"}),
        min_offloaded_tensor_size=1,
    )
    try:
        made = workload(job, copying)
    except ConfigError:  # of the model, or of the attention's kernels
        reject()
    made.check()
    assert copied_bytes(made, "d2h") == copied_bytes(made, "h2d")
    plain = workload(job, settings)
    for stage in range(len(made.stages)):
        assert work(plain, stage) == work(made, stage)
    before, after = (stage_memories(job, each) for each in (settings, copying))
    for least, most in zip(after, before, strict=True):
        assert least.activations_bytes <= most.activations_bytes


def test_copies_begin_behind_their_module_and_are_awaited_before_it() -> None:
    made = workload(make(microbatches=1), offloaded("core_attn"))
    program = [*made.expand(0)]
    down = [index for index, op in enumerate(program) if op.stream == TO_HOST]
    up = [index for index, op in enumerate(program) if op.stream == TO_DEVICE]
    assert [program[index].layer for index in down] == [*range(7)]
    for index in down:
        before = max(at for at in range(index) if program[at].name in program[index].after)
        assert (program[before].module, program[before].layer) == (
            "attention.core",
            program[index].layer,
        )
    # The first of the stream waits for the last copy to the host, by its name.
    assert program[up[0]].after == (TO_HOST,)
    waits = [index for index, op in enumerate(program) if "h2d.core_attn" in op.after]
    core = [
        index
        for index, op in enumerate(program)
        if op.module == "attention.core" and op.phase is Phase.BWD
    ]
    assert len(waits) == 7
    # Each copy begins when the layer above has used its own, and ends before it is used.
    for layer, copy, wait in zip(range(6, -1, -1), up[1:], waits, strict=True):
        (above,) = (at for at in core if program[at].layer == layer + 1)
        (own,) = (at for at in core if program[at].layer == layer)
        assert above < copy < wait < own
        between = program[wait + 1 : own]
        assert not [op for op in between if op.stream == COMPUTE]


def test_a_later_micro_batch_waits_for_its_own_copies() -> None:
    made = workload(make(microbatches=4, pp=2), offloaded("core_attn"))
    program = [*made.expand(0)]
    waits = [op for op in program if op.stream == TO_DEVICE and not isinstance(op.op, HostCopy)]  # type: ignore[union-attr]
    # One micro-batch of 4 layers is forward in between, and none before the last pass.
    assert [op.after for op in waits] == [("d2h~4",)] * 3 + [("d2h",)]


def saved_by(job: Job, settings: Megatron) -> int:
    memory = stage_memories(job, settings)[0]
    return memory.activations_bytes + memory.working_bytes + memory.head_bytes


@pytest.mark.parametrize("count", [2, 6])
def test_memory_falls_by_what_is_offloaded(count: int) -> None:
    model = replace(DENSE, num_layers=count)
    job = make(model)
    size = tensors(model, experts=False)
    rotated = 2 * model.seq_len * 2 * (model.num_heads + model.num_kv_heads) * model.d_qk
    plain = saved_by(job, Megatron())
    core = saved_by(job, offloaded("core_attn"))
    # The output stays for the product behind; rotary positions leave with the values.
    freed = size["core_attn"] - size["attn_proj"] + rotated
    assert plain - core == (count - 1) * freed - 2 * size["core_attn"]
    both = saved_by(job, offloaded("core_attn,attn_proj"))
    copied = size["core_attn"] + size["attn_proj"] + size["core_attn"]
    assert plain - both == (count - 1) * (freed + size["attn_proj"]) - copied


def test_what_a_stage_received_stays_where_a_fused_norm_is_offloaded() -> None:
    model = replace(DENSE, num_layers=8)
    job = make(model, pp=2, microbatches=1)
    size = tensors(model, experts=False)["qkv_linear"]
    rows = 2 * model.seq_len * model.hidden_size * 2
    plain, made = (
        [
            memory.activations_bytes + memory.working_bytes + memory.head_bytes
            for memory in stage_memories(job, settings)
        ]
        for settings in (Megatron(), offloaded("qkv_linear"))
    )
    first, last = (before - after for before, after in zip(plain, made, strict=True))
    assert first == 3 * size - 2 * size
    assert last == first - rows


def test_a_stage_without_layers_copies_nothing() -> None:
    settings = offloaded("qkv_linear", pipeline_model_parallel_layout="Et*8|L")
    job = make(pp=2)
    made = workload(job, settings)
    made.check()
    assert copies(made, 0)
    assert not copies(made, 1)
    plain = stage_memories(job, replace(settings, fine_grained_activation_offloading=False))
    assert stage_memories(job, settings)[1] == plain[1]


def test_small_tensors_stay() -> None:
    job = make()
    size = tensors(DENSE, experts=False)
    rows = 2 * DENSE.seq_len
    settings = offloaded("qkv_linear,core_attn", min_offloaded_tensor_size=8192)
    down = copied_bytes(workload(job, settings), "d2h")
    assert down["qkv_linear"] == 2 * 7 * (size["qkv_linear"] - 4 * rows)
    # Keys and values have 4096 elements each, the softmax 1024.
    assert down["core_attn"] == 2 * 7 * 2 * rows * 64 * 2
    with pytest.raises(ConfigError, match=r"min_offloaded_tensor_size 8193.*largest tensor"):
        workload(job, replace(settings, min_offloaded_tensor_size=8193))


def costs(bytes_per_s: float, flops_per_s: float = 1e9) -> Costs:
    def compute(op: ComputeOp) -> OpCost:
        if isinstance(op.op, HostCopy):
            return OpCost(time_s={Work.COPY: op.op.num_bytes / bytes_per_s})
        return OpCost(time_s={Work.MATMUL: (op.op.flops or 0) / flops_per_s})

    return Costs(compute=compute, comm=lambda _op, _group: 0.0)


@pytest.mark.parametrize("mesh", [{}, {"pp": 2}])
def test_copies_are_hidden_until_the_link_is_slower(mesh: dict[str, int]) -> None:
    job = make(microbatches=6, **mesh)
    settings = offloaded("qkv_linear,core_attn,attn_proj")
    made = workload(job, settings)
    plain = simulate(workload(job, Megatron()), costs(1.0)).step_s
    assert simulate(made, costs(1e12)).step_s == pytest.approx(plain, rel=1e-6)
    one_way = max(
        sum(op.op.num_bytes for op in copies(made, stage) if op.stream == TO_HOST)  # type: ignore[union-attr]
        for stage in range(len(made.stages))
    )
    slow = one_way / (4 * plain)  # bytes per second
    assert simulate(made, costs(slow)).step_s >= 4 * plain
    # The directions have a stream each: they do not add up where compute is short.
    assert simulate(made, costs(slow)).step_s < 4 * plain + 4 * plain + plain


@pytest.mark.parametrize(
    ("words", "recomputed"),
    [("moe_act", "moe_act"), ("mlp_norm,attn_norm", "layernorm"), ("core_attn", "mlp")],
)
def test_recompute_of_the_same_module_keeps_its_copies(words: str, recomputed: str) -> None:
    job = make(LATENT)
    again = {
        "recompute_granularity": Granularity.SELECTIVE,
        "recompute_modules": recomputed,
    }
    made = workload(job, offloaded(words, **again))
    assert copied_bytes(made, "d2h") == copied_bytes(workload(job, offloaded(words)), "d2h")
    plain = workload(job, Megatron(**again))
    assert work(made, 0) == work(plain, 0)
    assert saved_by(job, offloaded(words, **again)) < saved_by(job, Megatron(**again))


def test_a_group_is_the_memory_of_its_modules() -> None:
    plan = make_plan(make(LATENT), offloaded(NAMES[LATENT]))
    layer = plan.model.layers[-1]
    leaves = {leaf.role: saved_bytes(plan, leaf) for leaf in plan.tree.block(layer).walk()}
    size = tensors(LATENT, experts=True)
    assert size["attn_norm"] == leaves["attention.norm"]
    assert size["core_attn"] == leaves["attention.core"] + leaves["attention.out"]
    assert size["expert_fc1"] == leaves["mlp.experts_gate_up"]
    assert size["moe_act"] == leaves["mlp.experts_activation"]


SELECTIVE = {"recompute_granularity": Granularity.SELECTIVE}


@pytest.mark.parametrize(
    ("model", "words", "changes", "message"),
    [
        (DENSE, "", {}, "offload_modules is missing: give one of attn_norm"),
        (DENSE, "mlp", {}, "offload_modules mlp is invalid"),
        (DENSE, "attn_proj", {}, "attn_proj.*with core_attn, too"),
        (DENSE, "attn_norm", {}, "attn_norm.*without latent attention"),
        (DENSE, "mlp_norm", {}, "mlp_norm.*without experts"),
        (DENSE, "moe_act", {}, "moe_act.*without experts"),
        (DENSE, "core_attn", {"min_offloaded_tensor_size": 0}, "1 or more"),
        (
            DENSE,
            "core_attn",
            {"attention_backend": AttentionBackend.LOCAL},
            "TransformerEngine",
        ),
        (DENSE, "core_attn", {"attention_backend": AttentionBackend.UNFUSED}, "not modelled"),
        (DENSE, "core_attn", {"recompute_granularity": Granularity.FULL}, "full recompute"),
        (DENSE, "core_attn", {"lora_rank": 4}, "lora_rank"),
        (DENSE, "core_attn", SELECTIVE, "computed again"),
        (LATENT, "core_attn", {**SELECTIVE, "recompute_modules": "mla_up_proj"}, "again"),
        (LATENT, "qkv_linear", {**SELECTIVE, "recompute_modules": "layernorm"}, "again"),
        (EXPERTS, "moe_act", {**SELECTIVE, "recompute_modules": "moe"}, "again"),
        (DENSE, "core_attn,attn_proj", {"fp8_format": Fp8Format.HYBRID}, "casts of weights"),
        (GATED, "core_attn", {}, "scans"),
        (HYBRID, "core_attn", {}, "scans"),
        (replace(DENSE, qk_norm=True), "qkv_linear", {}, "norms of queries"),
    ],
)
def test_what_is_refused(
    model: ModelConfig, words: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(make(model), offloaded(words, **changes))


def test_passes_in_turns_are_refused() -> None:
    settings = offloaded("moe_act", overlap_moe_expert_parallel_comm=True)
    with pytest.raises(ConfigError, match="false with overlap_moe_expert_parallel_comm"):
        workload(make(EXPERTS, dp_shard=2, ep=2), settings)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_prediction_says_where_forward_passes_outrun_copies(times: float) -> None:
    made = workload(make(tp=2), offloaded("core_attn"))
    forward = [op for op in made.expand(0) if op.phase is Phase.FWD and op.stream == COMPUTE]
    forward_s = sum(
        costs(1.0).compute(op).total_s if isinstance(op, ComputeOp) else 1e-3 for op in forward
    )
    bytes_per_s = sum(copied_bytes(made, "d2h").values()) / (times * forward_s)
    link = replace(costs(bytes_per_s), comm=lambda _op, _group: 1e-3)
    assert offload_share(made.issued(), link, made.groups) == pytest.approx(times)
    plain = workload(make(tp=2), Megatron())
    assert offload_share(plain.issued(), link, plain.groups) == 0.0


def test_predict_says_that_memory_is_more_where_copies_take_longer(tmp_path: Path) -> None:
    words = (
        *("predict", "--framework", "megatron", "--model", "llama-3.1-8b", "--device", "h200"),
        *("--num-layers", "4", "--gbs", "2", "--vocab-size", "1024"),
        *("--fine-grained-activation-offloading", "--offload-modules"),
        "qkv_linear,core_attn,attn_proj",
    )
    hidden, late = (
        stepmark(*words, "--ffn-hidden-size", width, "--seq-len", seq, cwd=tmp_path).stdout
        for width, seq in (("14336", "8192"), ("256", "1024"))
    )
    assert "memory is more than estimated" not in hidden
    assert "memory is more than estimated: copies of activations" in late
    assert re.search(r"\bfits \(", hidden)
    assert re.search(r"\bclose \(|\bclose to", late)
