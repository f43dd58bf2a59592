"""What holds for every workload that the megatron rules make."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from stepmark.cases.message import RECV, SEND
from stepmark.model.collectives import Collective
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention, Gemm, GroupedGemm, Norm, Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Kernel, Workload
from stepmark.workloads.formats.ranks import disagreements
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.dispatch import exchange
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import (
    RECOMPUTE_MODULES,
    CpComm,
    Dispatcher,
    Granularity,
)

from .jobs import (
    BIASED,
    DENSE,
    EXPERTS,
    HYBRID,
    LATENT,
    PATTERNS,
    SINKS,
    SLIDING,
    comms,
    computes,
    jobs,
    make,
    matmul_flops,
)

SP = Megatron(sequence_parallel=True)
NEIGHBOURS = Megatron(cp_comm_type=CpComm.A2A_P2P, hierarchical_context_parallel_sizes="2,2")
OWN_HEADS = replace(
    SLIDING, pattern=(Layer(window=16, num_heads=8, num_kv_heads=8, head_dim=16), Layer())
)


@given(jobs())
def test_flops_are_two_per_token_and_active_parameter(made: tuple[Job, Megatron]) -> None:
    """Backward twice that: the embedding's gradient is taken, so the first layer's too."""
    job, settings = made
    found = matmul_flops(workload(job, settings))
    per_rank = job.tokens * job.num_microbatches
    forward = 2 * per_rank * job.model.num_active_matmul_params
    assert found[Phase.FWD] * job.parallel.tp == forward
    assert found[Phase.DGRAD] + found[Phase.WGRAD] == 2 * found[Phase.FWD]


@given(jobs())
def test_every_wait_has_something_to_wait_for(made: tuple[Job, Megatron]) -> None:
    job, settings = made
    program = workload(job, settings)
    program.check()
    for stage in range(len(program.stages)):
        issued: Counter[str] = Counter()
        for op in program.expand(stage):
            for word in op.after:
                name, _, back = word.partition("~")
                assert issued[name] > int(back or 0), word
            issued[op.name] += 1


@given(jobs())
def test_neighbours_send_what_the_others_receive(made: tuple[Job, Megatron]) -> None:
    """In one order, with one size and micro-batch."""
    job, settings = made
    program = workload(job, settings)
    size, ranks = len(program.stages), program.world_size
    sides: dict[tuple[str, int, int], list[tuple[object, ...]]] = {}
    for stage in range(size):
        rank = stage * (ranks // size)
        for op in comms(program, stage, "pipeline"):
            members = program.groups[op.group].members(rank)
            assert op.peer is not None
            peer = members[(members.index(rank) + op.peer) % len(members)]
            other = program.stage_of(peer)
            assert peer % (ranks // size) == 0
            ends = (stage, other) if op.collective == SEND else (other, stage)
            what = (op.microbatch, op.count, op.dtype, op.phase, op.group)
            sides.setdefault((op.collective, *ends), []).append(what)
    sent = {key[1:]: found for key, found in sides.items() if key[0] == SEND}
    received = {key[1:]: found for key, found in sides.items() if key[0] == RECV}
    assert sent == received
    if size > 1:
        chunks = settings.virtual_pipeline_model_parallel_size
        boundaries = 2 * (size * chunks - 1) * job.num_microbatches
        assert sum(map(len, sent.values())) == boundaries


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_stages_without_experts_take_part_in_their_sums(pp: int, sharded: bool) -> None:
    """Of eight layers the first three are dense."""
    job = make(EXPERTS, pp=pp, ep=2, dp_shard=4)
    program = workload(job, Megatron(use_distributed_optimizer=sharded))
    assert disagreements(program) == ()
    gathers = [len(list(comms(program, stage, "parameters"))) for stage in range(pp)]
    buckets = [2 if (stage + 1) * 8 // pp > 3 else 1 for stage in range(pp)]
    assert gathers == [2 * count * sharded for count in buckets]


@given(jobs())
def test_every_gradient_is_reduced_once(made: tuple[Job, Megatron]) -> None:
    """Over all ranks of a data group: padded where the optimizer is distributed, else exact."""
    job, settings = made
    program = workload(job, settings)
    ranks = {name: group.size for name, group in program.groups.items()}
    reduced = gathered = num_reduces = 0
    for stage in range(len(program.stages)):
        for op in comms(program, stage, "gradients"):
            num_reduces += 1
            parts = ranks[op.group] if op.collective == "reduce_scatter" else 1
            reduced += op.count * parts
        for op in comms(program, stage, "parameters"):
            gathered += op.count * ranks[op.group]
    if job.parallel.dp_shard * job.parallel.cp == 1 or job.parallel.ep > 1:
        return
    model, tp = program.model, job.parallel.tp
    assert model is not None
    of_all = model.num_moe_layers + (model.num_mtp_layers if model.moe else 0)
    bias = model.moe.num_experts * of_all if model.moe else 0
    bias = bias if model.moe and model.moe.router_bias else 0
    is_twice = model.tied_embeddings or model.num_mtp_layers
    again = model.head_params if is_twice and job.parallel.pp > 1 else 0
    stored = model.num_params - bias + again
    if tp == 1:
        if not settings.use_distributed_optimizer:
            assert reduced == stored
        else:
            divisor = 128 * job.parallel.cp * job.parallel.dp_shard
            assert stored <= reduced <= stored + num_reduces * (divisor + 64 * 200)
    else:  # what tp ranks hold whole is reduced by each of them
        assert stored < reduced * tp
    assert gathered == (reduced if settings.use_distributed_optimizer else 0)


@given(jobs())
def test_overlap_moves_no_byte_and_changes_no_computation(made: tuple[Job, Megatron]) -> None:
    """What is sent and computed is the same, only when."""
    job, settings = made
    plain = replace(
        settings,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        align_grad_reduce=True,
        align_param_gather=True,
    )
    ours, other = (_totals(workload(job, one)) for one in (settings, plain))
    if not settings.use_distributed_optimizer:  # else padding is per bucket
        assert ours == other
    assert set(ours) == set(other)


def _totals(program: Workload) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for stage in range(len(program.stages)):
        for op in program.expand(stage):
            if isinstance(op, CommOp):
                found[op.collective, op.module] += op.count * op.dtype.itemsize
            elif op.module not in ("gradients", "parameters", "pipeline", "optimizer"):
                found["compute", op.module] += 1
    return found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", [DENSE, replace(DENSE, tied_embeddings=True)])
def test_messages_of_tensor_parallelism(tp: int, model: ModelConfig) -> None:
    """2 all-reduces per layer and pass, one of the embedding, one of the head's input."""
    job = make(model, tp=tp)
    program = workload(job, Megatron())
    rows, microbatches = job.tokens * model.hidden_size, job.num_microbatches
    sums: Counter[tuple[Phase, int]] = Counter()
    for op in comms(program, 0):
        if op.group == "tp" and op.collective == "all_reduce":
            sums[op.phase, op.count] += 1
    layers = 2 * model.num_layers + 1
    assert sums[Phase.FWD, rows] == sums[Phase.DGRAD, rows] == layers * microbatches
    assert sums[Phase.FWD, job.tokens] == 3 * microbatches  # of the loss, fp32
    assert sum(sums.values()) == (2 * layers + 3) * microbatches


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_sends_as_much_forward(tp: int) -> None:
    """All-reduce = reduce-scatter + all-gather; backward inputs are gathered once more."""
    job = make(tp=tp)

    def bus(settings: Megatron, phase: Phase) -> float:
        program = workload(job, settings)
        return math.fsum(
            op.bus_bytes(program.groups[op.group])
            for op in comms(program, 0)
            if op.group == "tp" and op.phase is phase and op.module not in ("data", "loss")
        )

    plain, ours = Megatron(), SP
    assert bus(ours, Phase.FWD) == bus(plain, Phase.FWD)
    assert bus(ours, Phase.DGRAD) == bus(plain, Phase.DGRAD)
    again = (2 * job.model.num_layers + 1) * job.num_microbatches
    gathered = job.tokens * job.model.hidden_size * 2 * (tp - 1) / tp
    assert bus(ours, Phase.WGRAD) == pytest.approx(again * gathered)


