"""Architectures of one's own under DeepSpeed: those of transformers, written down by hand."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.workloads.rules.deepspeed.recorded import MODELS

from stepmark.model.collectives import Collective
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig
from stepmark.step.workload import CommOp
from stepmark.workloads.architecture import Architecture, Batch, OwnJob, module, unit
from stepmark.workloads.job import Job
from stepmark.workloads.rules.deepspeed.rule import workload
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed

EXAMPLE = Path(__file__).parents[4] / "examples" / "llama_workload.py"
BATCH = Batch(mbs=2, seq_len=16)
SPREAD: dict[str, Any] = {"parallel": ParallelConfig(dp_shard=4), "gbs": 24, "mbs": 2}
SETTINGS = (
    DeepSpeed(stage=0),
    DeepSpeed(stage=1, reduce_bucket_size=9_000),
    DeepSpeed(stage=2, reduce_bucket_size=9_000, use_multi_rank_bucket_allreduce=False),
    DeepSpeed(stage=3),
    DeepSpeed(
        stage=3,
        reduce_bucket_size=9_000,
        stage3_prefetch_bucket_size=5_000,
        stage3_param_persistence_threshold=64,
        stage3_max_reuse_distance=10_000,
    ),
)


def example() -> Any:
    made = importlib.util.spec_from_file_location("llama_workload", EXAMPLE)
    assert made
    assert made.loader
    found = importlib.util.module_from_spec(made)
    made.loader.exec_module(found)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_llama_of_the_example_is_the_built_in_one(settings: DeepSpeed) -> None:
    own = example().llama(BATCH, name="llama", layers=3, hidden=64, ffn=224, heads=4, vocab=515)
    built_in = ModelConfig(
        name="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_hidden_size=224,
        vocab_size=515,
        seq_len=16,
    )
    mine = workload(OwnJob(architecture=own, seq_len=16, **SPREAD), settings)
    theirs = workload(Job(model=built_in, **SPREAD), settings)
    assert mine.blocks == theirs.blocks
    assert mine.stages == theirs.stages
    assert mine.groups == theirs.groups


def test_the_example_has_the_parameters_of_llama_2_7b() -> None:
    assert example().llama_7b(BATCH).num_params == 6_738_415_616


def qwen2(batch: Batch) -> Architecture:
    """Biases of q, k and v, fewer key and value heads, a tied table."""
    attention = module(
        "attention",
        batch.linear("attention.q", 64, 64, bias=True),
        batch.linear("attention.k", 32, 64, bias=True),
        batch.linear("attention.v", 32, 64, bias=True),
        batch.rope("attention.rope", 4, 2, 16),
        batch.attention("attention.core", 4, 16, kv_heads=2),
        batch.linear("attention.out", 64, 64),
    )
    layer = unit(
        "layers",
        batch.norm("attention.norm", 64, kind="rmsnorm"),
        attention,
        batch.add("attention.residual", 64),
        batch.norm("mlp.norm", 64, kind="rmsnorm"),
        example().mlp(batch, 64, 224),
        batch.add("mlp.residual", 64),
        times=3,
        registered=("attention", "mlp", "attention.norm", "mlp.norm"),
        within="model",
    )
    table = batch.embedding("embedding", 515, 64)
    first = unit("embed", table, module("rotary", in_backward=False), within="model")
    norm = unit("norm", batch.norm("head.norm", 64, kind="rmsnorm"), within="model")
    tied = batch.linear("head", 515, 64, tied="embedding.weight")
    head = unit("head", tied, batch.loss("loss", 515))
    return Architecture(name="qwen2", units=(first, layer, norm, head))


@pytest.mark.parametrize("settings", [*SETTINGS, DeepSpeed(stage=3, zero_init=True)])
def test_biases_and_a_tied_table_are_as_in_the_built_in_one(settings: DeepSpeed) -> None:
    mine = workload(OwnJob(architecture=qwen2(BATCH), seq_len=16, **SPREAD), settings)
    theirs = workload(Job(model=MODELS["qwen2-tied"], **SPREAD), settings)
    assert mine.blocks == theirs.blocks


@pytest.mark.parametrize("stage", [2, 3])
def test_a_tied_table_is_reduced_once_and_gathered_for_both_its_users(stage: int) -> None:
    table = unit("embed", BATCH.embedding("table", 512, 64))
    block = unit("layers", BATCH.linear("mlp", 64, 64, bias=True), times=2)
    tied = unit("head", BATCH.linear("head", 512, 64, tied="table.weight"))
    made = Architecture(name="tied", units=(table, block, tied))
    settings = DeepSpeed(
        stage=stage,
        stage3_param_persistence_threshold=0,
        stage3_prefetch_bucket_size=0,
        stage3_max_reuse_distance=0,
    )
    job = OwnJob(architecture=made, seq_len=16, **{**SPREAD, "gbs": 8})
    found = workload(job, settings)
    comms = [op for op in found.expand() if isinstance(op, CommOp)]
    group = found.groups["dp"]

    def elements(collective: Collective, phase: str) -> int:
        return sum(
            op.message_bytes(group) // op.dtype.itemsize
            for op in comms
            if op.collective == collective and op.phase == phase
        )

    assert made.num_params == 512 * 64 + 2 * (64 * 64 + 64)
    if stage == 2:
        assert elements(Collective.ALL_REDUCE, "bwd") == made.num_params
        return
    assert elements(Collective.REDUCE_SCATTER, "bwd") == made.num_params
    # For the lookup and for the head, in either pass: nothing is kept in between.
    assert elements(Collective.ALL_GATHER, "fwd") == made.num_params + 512 * 64
    assert elements(Collective.ALL_GATHER, "bwd") == made.num_params + 512 * 64
