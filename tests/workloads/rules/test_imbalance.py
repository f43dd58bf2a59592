"""Experts of a fullest rank: as many rows more, and as much more of what depends on rows."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.ops import GroupedGemm, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.step_memory import workload_memory
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.settings import Dispatcher

MODEL = ModelConfig(
    name="small",
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    ffn_hidden_size=512,
    vocab_size=512,
    seq_len=64,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=64),
)
FLEX: dict[str, Any] = {"moe_token_dispatcher_type": Dispatcher.FLEX}
HOPS: dict[str, Any] = {**FLEX, "moe_deepep_gpus_per_host": 2}
GATHERED: dict[str, Any] = {"moe_token_dispatcher_type": Dispatcher.ALLGATHER}
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("megatron", {"dp_shard": 4}, {}),
    ("megatron", {"dp_shard": 4, "tp": 2}, {"sequence_parallel": True}),
    ("megatron", {"dp_shard": 4}, FLEX),
    ("megatron", {"dp_shard": 4}, HOPS),
    ("megatron", {"dp_shard": 4}, GATHERED),
    ("pytorch", {"dp_shard": 4}, {}),
    ("pytorch", {"dp_shard": 4, "pp": 2}, {}),
    ("fsdp", {"dp_shard": 4}, {}),
]
EXCHANGES = ("ep", "ep_intranode", "ep_internode")


def job_of(mesh: dict[str, int], imbalance: float, **more: Any) -> Job:
    parallel = ParallelConfig(ep=4, **mesh)
    gbs = 4 * parallel.data_ranks
    return Job(model=MODEL, parallel=parallel, gbs=gbs, imbalance=imbalance, **more)


def made(
    framework: str, mesh: dict[str, int], settings: dict[str, Any], imbalance: float
) -> Workload:
    rule = RULES[framework]
    job = job_of(mesh, imbalance)
    program = rule.workload(job, rule.resolved(rule.make(**settings), job.parallel))
    program.check()
    return program


def flops(program: Workload) -> Counter[bool]:
    """FLOPs of one rank of each stage, of experts or not."""
    found: Counter[bool] = Counter()
    for stage in range(len(program.stages)):
        for op in program.expand(stage):
            if isinstance(op, ComputeOp) and not isinstance(op.op, Kernel):
                found[isinstance(op.op, GroupedGemm)] += op.op.flops
    return found


def exchanged(program: Workload) -> Counter[str]:
    """Bytes of rows that are exchanged by group."""
    found: Counter[str] = Counter()
    for stage in range(len(program.stages)):
        for op in program.expand(stage):
            if isinstance(op, CommOp) and op.collective == "all_to_all_v":
                found[op.group] += op.message_bytes(program.groups[op.group])
    return found


@pytest.mark.parametrize(("framework", "mesh", "settings"), CASES)
def test_the_fullest_rank_computes_and_exchanges_as_many_rows_more(
    framework: str, mesh: dict[str, int], settings: dict[str, Any]
) -> None:
    even = made(framework, mesh, settings, 1.0)
    full = made(framework, mesh, settings, 1.5)
    before, after = flops(even), flops(full)
    assert after[False] == before[False]
    assert after[True] == pytest.approx(1.5 * before[True], rel=1e-3)
    # All tokens reach a host and a rank at most.
    sizes = exchanged(even)
    for group, size in exchanged(full).items():
        most = 1.5 if group == "ep" else 1.5 + 1e-3
        assert 1 < size / sizes[group] <= most + 1e-3
        if group == "ep":
            assert size == pytest.approx(1.5 * sizes[group], rel=1e-3)
    others = {
        op
        for op in full.issued()
        if isinstance(op, CommOp) and op.group not in EXCHANGES and "mlp." not in op.module
    }
    assert others == {
        op
        for op in even.issued()
        if isinstance(op, CommOp) and op.group not in EXCHANGES and "mlp." not in op.module
    }


@pytest.mark.parametrize(("framework", "mesh", "settings"), CASES)
def test_memory_grows_with_the_rows(
    framework: str, mesh: dict[str, int], settings: dict[str, Any]
) -> None:
    sizes = [
        workload_memory.memory_of(made(framework, mesh, settings, imbalance))[0]
        for imbalance in (1.0, 1.25, 1.5, 2.0)
    ]
    activations = [each.activations_bytes for each in sizes]
    assert activations == sorted(set(activations))
    first, *_, last = sizes
    assert first.weights_bytes == last.weights_bytes
    assert first.optimizer_bytes == last.optimizer_bytes
    # Linear in the rows.
    steps = [activations[1] - activations[0], activations[2] - activations[1]]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)


@pytest.mark.parametrize(("framework", "mesh", "settings"), CASES)
def test_balance_is_what_a_job_has_without_a_word(
    framework: str, mesh: dict[str, int], settings: dict[str, Any]
) -> None:
    even = made(framework, mesh, settings, 1.0)
    plain = Job(
        model=MODEL,
        parallel=ParallelConfig(ep=4, **mesh),
        gbs=4 * ParallelConfig(ep=4, **mesh).data_ranks,
    )
    rule = RULES[framework]
    assert even == rule.workload(plain, rule.resolved(rule.make(**settings), plain.parallel))
    assert "imbalance" not in even.settings
    assert not any("mean rows" in note for note in even.notes)


@pytest.mark.parametrize(("framework", "mesh", "settings"), CASES)
def test_a_file_keeps_the_imbalance(
    framework: str, mesh: dict[str, int], settings: dict[str, Any]
) -> None:
    full = made(framework, mesh, settings, 1.5)
    assert full.settings["imbalance"] == 1.5
    assert any("get 1.5 x the mean rows" in note for note in full.notes)
    known = RULES[framework].job_of(full)
    assert known is not None
    assert known[0].imbalance == 1.5


def test_rows_before_a_dispatch_are_a_ranks_own() -> None:
    """Only what other ranks send is more: the sender has as many tokens as before."""

    def permuted(program: Workload) -> Counter[str]:
        return Counter(
            {
                op.op.name: op.op.bytes_moved
                for op in program.issued()
                if isinstance(op, ComputeOp)
                and isinstance(op.op, Kernel)
                and op.module == "mlp.dispatch"
                and op.phase is Phase.FWD
                and op.op.bytes_moved
            }
        )

    even, full = (
        permuted(made("megatron", {"dp_shard": 4}, {}, imbalance)) for imbalance in (1.0, 1.5)
    )
    assert full["permute"] == even["permute"]
    assert full["sort_chunks"] == 1.5 * even["sort_chunks"]


def test_a_capacity_bounds_the_fullest_rank() -> None:
    def rows(capacity: float | None, imbalance: float) -> int:
        settings = {} if capacity is None else {"moe_expert_capacity_factor": capacity}
        program = made("megatron", {"dp_shard": 4}, settings, imbalance)
        (tokens,) = {
            op.op.tokens
            for op in program.issued()
            if isinstance(op, ComputeOp) and isinstance(op.op, GroupedGemm)
        }
        return int(tokens)

    even = rows(None, 1.0)
    assert even == MODEL.seq_len * 2
    assert rows(1.25, 1.0) == even
    assert rows(1.25, 1.5) == 1.25 * even
    assert rows(2.0, 1.5) == rows(None, 1.5) == 1.5 * even


REFUSED: list[tuple[str, dict[str, Any], dict[str, int], float, str]] = [
    ("megatron", {}, {"dp_shard": 4}, 0.5, "imbalance 0.5.*from 1 to 4 with ep 4"),
    ("megatron", {}, {"dp_shard": 4}, 4.5, "imbalance 4.5.*from 1 to 4 with ep 4"),
    ("megatron", {}, {"dp_shard": 4}, float("nan"), "imbalance nan"),
    (
        "megatron",
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"dp_shard": 4},
        1.5,
        "imbalance 1.5.*moe_pad_expert_input_to_capacity",
    ),
]


@pytest.mark.parametrize(("framework", "settings", "mesh", "imbalance", "words"), REFUSED)
def test_an_imbalance_that_cannot_be_is_refused(
    framework: str,
    settings: dict[str, Any],
    mesh: dict[str, int],
    imbalance: float,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        made(framework, mesh, settings, imbalance)


def test_one_rank_with_all_experts_is_never_fuller() -> None:
    with pytest.raises(ConfigError, match=r"imbalance 1.5.*must be 1 with ep 1"):
        Job(model=MODEL, imbalance=1.5)
    dense = replace(MODEL, moe=None)
    with pytest.raises(ConfigError, match=r"imbalance 1.5.*must be 1 for a model without"):
        Job(model=dense, imbalance=1.5)