def test_a_linear_layers_collectives_run_beside_its_gradients() -> None:
    """Its input is gathered beside the data's gradient, which is scattered beside the other."""
    program = workload(make(tp=2), SP)
    found: list[str] = []
    for op in program.expand():
        if op.module == "mlp.gate_up" and op.layer == 0 and op.microbatch == 0:
            words = f"{op.collective} {op.stream}" if isinstance(op, CommOp) else "gemm"
            found.append(f"{op.phase} {words} {' '.join(op.after)}".strip())
    assert found == [
        "fwd all_gather compute",
        "fwd gemm",
        "wgrad all_gather tp mlp.activation.bwd",
        "dgrad gemm",
        "dgrad reduce_scatter tp mlp.gate_up.dgrad",
        "wgrad gemm mlp.gate_up.gather",
    ]
    plain = workload(make(tp=2), Megatron())
    backward = [
        (op.phase, isinstance(op, CommOp), op.stream)
        for op in plain.expand()
        if (op.module, op.layer, op.microbatch) == ("mlp.gate_up", 0, 0)
    ]
    assert backward == [
        (Phase.FWD, False, COMPUTE),
        (Phase.DGRAD, False, COMPUTE),
        (Phase.DGRAD, True, "tp"),
        (Phase.WGRAD, False, COMPUTE),
    ]


