"""FP8, MXFP8 and NVFP4 under Megatron-LM's settings: messages, buffers, layers, refusals."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.step.layout import is_cast
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.rules.megatron.narrow import Fp4Format, Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import Granularity

from .jobs import DENSE, EXPERTS, make

FP8: dict[str, Any] = {"fp8_format": Fp8Format.HYBRID}
NVFP4: dict[str, Any] = {"fp4_format": Fp4Format.E2M1}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}


def step(
    model: ModelConfig = DENSE, mesh: dict[str, int] | None = None, **more: Any
) -> Workload:
    microbatches = more.pop("microbatches", 2)
    return workload(make(model, microbatches=microbatches, **(mesh or {})), Megatron(**more))


def messages(of: Workload, stage: int = 0, **fields: Any) -> list[CommOp]:
    return [
        op
        for op in of.expand(stage)
        if isinstance(op, CommOp)
        and all(getattr(op, name) == value for name, value in fields.items())
    ]


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_without_fp8_nothing_changes_and_with_it_only_what_it_names(model: ModelConfig) -> None:
    """Flops and the messages of experts, pipelines and gradients are those of bf16."""
    mesh = {"tp": 2, "pp": 2, "dp_shard": 2}
    plain = step(model, mesh, sequence_parallel=True, **SHARDED)
    low = step(model, mesh, sequence_parallel=True, **FP8, **SHARDED)
    for stage in range(2):
        of_both = [
            Counter(
                (op.collective, op.dtype, op.count, op.group, op.module)
                for op in messages(each, stage)
                if op.collective != Collective.ALL_GATHER and op.module != "amax"
            )
            for each in (plain, low)
        ]
        assert of_both[0] == of_both[1]
        flops = [
            sum(op.op.flops or 0 for op in each.expand(stage) if isinstance(op, ComputeOp))
            for each in (plain, low)
        ]
        assert flops[0] == flops[1]


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        (FP8, 8),
        ({**FP8, "fp8_recipe": Fp8Recipe.BLOCKWISE}, 8 + 32 / 128),
        ({**FP8, "fp8_recipe": Fp8Recipe.MXFP8}, 8 + 8 / 32),
        (NVFP4, 4 + 8 / 16),
    ],
)
def test_what_is_cast_before_it_is_gathered_has_the_bytes_of_its_format(
    settings: dict[str, Any], bits: float
) -> None:
    mesh = {"tp": 2}
    model = replace(DENSE, head_dim=16, ffn_hidden_size=128)  # rows that MXFP8 takes
    kwargs = {"sequence_parallel": True, "microbatches": 1}
    plain, low = step(model, mesh, **kwargs), step(model, mesh, **settings, **kwargs)
    pairs = zip(
        messages(plain, collective="all_gather", group="tp"),
        messages(low, collective="all_gather", group="tp"),
        strict=True,
    )
    narrow = 0
    for a, b in pairs:
        assert (a.module, a.phase) == (b.module, b.phase)
        if a.module in ("head", "embedding"):
            assert a == b
        else:
            # Of blocks the gradient's columns are no transpose of its rows: both are sent.
            layouts = 2 if bits != 8 and a.phase is Phase.DGRAD else 1
            assert b.dtype is DType.UINT8
            assert b.count == layouts * a.count * bits / 8
            narrow += 1
    assert narrow == 6 * model.num_layers  # two gathers of two inputs, one of two gradients


def test_delayed_scaling_reduces_maxima_once_per_pass_of_a_chunk() -> None:
    """TransformerEngine, reduce_and_update_fp8_tensors: 3 tensors of a product, and 2.

    Attention counts as three products, whether it is in FP8 or not.
    """
    mesh = {"tp": 2, "pp": 2, "dp_shard": 2}
    low = step(mesh=mesh, **FP8, microbatches=4)
    for stage in range(2):
        reduced = messages(low, stage, module="amax")
        assert {(op.group, op.redop, op.dtype) for op in reduced} == {
            ("tp_dp_cp", RedOp.MAX, DType.FP32)
        }
        products = (4 + 3) * DENSE.num_layers // 2
        assert Counter((op.phase, op.count) for op in reduced) == {
            (Phase.FWD, 3 * products): 4,
            (Phase.BWD, 2 * products): 4,
        }
    only_tp = messages(step(mesh=mesh, **FP8, tp_only_amax_red=True), module="amax")
    assert {op.group for op in only_tp} == {"tp_cp"}
    for recipe in set(Fp8Recipe) - {Fp8Recipe.DELAYED}:
        assert not messages(step(mesh=mesh, **FP8, fp8_recipe=recipe), module="amax")


def test_each_expert_has_its_own_maxima() -> None:
    mesh = {"dp_shard": 2, "ep": 2}
    (count,) = {
        op.count for op in messages(step(EXPERTS, mesh, **FP8), module="amax", phase=Phase.FWD)
    }
    dense, moe = 3, 5
    experts = 2 * 8 // 2  # gate with up and down of half of the experts
    attention = 3
    assert count == 3 * (dense * (4 + attention) + moe * (2 + attention + experts))


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_gathered_in_fp8_have_half_the_bytes(overlap: bool) -> None:
    """Gradients keep theirs; norms, embedding and head are gathered as before."""
    more = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap, **SHARDED}
    mesh = {"dp_shard": 2}
    plain = step(mesh=mesh, **FP8, **more)
    low = step(mesh=mesh, **FP8, **more, fp8_param_gather=True)
    bytes_of = [Counter[str]() for _ in range(2)]
    for counter, each in zip(bytes_of, (plain, low), strict=True):
        for op in messages(each, group="intra_dp_cp"):
            counter[op.collective] += op.message_bytes(each.groups[op.group])
    hidden, ffn = DENSE.hidden_size, DENSE.ffn_hidden_size
    narrow = DENSE.num_layers * hidden * (2 * hidden + hidden + 3 * ffn)  # 8 and 4 + 4 heads
    saved = bytes_of[0]["all_gather"] - bytes_of[1]["all_gather"]
    padding = 256  # of buffers, to multiples of 128 x ranks
    assert saved == pytest.approx(narrow, abs=2 * padding)
    reduced = [counter["reduce_scatter"] for counter in bytes_of]
    assert reduced[0] == pytest.approx(reduced[1], abs=4 * padding)
    # The shards are cast by the maxima of whole weights: four of each layer.
    (amax,) = messages(low, module="amax", phase=Phase.OPTIM)
    assert (amax.count, amax.redop) == (4 * DENSE.num_layers, RedOp.MAX)
    # MXFP8 parameters are gathered in bf16 (param_and_grad_buffer.py, shared_buffer), from
    # buffers of their own, too.
    mx = step(mesh=mesh, **FP8, fp8_recipe=Fp8Recipe.MXFP8, **more, fp8_param_gather=True)
    for collective in ("all_gather", "reduce_scatter"):
        of_mx, of_low = (
            messages(each, group="intra_dp_cp", collective=collective) for each in (mx, low)
        )
        assert [op.count for op in of_mx] == [op.count for op in of_low]
        assert DType.UINT8 not in {op.dtype for op in of_mx}
    own = messages(plain, group="intra_dp_cp", collective="all_gather")
    assert len(of_mx) >= len(own) + 1


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_are_cast_once_per_step(shards: int) -> None:
    of_step = []
    for count in (1, 4):
        low = step(mesh={"dp_shard": shards}, **FP8, **SHARDED, microbatches=count)
        casts = [op for op in low.expand() if isinstance(op, ComputeOp) and is_cast(op)]
        of_step.append([op for op in casts if op.phase is Phase.OPTIM])
        assert len(casts) - len(of_step[-1]) == count * DENSE.num_layers * 4 * 2
    assert of_step[0] == of_step[1]
    (cast,) = of_step[0]
    weights = DENSE.num_layers * 64 * (3 * 64 + 3 * 96)
    assert cast.op.bytes_moved == (2 + 2) * weights


def test_first_and_last_layers_stay_in_bf16() -> None:
    """is_first_last_bf16_layer of fp8_utils.py."""
    more = {"fp8_recipe": Fp8Recipe.TENSORWISE, "num_layers_at_start_in_bf16": 2}
    low = step(EXPERTS, {"pp": 2}, **FP8, first_last_layers_bf16=True, **more)
    dtypes: dict[int, set[DType]] = {}
    for stage in range(2):
        for op in low.expand(stage):
            if not isinstance(op, ComputeOp) or not isinstance(op.op, Gemm | GroupedGemm):
                continue
            if op.layer is not None and op.module != "mlp.router":
                dtypes.setdefault(op.layer, set()).add(op.op.dtype)
    wide = {layer for layer, found in dtypes.items() if found == {DType.BF16}}
    assert wide == {0, 1, 7}
    narrow = {DType.FP8_E4M3, DType.FP8_E5M2}
    assert all(found == narrow for layer, found in dtypes.items() if layer not in wide)


SELECTIVE = {"recompute_granularity": Granularity.SELECTIVE, "recompute_modules": "layernorm"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**FP8, **NVFP4}, "fp4_format e2m1.*none with fp8_format"),
        ({"fp8_param_gather": True, **SHARDED}, "fp8_param_gather.*only with fp8_format"),
        ({"fp8_param_gather": True, **FP8}, "only with use_distributed_optimizer"),
        ({"first_last_layers_bf16": True}, "only with fp8_format or fp4_format"),
        ({"first_last_layers_bf16": True, **FP8}, "fp8_recipe other than delayed"),
        ({**FP8, **SELECTIVE}, "recompute_modules layernorm.*delayed scaling"),
        (
            {**NVFP4, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 9},
            r"num_layers_at_end_in_bf16 9.*from 0 to the layers of a stage \(8\)",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        step(**settings)


def test_narrow_products_need_bf16() -> None:
    job = replace(make(), dtype=DType.FP16)
    with pytest.raises(ConfigError, match="dtype fp16 is invalid: it must be bf16"):
        workload(job, Megatron(**FP8))


SEQUENCE: dict[str, Any] = {"sequence_parallel": True, "microbatches": 1}
WIDE = replace(DENSE, head_dim=16, ffn_hidden_size=128)  # rows that MXFP8 takes


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (FP8 | {"fp8_recipe": Fp8Recipe.TENSORWISE}, 1),
        (NVFP4, 2),
        (FP8 | {"fp8_recipe": Fp8Recipe.BLOCKWISE}, 0),
        (FP8 | {"fp8_recipe": Fp8Recipe.MXFP8}, 0),
        (FP8, 0),
    ],
)
def test_maxima_of_shards_are_reduced_before_a_gather(
    settings: dict[str, Any], count: int
) -> None:
    """with_amax_reduction of TransformerEngine's quantizers: one number, NVFP4 one a layout."""
    low = step(WIDE, {"tp": 2}, **settings, **SEQUENCE)
    reduced = messages(low, redop=RedOp.MAX, group="tp", dtype=DType.FP32)
    reduced = [op for op in reduced if op.module not in ("loss", "amax")]
    # Inputs of qkv and of gate with up, and gradients of out and of down.
    roles = {"attention.qkv", "mlp.gate_up"} if count else set()
    assert {op.module for op in reduced if op.phase is Phase.FWD} == roles
    roles = {"attention.out", "mlp.down"} if count else set()
    assert {op.module for op in reduced if op.phase is Phase.DGRAD} == roles
    assert len(reduced) == (4 * WIDE.num_layers if count else 0)
    assert {op.count for op in reduced} <= {count}
    alone = step(WIDE, {"tp": 2}, **settings, microbatches=1)
    assert not [op for op in messages(alone, redop=RedOp.MAX) if op.module in roles]


