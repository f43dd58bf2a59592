"""DeepEP's two hops between experts' ranks: rows, bytes, order, and times of published ones."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.ranks_pool import Pool

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.device import find_device_by_alias
from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.network_options import NetworkChoice
from stepmark.model.ops import Phase
from stepmark.model.routing import Routing
from stepmark.model.systems import network_of
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import COMPUTE, CommOp, Kernel, Workload
from stepmark.workloads.rules.megatron.deepep import ACROSS_HOSTS, IN_HOST, Hops, hops_of
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import (
    DispatchDtype,
    Dispatcher,
    FlexBackend,
    Granularity,
)

from .hops_on_ranks import two_hops
from .jobs import (
    DENSE,
    EXPERTS,
    LATENT,
    bus_bytes,
    comms,
    computes,
    ideal_costs,
    make,
    matmul_flops,
)

FLEX: dict[str, Any] = {"moe_token_dispatcher_type": Dispatcher.FLEX, "sequence_parallel": True}
TWO: dict[str, Any] = {**FLEX, "moe_deepep_gpus_per_host": 2}
PLAIN: dict[str, Any] = {"sequence_parallel": True}
# Rows of a multiple of 256, as DeepEP's kernels across hosts want.
MODEL = replace(EXPERTS, hidden_size=256)
assert EXPERTS.moe is not None
GROUPED = replace(MODEL, moe=replace(EXPERTS.moe, num_groups=4, top_groups=1))
V3 = MoeConfig(num_experts=256, top_k=8, ffn_hidden_size=2048, num_groups=8, top_groups=4)


def hops_for(moe: MoeConfig, ep: int, *, etp: int = 1, gpus: int = 8) -> Hops:
    settings = Megatron(
        moe_token_dispatcher_type=Dispatcher.FLEX, moe_deepep_gpus_per_host=gpus
    )
    hops = hops_of(moe, settings, ep=ep, etp=etp, imbalance=1.0)
    assert hops is not None
    return hops


# Rows


@pytest.mark.parametrize(
    "routing",
    [
        Routing(num_experts=16, top_k=2),
        Routing(num_experts=32, top_k=4, num_groups=4, top_groups=2),
    ],
    ids=["free", "groups"],
)
def test_routed_tokens_reach_their_experts_and_as_many_ranks_as_the_rule_says(
    routing: Routing,
) -> None:
    """On four ranks of two hosts: real messages, whose results come back summed."""
    num_tokens = 2000
    with Pool(4) as pool:
        results = pool.run(two_hops, routing, 2, num_tokens, timeout_s=120)
    moe = MoeConfig(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        ffn_hidden_size=16,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
    )
    hops = hops_for(moe, 4, gpus=2)
    rows = hops.rows(num_tokens)
    to_hosts, to_gpus, received, are_right, are_summed = zip(*results, strict=True)
    assert all(are_right)
    assert all(are_summed)
    # Four standard errors of as many tokens, of which each goes or does not.
    for counts, expected, tokens in (
        (to_hosts, rows[ACROSS_HOSTS], num_tokens),
        (to_gpus, rows[IN_HOST], 2 * num_tokens),
    ):
        mean = statistics.mean(count for own in counts for count in own)
        share = expected / tokens
        error = 4 * tokens * math.sqrt(share * (1 - share) / (4 * tokens))
        assert mean == pytest.approx(expected, abs=error + 0.003 * expected)
    assert statistics.mean(received) == pytest.approx(hops.received(num_tokens), rel=0.02)


@pytest.mark.parametrize(("ep", "etp", "gpus"), [(16, 1, 8), (8, 2, 8), (4, 4, 2), (64, 1, 8)])
def test_a_hop_sends_on_what_came(ep: int, etp: int, gpus: int) -> None:
    """All ranks of a host together receive the rows of all tokens with an expert there.

    Each is sent on to at least one GPU and to all at most.
    """
    hops = hops_for(V3, ep, etp=etp, gpus=gpus)
    assert hops.num_ranks == ep * etp
    rows = hops.rows(1024)
    came = hops.num_hosts * rows[ACROSS_HOSTS]
    sent_on = hops.gpus_per_host * rows[IN_HOST]
    assert came <= sent_on <= came * hops.gpus_per_host
    assert hops.received(1024) == math.ceil(sent_on - 1e-9)
    # No more than a row for each choice, and for each rank of the experts' tp.
    assert sent_on <= 1024 * V3.top_k * etp


def test_tensor_parallel_ranks_of_an_expert_get_the_same_tokens() -> None:
    alone = hops_for(V3, 16)
    both = hops_for(V3, 16, etp=2)
    assert both.rank_share == alone.rank_share
    # Eight ranks of a host have the experts of four ranks of ep.
    routing = Routing(num_experts=256, top_k=8, num_groups=8, top_groups=4)
    assert both.host_share == routing.share(4)
    assert alone.host_share == routing.share(2)
    assert both.chosen == 2 * alone.chosen


# Bytes


def test_a_row_has_what_deepep_puts_into_it() -> None:
    """internode.cu, get_num_bytes_per_token: in multiples of 16 bytes."""
    across = hops_for(V3, 64)
    # 7168 in fp8, 56 scales, 8 indices and 8 probabilities of 4 bytes, and 8 of its sender.
    assert across.row_bytes(7168, scales=56, indices=8, weights=8) == 7168 + 224 + 64 + 8 + 8
    assert across.row_bytes(2 * 7168) == 14336 + 8 + 8
    inside = hops_for(V3, 8)
    assert inside.row_bytes(2 * 7168, indices=8, weights=8) == 14336 + 4 + 8 * (8 + 4)
    assert across.counts() == {ACROSS_HOSTS: 8 + 32 + 1, IN_HOST: 8 + 4}
    assert inside.counts() == {IN_HOST: 1 + 32}


def sizes(program: Workload) -> dict[tuple[str, str, str], set[int]]:
    """Bytes that a rank sends to one other, by module, pass and group."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for op in comms(program, 0, "mlp.dispatch", "mlp.combine"):
        if op.collective == Collective.ALL_TO_ALL_V:
            found.setdefault((op.module, str(op.phase), op.group), set()).add(op.count)
    return found