def test_optimizer_over_data_ranks_sends_what_an_all_reduce_sends() -> None:
    """With gradients and parameters of one type and no padding: RS + AG = AR in bus bytes."""
    job = make(replace(DENSE, hidden_size=128, head_dim=16, ffn_hidden_size=256), dp_shard=4)

    def bus(settings: Megatron) -> float:
        program = workload(job, settings)
        return math.fsum(
            op.bus_bytes(program.groups[op.group])
            for op in comms(program, 0, "gradients", "parameters")
        )

    whole = bus(Megatron(grad_reduce_in_bf16=True))
    assert bus(Megatron(grad_reduce_in_bf16=True, use_distributed_optimizer=True)) == whole
    fp32 = bus(Megatron(use_distributed_optimizer=True))
    assert fp32 == pytest.approx(1.5 * whole)  # 4 bytes down, 2 up, against 2 and 2


def test_recompute_runs_the_layers_forward_again() -> None:
    job = make(tp=2)
    full = replace(SP, recompute_granularity=Granularity.FULL)
    plain, again = workload(job, SP), workload(job, full)
    base, found = matmul_flops(plain), matmul_flops(again)
    head = 2 * job.tokens * job.num_microbatches * job.model.head_params // 2
    assert found[Phase.STEP] == base[Phase.FWD] - head
    assert all(found[one] == base[one] for one in (Phase.FWD, Phase.DGRAD, Phase.WGRAD))
    extra = sum(1 for op in comms(again, 0) if op.group == "tp" and op.recompute)
    # A layer gathers twice and scatters twice; its last scatter is run again as well.
    assert extra == 4 * job.model.num_layers * job.num_microbatches


