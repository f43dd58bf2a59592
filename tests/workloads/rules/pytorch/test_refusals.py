"""What PyTorch's rules do not know or cannot divide is one line that names the field."""

from dataclasses import replace
from typing import Any

import pytest

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Precision
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import PipelineSchedule
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.case import of_case

from .jobs import ALONE, BIASED, DDP, DENSE, EXPERTS, FSDP, SLIDING, make

INTERLEAVED = ALONE(pp_schedule=PipelineSchedule.INTERLEAVED)

CASES: list[tuple[Any, dict[str, int], Any, str]] = [
    (
        FSDP(attention_backend=AttentionKernel.FLASH),
        {"dp_shard": 8},
        SLIDING,
        "attention_backend flash is invalid: it must be auto or flex, since .* has windows",
    ),
    (
        FSDP(reshard_after_forward="3"),
        {"dp_shard": 8},
        DENSE,
        "reshard_after_forward 3 is invalid: it must be one of yes, no, 2, 4 for 8 shards",
    ),
    (FSDP(reshard_after_forward="8"), {"dp_shard": 8}, DENSE, "reshard_after_forward 8"),
    (
        FSDP(reshard_after_forward="maybe"),
        {"dp_shard": 2},
        DENSE,
        "reshard_after_forward maybe",
    ),
    (
        FSDP(reshard_after_forward="2"),
        {"dp_shard": 8, "ep": 8},
        EXPERTS,
        "reshard_after_forward 2 is invalid: it must be a divisor of 1 shards of experts",
    ),
    (
        FSDP(reshard_after_forward="4"),
        {"dp_shard": 8, "ep": 4},
        EXPERTS,
        "reshard_after_forward 4 is invalid: it must be a divisor of 2 shards of experts",
    ),
    (
        FSDP(blocks_per_group=9),
        {"dp_shard": 2},
        DENSE,
        "blocks_per_group 9 is invalid: it must be at most 8 layers",
    ),
    (
        FSDP(),
        {"dp_shard": 4, "ep": 2, "tp": 2},
        EXPERTS,
        "tp 2 is invalid: it must be 1, since small has experts",
    ),
    (
        FSDP(),
        {"dp_shard": 2, "ep": 8},
        EXPERTS,
        r"ep 8 is invalid: it must be a divisor of dp-shard x cp \(2\)",
    ),
    (
        FSDP(),
        {"dp_shard": 2, "pp": 2, "microbatches": 2},
        BIASED,
        "pp 2 is invalid: it must be 1, since small ties embedding and head",
    ),
    (
        FSDP(),
        {"dp_shard": 2, "pp": 16, "microbatches": 16},
        DENSE,
        "pipeline stages: '16' is invalid: it must be at most 10",
    ),
    (
        DDP(),
        {"dp_replicate": 2, "tp": 2},
        DENSE,
        "tp 2 is invalid: it must be 1 with ddp",
    ),
    (
        DDP(),
        {"dp_replicate": 2, "pp": 2},
        DENSE,
        "pp 2 is invalid: it must be 1 with ddp",
    ),
    (
        DDP(),
        {"dp_replicate": 1, "dp_shard": 2, "ep": 2},
        EXPERTS,
        "ep 2 is invalid: it must be 1 with ddp",
    ),
    (
        ALONE(),
        {"tp": 2, "dp_shard": 2},
        DENSE,
        "dp-shard 2 is invalid: it must be 1 without data parallelism",
    ),
    (
        ALONE(loss_chunks=2),
        {"tp": 2},
        DENSE,
        "loss_chunks 2 is invalid: it must be 1 with tp",
    ),
    (
        FSDP(loss_chunks=3),
        {"dp_shard": 2},
        DENSE,
        "loss_chunks 3 is invalid: it must be a divisor of 128 tokens",
    ),
    (
        ALONE(lora_rank=4),
        {"tp": 2},
        DENSE,
        "tp 2 is invalid: it must be 1 with lora_rank: DTensor's plans divide no adapters",
    ),
    (
        FSDP(lora_rank=4, lora_targets="q,v"),
        {"dp_shard": 2},
        DENSE,
        "lora_targets 'q, v' is invalid: it must be all or none of q, k, v",
    ),
    (
        FSDP(lora_rank=4, lora_targets="q,k,v,mlp"),
        {"dp_shard": 2},
        DENSE,
        "lora_targets mlp is invalid: it must be some of q, k, v, out",
    ),
    (
        ALONE(),
        {"tp": 8},
        DENSE,
        r"tp 8 is invalid: it must be a divisor of small's kv_heads \(4\)",
    ),
    (
        ALONE(),
        {"tp": 4},
        replace(DENSE, seq_len=62),
        r"seq-len 62 is invalid: it must be a multiple of cp x tp \(4\)",
    ),
    (
        ALONE(),
        {"pp": 2, "dp_replicate": 2},
        DENSE,
        "dp-replicate 2 is invalid: it must be 1 without data parallelism",
    ),
    (
        ALONE(),
        {"pp": 4, "microbatches": 2},
        DENSE,
        r"gbs 4 is invalid: it must be 8 or more: 1f1b needs pp \(4\) micro-batches of 2",
    ),
    (
        ALONE(pp_microbatches=3),
        {"pp": 2, "microbatches": 8},
        DENSE,
        "pp_microbatches 3 is invalid: it must be a divisor of 8 micro-batches",
    ),
    (
        INTERLEAVED,
        {"pp": 4, "microbatches": 9},
        DENSE,
        "pp_microbatches 9 is invalid: it must be a multiple of its rounds",
    ),
    (
        replace(INTERLEAVED, pp_stages=3),
        {"pp": 4, "microbatches": 8},
        DENSE,
        "pipeline stages: '12' is invalid: it must be at most 10",
    ),
]