@pytest.mark.parametrize("dtype", list(DispatchDtype))
def test_messages_are_rows_times_their_bytes(dtype: DispatchDtype) -> None:
    job = make(MODEL, dp_shard=4, ep=4)
    program = workload(job, Megatron(**TWO, dispatch_dtype=dtype))
    program.check()
    moe = MODEL.moe
    assert moe is not None
    hops = hops_for(moe, 4, gpus=2)
    is_fp8 = dtype is DispatchDtype.FP8
    sent = 256 + 4 * 2 if is_fp8 else 512  # a scale for 128 elements
    rows = {
        ("mlp.dispatch", "fwd"): sent + 8 + 2 * (4 + 4),
        ("mlp.dispatch", "bwd"): 512 + 8 + 2 * 4,
        ("mlp.combine", "fwd"): 512 + 8,
        ("mlp.combine", "bwd"): sent + 8,
    }
    expected = {
        (*key, group): {math.ceil(count * (math.ceil(size / 16) * 16))}
        for key, size in rows.items()
        for group, count in hops.rows(job.tokens).items()
    }
    assert sizes(program) == expected
    casts = Counter(
        (op.op.name, str(op.phase))
        for op in computes(program, 0)
        if isinstance(op.op, Kernel) and op.module in ("mlp.dispatch", "mlp.combine")
    )
    layers = 5 * job.num_microbatches
    names = ("quantize", "dequantize")
    assert {casts[name, phase] for name in names for phase in ("fwd", "bwd")} == {
        layers if is_fp8 else 0
    }


def test_a_token_goes_over_the_network_once_and_not_for_each_expert() -> None:
    job = make(replace(MODEL, moe=replace(V3, ffn_hidden_size=32)), dp_shard=64, ep=64)
    plain = bus_bytes(workload(job, Megatron()), "ep")
    flex = workload(job, Megatron(moe_token_dispatcher_type=Dispatcher.FLEX))
    two = bus_bytes(flex, ACROSS_HOSTS, IN_HOST)
    # Of 8 hosts 3.95 instead of 8 experts, but for what rows have besides.
    across = two[ACROSS_HOSTS, True] / plain["ep", True]
    of_hosts = 3.952 / 8 * (7 / 8) / (63 / 64)
    assert across == pytest.approx(of_hosts * (544 + 592) / 1040, rel=0.03)
    assert matmul_flops(flex) == matmul_flops(workload(job, Megatron()))


def test_one_host_has_one_hop() -> None:
    program = workload(make(MODEL, dp_shard=4, ep=4), Megatron(**FLEX))
    assert ACROSS_HOSTS not in program.groups
    assert program.groups[IN_HOST].size == 4
    streams = {op.stream for op in comms(program, 0, "mlp.dispatch", "mlp.combine")}
    assert streams == {COMPUTE}