ROUTED = {"mlp.router", "mlp.dispatch", "mlp.combine"}
RERUN = {
    "core_attn": {"attention.core"},
    "layernorm": {"attention.norm", "mlp.norm"},
    "mla_up_proj": {"attention.q_up", "attention.kv_up", "attention.rope"},
    "mlp": {"mlp.gate_up", "mlp.activation", "mlp.down"},
    "moe_act": {"mlp.experts_activation"},
    "shared_experts": {"mlp.shared_gate_up", "mlp.shared_activation", "mlp.shared_down"},
}
RERUN["moe"] = (
    ROUTED
    | RERUN["shared_experts"]
    | {"mlp.experts_gate_up", "mlp.experts_activation", "mlp.experts_down"}
)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("word", RECOMPUTE_MODULES)
def test_selective_recompute_runs_the_named_modules_again(word: str, chunks: int) -> None:
    """As TransformerConfig.recompute_modules says; in each layer once per backward pass."""
    job = make(LATENT, pp=2, dp_shard=2, ep=2)
    settings = Megatron(
        recompute_granularity=Granularity.SELECTIVE,
        recompute_modules=word,
        virtual_pipeline_model_parallel_size=chunks,
    )
    program = workload(job, settings)
    again = Counter(
        (op.module, op.layer)
        for stage in range(2)
        for op in program.expand(stage)
        if op.recompute and isinstance(op, ComputeOp) and isinstance(op.op, Gemm | Norm)
    )
    names = {op.module for stage in (0, 1) for op in program.expand(stage) if op.recompute}
    assert names == RERUN[word]
    assert set(again.values()) <= {job.num_microbatches}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("method", "layers"), [("uniform", 2), ("block", 1), ("block", 9)])
def test_full_recompute_of_so_many_layers_of_a_chunk(
    method: str, layers: int, chunks: int
) -> None:
    """uniform: all of them; block: the first ones of each model chunk."""
    settings = Megatron(
        recompute_granularity=Granularity.FULL,
        recompute_method=method,
        recompute_num_layers=layers,
        virtual_pipeline_model_parallel_size=chunks,
    )
    program = workload(make(pp=2), settings)
    per_chunk = DENSE.num_layers // (2 * chunks)
    expected = set(range(DENSE.num_layers))
    if method == "block":
        expected = {layer for layer in expected if layer % per_chunk < layers}
    found = {op.layer for stage in (0, 1) for op in program.expand(stage) if op.recompute}
    assert found == expected


