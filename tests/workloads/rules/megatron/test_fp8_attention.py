"""FP8 attention under Megatron-LM's settings: casts, reductions, memory, refusals."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import RedOp
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention, Gemm, Phase
from stepmark.step.layout import QUANTIZE
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.workloads.rules.megatron.narrow import Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import AttentionBackend, Granularity

from .jobs import DENSE, EXPERTS, LATENT, SINKS, SLIDING, make

WIDE = replace(DENSE, head_dim=16)  # heads that FP8 attention takes
DELAYED: dict[str, Any] = {"fp8_format": Fp8Format.HYBRID}
TENSORWISE: dict[str, Any] = DELAYED | {"fp8_recipe": Fp8Recipe.TENSORWISE}
DPA: dict[str, Any] = {"fp8_dot_product_attention": True}
RECIPES = pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE])


def step(
    model: ModelConfig = WIDE, mesh: dict[str, int] | None = None, **settings: Any
) -> Workload:
    return workload(make(model, **(mesh or {})), Megatron(**settings))


def core(of: Workload) -> list[ComputeOp]:
    """Return the operations of attention's core in the first layer and micro-batch."""
    ops = (op for op in of.expand() if isinstance(op, ComputeOp))
    own = [op for op in ops if op.module == "attention.core"]
    return [op for op in own if (op.layer, op.microbatch) == (0, 0)]