def test_userbuffers_gather_the_columns_of_mxfp8_by_themselves() -> None:
    mxfp8 = FP8 | {"fp8_recipe": Fp8Recipe.MXFP8}
    plain = step(WIDE, {"tp": 2}, **mxfp8, **SEQUENCE)
    overlap = {"tp_comm_overlap": True, "tp_comm_overlap_rs": False}
    low = step(WIDE, {"tp": 2}, **mxfp8, **SEQUENCE, **overlap)
    for module in ("attention.out", "mlp.down"):
        (whole,) = {op.count for op in messages(plain, module=module, collective="all_gather")}
        rings = messages(low, module=module, collective="send", phase=Phase.DGRAD)
        gathers = messages(low, module=module, collective="all_gather")
        assert len(rings) == len(gathers) == WIDE.num_layers
        # Both send a rank's rows, each in one of the two layouts.
        assert {op.count for op in rings} == {op.count for op in gathers} == {whole // 2}
        (last,) = {
            op.after
            for op in low.expand()
            if op.module == module and op.phase is Phase.WGRAD and isinstance(op, ComputeOp)
        }
        assert f"{module}.columns" in last


@pytest.mark.parametrize("settings", [NVFP4, FP8 | {"fp8_recipe": Fp8Recipe.BLOCKWISE}])
def test_userbuffers_lack_other_scales(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tp_comm_overlap.*NVFP4 or blockwise"):
        step(WIDE, {"tp": 2}, **settings, **SEQUENCE, tp_comm_overlap=True)


def test_buffers_are_in_the_order_in_which_types_are_registered() -> None:
    """The embedding is in bf16, a layer's first parameter in FP8."""
    low = step(mesh={"pp": 2, "dp_shard": 2}, **FP8, **SHARDED, fp8_param_gather=True)
    types = [
        [op.dtype for op in messages(low, stage, collective="all_gather", group="intra_dp_cp")]
        for stage in range(2)
    ]
    assert types == [[DType.BF16, DType.UINT8], [DType.UINT8, DType.BF16]]