@pytest.mark.parametrize("model", [EXPERTS, LATENT])
@pytest.mark.parametrize("dispatcher", [Dispatcher.ALLTOALL, Dispatcher.ALLGATHER])
def test_tokens_reach_their_experts_and_come_back(
    model: ModelConfig, dispatcher: Dispatcher
) -> None:
    assert model.moe is not None
    job = make(model, tp=2, dp_shard=4, ep=4)
    settings = replace(SP, moe_token_dispatcher_type=dispatcher)
    program = workload(job, settings)
    # With expert tp = tp every rank of the pair computes its part of both ranks' rows.
    rows = job.tokens // 2 * model.moe.top_k * 2
    grouped = [
        op.op
        for op in computes(program, 0)
        if isinstance(op.op, GroupedGemm) and op.phase is Phase.FWD
    ]
    assert grouped
    assert {one.tokens for one in grouped} == {rows}
    ways: Counter[str] = Counter()
    for op in comms(program, 0, "mlp.dispatch", "mlp.combine"):
        if op.dtype.is_integer:
            continue
        parts = program.groups[op.group].size
        ways[f"{op.module} {op.phase}"] += op.count * parts
    assert ways["mlp.dispatch fwd"] == ways["mlp.dispatch bwd"]
    assert ways["mlp.combine fwd"] == ways["mlp.combine bwd"]


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [4, 8])
@pytest.mark.parametrize("dispatcher", [Dispatcher.ALLTOALL, Dispatcher.ALLGATHER])
def test_rows_that_experts_compute_are_the_rows_that_are_put_in_order(
    dispatcher: Dispatcher, ep: int, etp: int
) -> None:
    """All-gather: of all ranks. All-to-all: own ones; then by expert, if there are several."""
    settings = replace(
        SP, moe_token_dispatcher_type=dispatcher, expert_tensor_parallel_size=etp
    )
    job = make(EXPERTS, tp=2, dp_shard=8, ep=ep)
    program = workload(job, settings)
    (rows,) = {op.op.tokens for op in computes(program, 0) if isinstance(op.op, GroupedGemm)}
    row_bytes = 2 * job.model.hidden_size * job.dtype.itemsize
    found = Counter(
        (op.op.name, op.op.bytes_moved // row_bytes)
        for op in computes(program, 0)
        if isinstance(op.op, Kernel)
        and op.module in ("mlp.dispatch", "mlp.combine")
        and op.op.bytes_moved
    )
    times = 5 * job.num_microbatches  # layers with experts
    gathers = dispatcher is Dispatcher.ALLGATHER
    own = rows if gathers else rows // etp
    wanted = {("permute", own): 2 * times, ("unpermute", own): 2 * times}
    if not gathers and ep < 8:
        wanted["sort_chunks", rows] = 4 * times
    assert found == wanted


def test_the_order_of_an_experts_layer_is_that_of_the_dispatcher() -> None:
    """Gathered over the experts' tp, then sorted by expert, computed, back before the sum."""
    program = workload(make(EXPERTS, tp=2, dp_shard=4, ep=4), SP)
    names = [
        op.op.name
        if isinstance(op, ComputeOp) and isinstance(op.op, Kernel)
        else op.collective
        if isinstance(op, CommOp)
        else "experts"
        for op in program.blocks["moe.forward"]
        if isinstance(op, CommOp | ComputeOp)
        and op.module.startswith(("mlp.dispatch", "mlp.combine", "mlp.experts_down"))
    ]
    assert names == [
        "all_gather",
        "permute",
        *("all_to_all_v", "all_to_all_v", "all_gather", "all_gather"),
        "sort_chunks",
        "experts",
        "sort_chunks",
        *("reduce_scatter", "all_to_all_v", "unpermute"),
    ]


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_sends_what_gathering_keys_and_values_sends(cp: int) -> None:
    """Backward twice as much: keys and values again, and their gradients."""
    job = make(cp=cp)

    def bus(kind: CpComm, phase: Phase) -> float:
        program = workload(job, Megatron(cp_comm_type=kind))
        return math.fsum(
            op.bus_bytes(program.groups[op.group])
            for op in comms(program, 0, "attention.core")
            if op.phase is phase and op.collective != RECV
        )

    own = job.tokens * 2 * job.model.num_kv_heads * job.model.head_dim * 2
    forward = own * (cp - 1) * job.model.num_layers * job.num_microbatches
    for kind in (CpComm.P2P, CpComm.ALL_GATHER):
        assert bus(kind, Phase.FWD) == forward
        assert bus(kind, Phase.BWD) == 2 * forward
    # Heads: queries, keys, values and the result, of which a rank keeps its share.
    heads = 2 * job.model.num_heads + 2 * job.model.num_kv_heads
    moved = job.tokens * heads * job.model.head_dim * 2 * (cp - 1) / cp
    moved *= job.model.num_layers * job.num_microbatches
    for phase in (Phase.FWD, Phase.BWD):
        assert bus(CpComm.A2A, phase) == moved


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_computes_as_much_whatever_ranks_of_cp_exchange(cp: int) -> None:
    job = make(cp=cp)
    settings = [Megatron(cp_comm_type=kind) for kind in CpComm if kind is not CpComm.A2A_P2P]
    settings += [NEIGHBOURS] if cp == 4 else []
    by_kind = {
        each.cp_comm_type: sum(
            op.op.flops
            for op in computes(workload(job, each), 0)
            if isinstance(op.op, Attention)
        )
        for each in settings
    }
    assert len(set(by_kind.values())) == 1, by_kind
    ops = (op.op for op in computes(workload(make(), Megatron()), 0))
    alone = sum(op.flops for op in ops if isinstance(op, Attention))
    assert by_kind[CpComm.A2A] * cp == alone


@pytest.mark.parametrize("model", [DENSE, LATENT], ids=["dense", "latent"])
@pytest.mark.parametrize("tp", [1, 2])
def test_neighbours_exchange_heads_and_rings_pass_keys(model: ModelConfig, tp: int) -> None:
    """Ranks 0 and tp are neighbours; the ring has every second one of cp."""
    program = workload(
        make(model, microbatches=1, tp=tp, cp=4), replace(NEIGHBOURS, sequence_parallel=True)
    )
    assert program.groups["cp_a2a"].digits == ((2, tp),)
    assert program.groups["cp_p2p"].digits == ((2, 2 * tp),)
    tokens = 2 * model.seq_len // 4
    heads, kv_heads = model.num_heads // tp, model.num_kv_heads // tp
    q, v = tokens * heads * model.d_qk, tokens * heads * model.d_v
    kv = [tokens * kv_heads * model.d_qk, tokens * kv_heads * model.d_v]
    sent: dict[tuple[str, Phase], Counter[int]] = {}
    for op in comms(program, 0, "attention.core"):
        if op.collective != RECV:
            size = op.count * (2 if op.group == "cp_a2a" else 1)
            sent.setdefault((op.group, op.phase), Counter())[size] += 1
    layers = model.num_layers
    ring = sum(kv)
    expected = {
        ("cp_a2a", Phase.FWD): [q, *kv, v],
        ("cp_a2a", Phase.BWD): [v, v, q, *kv],
        ("cp_p2p", Phase.FWD): [ring],
        ("cp_p2p", Phase.BWD): [ring, ring],
    }
    assert sent == {key: Counter(sizes * layers) for key, sizes in expected.items()}
    cores = [op.op for op in computes(program, 0) if isinstance(op.op, Attention)]
    assert {(op.seq_q, op.seq_kv, op.heads) for op in cores} == {(32, 16, heads // 2)}


@pytest.mark.parametrize("model", [SLIDING, SINKS, OWN_HEADS], ids=["window", "sinks", "heads"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_cp_attend_to_windows_by_heads(model: ModelConfig, tp: int) -> None:
    """As much as one rank, and each layer exchanges its own heads."""
    settings = Megatron(cp_comm_type=CpComm.A2A, sequence_parallel=True)
    sizes = {"tp": tp, "cp": 2}
    by_heads = workload(make(model, **sizes), settings)

    def shapes(program: Workload) -> Counter[tuple[object, ...]]:
        cores = (op.op for op in computes(program, 0) if isinstance(op.op, Attention))
        return Counter((op.window, op.phase, op.seq_q, op.head_dim_qk) for op in cores)

    alone = workload(make(model, tp=tp), settings)
    assert shapes(by_heads) == shapes(alone)
    flops = [
        sum(op.op.flops for op in computes(each, 0) if isinstance(op.op, Attention))
        for each in (by_heads, alone)
    ]
    assert 2 * flops[0] == flops[1]
    sent = Counter(
        op.count
        for op in comms(by_heads, 0, "attention.core")
        if op.collective == Collective.ALL_TO_ALL and op.phase is Phase.FWD
    )
    tokens = model.seq_len  # of two sequences, each on two ranks
    expected: Counter[int] = Counter()
    for layer in model.layers:
        own = model.of_layer(layer)
        for heads in (own.num_heads, own.num_kv_heads, own.num_kv_heads, own.num_heads):
            expected[tokens * heads // tp * own.head_dim // 2] += 2  # micro-batches
    assert sent == expected
    gathered = [op for op in comms(by_heads, 0) if op.collective == "all_gather"]
    of_sinks = [op for op in gathered if op.module == "attention.core"]
    assert len(of_sinks) == (2 * model.num_layers if model.has_sinks else 0)
    assert {op.count * 2 for op in of_sinks} <= {model.num_heads // tp}
    assert {str(op.dtype) for op in of_sinks} <= {"fp32"}


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_gather_keys_have_the_pairs_of_windows(cp: int) -> None:
    """To half a key for each query: windows of 16 in sequences of 64 have 14 keys."""
    gathered = workload(make(SLIDING, cp=cp), Megatron(cp_comm_type=CpComm.ALL_GATHER))
    cores = [op.op for op in computes(gathered, 0) if isinstance(op.op, Attention)]
    assert {(op.seq_q, op.seq_kv) for op in cores} == {(64 // cp, 14), (64 // cp, 32)}
    alone = workload(make(SLIDING), Megatron())
    flops = sum(op.op.flops for op in computes(alone, 0) if isinstance(op.op, Attention))
    assert cp * sum(op.flops for op in cores) == flops


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_file_is_the_same_for_any_number_of_microbatches(chunks: int) -> None:
    from stepmark.step import native

    def size(microbatches: int) -> int:
        job = make(BIASED, mbs=1, microbatches=microbatches, pp=2)
        settings = Megatron(virtual_pipeline_model_parallel_size=chunks)
        return len(native.encode(workload(job, settings)))

    sizes = [size(number) for number in (2048, 4096, 8192)]
    assert len(set(sizes)) == 1
    assert 0 <= sizes[0] - size(512) < 64  # digits of the numbers themselves


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 4)])
def test_the_file_grows_with_neither_world_nor_layers(tp: int, pp: int) -> None:
    def operations(layers: int, dp: int) -> int:
        job = make(replace(DENSE, num_layers=layers), tp=tp, pp=pp, dp_shard=dp)
        program = workload(job, replace(SP, use_distributed_optimizer=True))
        return sum(len(block) for block in program.blocks.values())

    assert operations(8, 2) == operations(32, 2) == operations(8, 1024)


def test_stages_hold_all_layers_once() -> None:
    job = make(microbatches=4, pp=4)
    program = workload(job, Megatron(virtual_pipeline_model_parallel_size=2))
    assert sorted(layer for one in program.stages for layer in one.layers) == list(range(8))
    assert [one.has_embedding for one in program.stages] == [True, False, False, False]
    assert [one.has_head for one in program.stages] == [False, False, False, True]
    for before, after in pairwise(program.stages):
        assert before.layers[0] < after.layers[0]


def test_only_named_streams_are_used() -> None:
    program = workload(
        make(tp=2, cp=2, dp_shard=2, pp=2),
        Megatron(
            sequence_parallel=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
    )
    streams = {op.stream for stage in (0, 1) for op in program.expand(stage)}
    assert streams == {COMPUTE, "tp", "cp", "dp"}


@pytest.mark.parametrize(("elements", "sent"), [(12, 12), (13, 16), (1, 4)])
def test_uneven_parts_are_rounded_up(elements: int, sent: int) -> None:
    """An average part that is no whole number loses nothing."""
    plan: Any = SimpleNamespace(
        size=lambda _group: 4, inside=lambda _kind, count, *_rest: count
    )
    kind = Collective.ALL_TO_ALL_V
    assert exchange(plan, kind, elements, "ep", "moe", Phase.FWD) == sent


@pytest.mark.parametrize("model", PATTERNS)
def test_every_gradient_of_a_pattern_is_reduced_once(model: ModelConfig) -> None:
    """Biases of experts, sinks and states of scans included."""
    program = workload(make(model, dp_shard=2), Megatron())
    reduced = sum(op.count for op in comms(program, 0, "gradients"))
    assert reduced == model.num_params


def test_rows_of_latent_experts_have_their_width() -> None:
    job = make(HYBRID, dp_shard=2, ep=2)
    assert HYBRID.moe
    rows = job.tokens * HYBRID.moe.top_k
    widths = {
        2 * op.count / rows  # a rank's part of two
        for op in comms(workload(job, Megatron()), 0, "mlp.dispatch")
        if op.collective == Collective.ALL_TO_ALL_V
    }
    assert HYBRID.moe.latent_size in widths
    assert HYBRID.hidden_size not in widths