@pytest.mark.parametrize(("settings", "mesh", "model", "said"), CASES)
def test_what_does_not_fit_is_one_line(
    settings: Any, mesh: dict[str, int], model: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        rule.workload(make(model, **mesh), settings)
    assert "\n" not in str(found.value)


def test_the_older_name_tp_has_no_pipeline() -> None:
    kind = RULES["tp"]
    with pytest.raises(ConfigError, match="pp 2 is invalid: it must be 1, or the pp rule"):
        kind.workload(make(pp=2, microbatches=2), kind.make())


SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (FSDP, {"prefetch": 0}, "prefetch 0 is invalid: it must be 1 or more"),
    (FSDP, {"blocks_per_group": 0}, "blocks_per_group 0 is invalid: it must be 1 or more"),
    (
        FSDP,
        {"recompute_some": 3, "recompute_every": 2},
        "recompute_some 3 is invalid: it must be at most",
    ),
    (FSDP, {"pp_microbatches": -1}, "pp_microbatches -1 is invalid: it must be 0 or more"),
    (ALONE, {"pp_stages": 0}, "pp_stages 0 is invalid: it must be 1 or more"),
    (DDP, {"bucket_cap_mb": -1}, "bucket_cap_mb -1 is invalid: it must be 0 or more"),
    (DDP, {"recompute_every": 0}, "recompute_every 0 is invalid: it must be 1 or more"),
    (ALONE, {"recompute_some": 0}, "recompute_some 0 is invalid: it must be 1 or more"),
    (
        FSDP,
        {"param_dtype": DType.INT8},
        "param_dtype int8 is invalid: it must be fp32, bf16 or fp16",
    ),
    (
        FSDP,
        {"reduce_dtype": DType.FP8_E5M2},
        "reduce_dtype fp8_e5m2 is invalid: it must be fp32, bf16 or fp16",
    ),
    (
        FSDP,
        {"shard_dtype": DType.INT64},
        "shard_dtype int64 is invalid: it must be fp32, bf16 or fp16",
    ),
    (
        DDP,
        {"param_dtype": DType.UINT8},
        "param_dtype uint8 is invalid: it must be fp32, bf16 or fp16",
    ),
    (
        ALONE,
        {"param_dtype": DType.TF32},
        "param_dtype tf32 is invalid: it must be fp32, bf16 or fp16",
    ),
    (
        ALONE,
        {"param_dtype": DType.FP64},
        "param_dtype fp64 is invalid: it must be fp32, bf16 or fp16",
    ),
]


@pytest.mark.parametrize(("kind", "values", "said"), SETTINGS)
def test_settings_that_mean_nothing_are_refused(
    kind: Any, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**values)


@pytest.mark.parametrize("settings", [FSDP(), DDP(), ALONE()])
@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.TF32, DType.INT32])
def test_types_of_activations_that_are_not_modelled(settings: Any, dtype: DType) -> None:
    with pytest.raises(
        ConfigError, match=f"dtype {dtype} is invalid: it must be fp32, bf16 or fp16"
    ):
        rule.workload(replace(make(), dtype=dtype), settings)


@pytest.mark.parametrize("products", [None, by_recipe(Recipe.ROWWISE), by_recipe(Recipe.MXFP8)])
def test_weights_are_gathered_in_fp8_where_they_have_one_scale(products: Any) -> None:
    job = replace(make(dp_shard=2), products=products)
    with pytest.raises(ConfigError, match=r"fp8_all_gather .* it works only with fp8"):
        rule.workload(job, FSDP(fp8_all_gather=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"precision": Precision.MASTER, "data_parallel": DataParallel.FSDP},
            "precision master is invalid: it must be amp with fsdp",
        ),
        (
            {"mbs": 3, "parallel": make(pp=2, microbatches=2).parallel},
            "mbs 3 is invalid: it must be a multiple of 2",
        ),
    ],
)
def test_cases_of_the_trainer_that_are_not_derived(changes: dict[str, Any], said: str) -> None:
    plain = TrainCase(model=find_model("llama-3.1-8b").tiny())
    with pytest.raises(ConfigError, match=said):
        of_case(replace(plain, **changes))


def test_compiled_cases_say_what_is_not_shown() -> None:
    plain = TrainCase(model=find_model("llama-3.1-8b").tiny())
    compiled = of_case(replace(plain, compile=CompileScope.BLOCK))
    assert of_case(plain).notes == ()
    assert [note.startswith("compiled") for note in compiled.notes] == [True]
    assert compiled.blocks == of_case(plain).blocks