@RECIPES
def test_only_attention_changes_and_its_flops_do_not(recipe: dict[str, Any]) -> None:
    plain, low = step(**recipe), step(**recipe, **DPA)
    others = [
        [op for op in each.expand() if op.module not in ("attention.core", "amax")]
        for each in (plain, low)
    ]
    assert others[0] == others[1]
    flops = [sum(op.op.flops or 0 for op in core(each)) for each in (plain, low)]
    assert flops[0] == flops[1] > 0
    types = [(op.phase, op.op.dtype) for op in core(low) if isinstance(op.op, Attention)]
    assert types == [(Phase.FWD, DType.FP8_E4M3), (Phase.BWD, DType.FP8_E5M2)]


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        # By element of q, k and v (first) and of the output: joined in bf16, read and cast;
        # with delayed scaling read in fp8 and written in bf16. Backward do is cast; with
        # delayed scaling the gradients of q, k and v are joined in fp8, and cast back.
        (DELAYED, (4 + 2 + 1, 1 + 2), (2 + 1 + 2, 2 + 1)),
        (TENSORWISE, (4 + 2 * 2 + 1, 0), (0, 2 * 2 + 1)),
    ],
)
def test_bytes_of_casts(
    recipe: dict[str, Any], forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """FusedAttnFunc of TransformerEngine's backends.py, line by line."""
    tokens, heads, kv_heads, width = 2 * WIDE.seq_len, 8, 4, 16
    inputs, output = tokens * (heads + 2 * kv_heads) * width, tokens * heads * width
    moved = Counter[Phase]()
    for op in core(step(**recipe, **DPA)):
        if isinstance(op.op, Kernel):
            assert op.op.bytes_moved is not None
            moved[op.phase] += op.op.bytes_moved
    assert moved[Phase.FWD] == forward[0] * inputs + forward[1] * output
    assert moved[Phase.BWD] == backward[0] * inputs + backward[1] * output


def test_multi_head_attention_is_the_same_in_megatron_core() -> None:
    """Its linear layers are called without fp8_output."""
    both = [
        step(**DELAYED, **settings) for settings in (DPA, {"fp8_multi_head_attention": True})
    ]
    assert [*both[0].expand()] == [*both[1].expand()]


def amax(of: Workload, stage: int = 0) -> list[CommOp]:
    ops = (op for op in of.expand(stage) if isinstance(op, CommOp))
    return [op for op in ops if op.module == "amax"]


def test_delayed_scaling_has_the_same_reductions() -> None:
    mesh = {"tp": 2, "dp_shard": 2}
    assert amax(step(mesh=mesh, **DELAYED)) == amax(step(mesh=mesh, **DELAYED, **DPA))


def test_tensorwise_scaling_reduces_maxima_of_probabilities_behind_each_layer() -> None:
    """Each layer has its region of FP8, which reduces the numbers of all layers of the rank.

    S and dP have delayed scaling: a product's 3 numbers forward and 2 backward.
    """
    mesh = {"tp": 2, "pp": 2, "dp_shard": 2}
    assert not amax(step(mesh=mesh, **TENSORWISE))
    for stage in range(2):
        reduced = amax(step(mesh=mesh, **TENSORWISE, **DPA), stage)
        layers, microbatches = WIDE.num_layers // 2, 2
        assert Counter((op.phase, op.count) for op in reduced) == {
            (Phase.FWD, 3 * layers): layers * microbatches,
            (Phase.BWD, 2 * layers): layers * microbatches,
        }
        assert {(op.group, op.redop, op.dtype) for op in reduced} == {
            ("tp_dp_cp", RedOp.MAX, DType.FP32)
        }


def test_layers_in_bf16_have_attention_in_bf16_and_no_reduction() -> None:
    mesh = {"dp_shard": 2}
    low = step(mesh=mesh, **TENSORWISE, **DPA, first_last_layers_bf16=True)
    types: dict[int | None, set[DType]] = {}
    for op in low.expand():
        if isinstance(op, ComputeOp) and isinstance(op.op, Attention):
            types.setdefault(op.layer, set()).add(op.op.dtype)
    wide = {layer for layer, dtypes in types.items() if dtypes == {DType.BF16}}
    assert wide == {0, WIDE.num_layers - 1}
    layers, microbatches = WIDE.num_layers - 2, 2
    counts = Counter((op.phase, op.count) for op in amax(low))
    assert counts[Phase.FWD, 3 * layers] == layers * microbatches


@RECIPES
@pytest.mark.parametrize("tp", [1, 2])
def test_saved_tensors_have_eight_bits(recipe: dict[str, Any], tp: int) -> None:
    """q, k and v in fp8, with delayed scaling the output, too; two statistics per softmax."""
    job = make(WIDE, tp=tp)
    plain, low = (
        stage_memories(job, Megatron(**recipe, **more))[0].activations_bytes
        for more in ({}, DPA)
    )
    tokens, heads, kv_heads, width = 2 * WIDE.seq_len, 8 // tp, 4 // tp, 16
    inputs, output = tokens * (heads + 2 * kv_heads) * width, tokens * heads * width
    dropped = inputs + (output if recipe is DELAYED else 0) - 4 * tokens * heads
    assert plain - low == WIDE.num_layers * dropped


REFUSED = "fp8_dot_product_attention is invalid: it works only with "
FULL = {"recompute_granularity": Granularity.FULL}


@pytest.mark.parametrize(
    ("model", "mesh", "settings", "words"),
    [
        (WIDE, {}, DPA, "fp8_recipe delayed or tensorwise"),
        (WIDE, {}, DPA | DELAYED | {"fp8_recipe": Fp8Recipe.MXFP8}, "delayed or tensorwise"),
        (WIDE, {}, DPA | DELAYED | {"fp8_recipe": Fp8Recipe.BLOCKWISE}, "delayed or tens"),
        (
            WIDE,
            {},
            TENSORWISE | {"fp8_multi_head_attention": True},
            "fp8_multi_head_attention.*delayed",
        ),
        (DENSE, {}, DPA | DELAYED, f"{REFUSED}heads of one width, a multiple of 16 up to 128"),
        (replace(WIDE, head_dim=192), {}, DPA | DELAYED, "up to 128"),
        (LATENT, {"tp": 1}, DPA | DELAYED, "heads of one width"),
        (
            replace(WIDE, pattern=(Layer(window=16), Layer())),
            {},
            DPA | DELAYED,
            "without windows",
        ),
        (replace(SINKS, head_dim=16, pattern=(Layer(),)), {}, DPA | DELAYED, "without sinks"),
        (
            replace(SLIDING, head_dim=16, pattern=(Layer(),), norm_placement="pre"),
            {},
            DPA | DELAYED,
            "without capped",
        ),
        (WIDE, {"cp": 2}, DPA | DELAYED, "cp 1"),
        (WIDE, {}, DPA | DELAYED | {"lora_rank": 4}, "lora_rank left out"),
        (replace(WIDE, num_mtp_layers=1), {}, DPA | TENSORWISE, "multi-token prediction"),
        (WIDE, {}, DPA | TENSORWISE | FULL, "delayed with full recompute"),
        (
            replace(EXPERTS, head_dim=16),
            {"dp_shard": 2, "ep": 2},
            DPA | DELAYED | {"overlap_moe_expert_parallel_comm": True},
            "overlap_moe_expert_parallel_comm left out",
        ),
        *(
            (WIDE, {}, DPA | DELAYED | {"attention_backend": backend}, "auto or fused")
            for backend in (AttentionBackend.FLASH, AttentionBackend.UNFUSED)
        ),
    ],
)
def test_what_has_no_fp8_attention_is_refused(
    model: ModelConfig, mesh: dict[str, int], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        step(model, mesh, **settings)


@RECIPES
def test_casts_are_named_as_those_of_products(recipe: dict[str, Any]) -> None:
    """Predictions and tables know a cast by its kernel's name; products stay as they are."""
    ops = core(step(**recipe, **DPA))
    names = [op.op.name for op in ops if isinstance(op.op, Kernel)]
    assert names.count(QUANTIZE) == 2
    assert not [op for op in ops if isinstance(op.op, Gemm)]