# Order


def test_groups_are_ranks_of_a_host_and_those_of_one_place() -> None:
    program = workload(make(MODEL, dp_shard=8, ep=4), Megatron(**TWO))
    assert program.groups[IN_HOST].members(5) == (4, 5)
    assert program.groups[ACROSS_HOSTS].members(5) == (5, 7)


def test_hops_run_side_by_side_and_what_follows_waits_for_both() -> None:
    job = make(MODEL, dp_shard=4, ep=4)
    program = workload(job, Megatron(**TWO))
    ops = [*program.expand(0)]
    for index, op in enumerate(ops):
        if isinstance(op, CommOp) and op.group == IN_HOST and op.stream != COMPUTE:
            pair = (ops[index - 1], op, ops[index + 1])
            others = [each for each in pair if isinstance(each, CommOp) and each is not op]
            assert [each.group for each in others] == [ACROSS_HOSTS]
    waits = [op for op in ops if not isinstance(op, CommOp) and op.is_wait]
    hops = {f"mlp.dispatch.{name}" for name in (ACROSS_HOSTS, IN_HOST)}
    assert any(hops <= set(op.after) for op in waits)

    def comm_s(op: CommOp, _group: object) -> float:
        if op.module not in ("mlp.dispatch", "mlp.combine") or op.stream == COMPUTE:
            return 0.0
        return {ACROSS_HOSTS: 3.0, IN_HOST: 2.0}[op.group]

    costs = replace(ideal_costs(math.inf, math.inf), comm=comm_s)
    # Both modules, in both passes, of five layers and two micro-batches: the slower hop.
    assert simulate(program, costs).step_s == pytest.approx(3.0 * 2 * 2 * 5 * 2)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dispatch_dtype": DispatchDtype.FP8},
        {"recompute_granularity": Granularity.FULL},
        {"recompute_granularity": Granularity.SELECTIVE, "recompute_modules": "moe"},
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    ],
)
def test_techniques_do_the_same_work_with_flex(pp: int, etp: int, more: dict[str, Any]) -> None:
    in_turns = "overlap_moe_expert_parallel_comm" in more
    chunks = {"virtual_pipeline_model_parallel_size": 2} if pp > 1 and in_turns else {}
    job = make(replace(LATENT, hidden_size=256), tp=2, dp_shard=4, ep=4, pp=pp, microbatches=4)
    settings = {**TWO, "expert_tensor_parallel_size": etp, **chunks}
    plain = workload(job, Megatron(**settings))
    program = workload(job, Megatron(**settings, **more))
    program.check()
    flops = matmul_flops(program)
    again = flops.pop(Phase.STEP, 0)
    assert flops == matmul_flops(plain)
    assert bool(again) == ("recompute_granularity" in more)
    if in_turns:
        assert bus_bytes(program, ACROSS_HOSTS, IN_HOST) == bus_bytes(
            plain, ACROSS_HOSTS, IN_HOST
        )
        costs = ideal_costs(1e12, 1e9)
        assert simulate(program, costs).step_s < simulate(plain, costs).step_s


# Published


@pytest.mark.parametrize(
    ("num_ranks", "dispatch", "combine", "most"),
    [(8, 153, 158, 0.05), (16, 43, 43, 0.25), (32, 58, 57, 0.1), (64, 51, 50, 0.1)],
)
def test_bandwidths_are_near_those_of_deepep(
    num_ranks: int, dispatch: int, combine: int, most: float
) -> None:
    """DeepEP's table of normal kernels on H800 with 400G a GPU (docs/legacy.md, Performance).

    4096 tokens of width 7168, dispatched in fp8 and combined in bf16; rows of the own host
    count. 16 ranks are a fifth slower than by the links.
    """
    device = find_device_by_alias("h800-sxm")
    assert device is not None
    links = NetworkChoice(network="h800-8x400g") if num_ranks > 8 else NetworkChoice()
    network = network_of(device, num_ranks, links)
    assert network is not None
    hops = hops_for(V3, num_ranks)
    for published, elements, more in (
        (dispatch, 7168, {"scales": 56, "indices": 8, "weights": 8}),
        (combine, 2 * 7168, {}),
    ):
        row = hops.row_bytes(elements, **more)
        times = []
        for group, count in hops.rows(4096).items():
            is_network = group == ACROSS_HOSTS
            members = range(0, num_ranks, 8) if is_network else range(min(8, num_ranks))
            placement = network.placement(members)
            size = count * row * len(members)
            times.append(network.time_s(Collective.ALL_TO_ALL_V, size, placement))
        group, count = next(iter(hops.rows(4096).items()))
        reached = hops.num_hosts if group == ACROSS_HOSTS else hops.num_ranks
        num_bytes = reached * count * (elements + 4 * more.get("scales", 0))
        assert num_bytes / max(times) / 1e9 == pytest.approx(published, rel=most)


# Refusals

REFUSED: list[tuple[ModelConfig, dict[str, int], dict[str, Any], str]] = [
    (DENSE, {"dp_shard": 4}, {}, "moe_token_dispatcher_type flex.*alltoall.*without experts"),
    (MODEL, {}, {}, "ep 1 .*above 1"),
    (
        MODEL,
        {"dp_shard": 8, "ep": 8},
        {"moe_flex_dispatcher_backend": FlexBackend.HYBRIDEP},
        "moe_flex_dispatcher_backend hybridep.*deepep",
    ),
    (
        MODEL,
        {"dp_shard": 8, "ep": 8},
        {"moe_expert_capacity_factor": 1.5},
        "moe_expert_capacity_factor 1.5.*left out.*dropped",
    ),
    (
        replace(MODEL, moe=replace(V3, num_experts=240)),
        {"dp_shard": 40, "ep": 40},
        {},
        "ep 40.*one of 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160",
    ),
    (
        EXPERTS,
        {"dp_shard": 16, "ep": 8, "tp": 1},
        {"moe_deepep_gpus_per_host": 4},
        "hidden-size 64.*256",
    ),
    (
        replace(MODEL, hidden_size=8192),
        {"dp_shard": 4, "ep": 4},
        {"moe_deepep_gpus_per_host": 2},
        "hidden-size 8192.*shared memory",
    ),
    (
        replace(MODEL, moe=replace(V3, num_experts=64, num_groups=1, top_groups=1, top_k=33)),
        {"dp_shard": 8, "ep": 8},
        {},
        "top-k 33.*at most 32",
    ),
    (
        replace(MODEL, moe=replace(V3, top_k=2, top_groups=4)),
        {"dp_shard": 8, "ep": 8},
        {},
        "top-groups 4.*at most top-k",
    ),
    (
        replace(MODEL, moe=replace(V3, num_experts=16, num_groups=8, top_groups=2)),
        {"dp_shard": 8, "ep": 8},
        {},
        r"top-k 8.*groups of a token \(4\)",
    ),
    (
        replace(MODEL, hidden_size=208, num_heads=2, num_kv_heads=2),
        {"dp_shard": 4, "ep": 4},
        {"dispatch_dtype": DispatchDtype.FP8},
        "dispatch_dtype fp8.*128",
    ),
    (
        MODEL,
        {"dp_shard": 8, "ep": 8},
        {"moe_shared_expert_overlap": True},
        "moe_shared_expert_overlap.*alltoall",
    ),
]


@pytest.mark.parametrize(("model", "mesh", "more", "words"), REFUSED)
def test_what_megatron_and_deepep_refuse(
    model: ModelConfig, mesh: dict[str, int], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(model, **mesh), Megatron(**{**FLEX, **more}))


def test_sums_are_in_bf16() -> None:
    job = replace(make(MODEL, dp_shard=4, ep=4), dtype=DType.FP16)
    with pytest.raises(ConfigError, match=r"dtype fp16.*bf16"):
        workload(job, Megatron(**FLEX))


def test_a_host_has_two_four_or_eight_gpus() -> None:
    with pytest.raises(ConfigError, match=r"moe_deepep_gpus_per_host 3.*2, 4 or 8"):
        Megatron(moe_deepep_gpus_per_host=3)


@pytest.mark.parametrize("model", [MODEL, GROUPED])
def test_notes_say_how_many_hosts_a_token_reaches(model: ModelConfig) -> None:
    program = workload(make(model, dp_shard=4, ep=4), Megatron(**TWO))
    (note,) = (note for note in program.notes if "in the mean" in note)
    reached = 1.0 if model is GROUPED else 2 * (1 - math.comb(4, 2) / math.comb(8, 2))
    assert f"a token goes to {reached:.4g} of 2 hosts" in note
    assert any("NUM_MAX_NVL_PEERS" in note for note in program.notes)
