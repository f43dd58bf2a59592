"""DeepSpeed's JSON and accelerate's YAML, which name no model."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.framework_files import configuration
from stepmark.framework_files.table import Translation
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Workload
from stepmark.workloads import workload_flags
from stepmark.workloads.workload import generate

ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1e8, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_clipping": 1.0,
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""


def read(content: object, folder: Path) -> Translation:
    path = folder / ("job.json" if isinstance(content, dict) else "job.yaml")
    path.write_text(json.dumps(content) if isinstance(content, dict) else str(content))
    return configuration.read(str(path))


def job(content: object, folder: Path, **options: Any) -> Workload:
    file = read(content, folder)
    path = folder / ("job.json" if isinstance(content, dict) else "job.yaml")
    cls = workload_flags.options_class(file.framework, has_ignored=False)
    return generate(cls(config=str(path), model="llama-3.1-8b", **options))


def test_the_job_is_that_of_the_same_flags(tmp_path: Path) -> None:
    made = job(ZERO3, tmp_path, world_size=8)
    cls = workload_flags.options_class("deepspeed", has_ignored=False)
    typed = generate(
        cls(
            framework="deepspeed",
            model="llama-3.1-8b",
            world_size=8,
            stage=3,
            mbs=2,
            gbs=64,
            reduce_bucket_size=100_000_000,
            overlap_comm="true",
            gradient_clipping=1.0,
        )
    )
    assert made.blocks == typed.blocks
    assert made.num_sequences == 64


def test_the_batches_of_a_file_give_its_ranks(tmp_path: Path) -> None:
    file = read(ZERO3 | {"train_batch_size": 128}, tmp_path)
    assert file.options["world_size"] == "16"
    with pytest.raises(ConfigError, match="train_batch_size 100 is invalid"):
        read(ZERO3 | {"train_batch_size": 100}, tmp_path)


def test_defaults_are_those_of_deepspeed(tmp_path: Path) -> None:
    file = read({"train_batch_size": 8, "elasticity": {"enabled": False}}, tmp_path)
    assert file.defaults["stage"] == "0"
    assert file.options["dtype"] == "fp32"


def test_auto_is_left_to_flags(tmp_path: Path) -> None:
    file = read(ZERO3 | {"train_micro_batch_size_per_gpu": "auto"}, tmp_path)
    assert "mbs" not in file.options


@pytest.mark.parametrize(
    ("batches", "world_size", "expected"),
    [
        ({"train_batch_size": 256}, 16, (16, 1)),
        ({"train_batch_size": 256, "gradient_accumulation_steps": 4}, 16, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8, (2, 4)),
    ],
)
def test_batches_are_divided_as_deepspeed_does(
    batches: dict[str, int], world_size: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    made = job({"bf16": {"enabled": True}} | batches, tmp_path, world_size=world_size)
    micro, accumulated = expected
    assert made.num_microbatches == accumulated
    assert made.num_sequences == micro * accumulated * world_size


def test_batches_of_other_ranks_are_refused(tmp_path: Path) -> None:
    content = ZERO3 | {"train_batch_size": 128}
    with pytest.raises(ConfigError, match="train_batch_size 128 is invalid"):
        job(content, tmp_path, world_size=8)


def test_a_type_that_is_open_is_asked_for(tmp_path: Path) -> None:
    content = ZERO3 | {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    with pytest.raises(
        ConfigError, match="dtype auto is invalid: it must be left to a trainer"
    ):
        job(content, tmp_path, world_size=8)
    made = job(content, tmp_path, world_size=8, dtype="bf16")
    assert made.blocks == job(ZERO3 | {"gradient_clipping": 0}, tmp_path, world_size=8).blocks
    notes = read(content, tmp_path).notes
    assert any("derives it (auto)" in note and "gradient_clipping" in note for note in notes)


def test_a_file_without_a_batch_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --mbs"):
        job({"bf16": {"enabled": True}}, tmp_path, world_size=8)


def test_unpinned_memory_is_noted(tmp_path: Path) -> None:
    content = ZERO3 | {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    }
    assert any("offload_optimizer.pin_memory" in note for note in read(content, tmp_path).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": {"enabled": True}}, "dtype 'bf16 and fp16' is invalid"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning true is invalid"),
        ({"elasticity": {"enabled": True, "a": 1}}, "elasticity true is invalid"),
        ({"zero_optimization": {"stagee": 3}}, "did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "hpz_partition"),
        ({"tensor_parallel": {"autotp_size": 4}}, "autotp_size 4 is invalid"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param.device nvme is invalid: it must be one of none, null, cpu",
        ),
    ],
)
def test_what_is_refused_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read(ZERO3 | changes, tmp_path)
    assert message in str(error.value)


def test_a_file_without_a_model_needs_one(tmp_path: Path) -> None:
    read(ZERO3, tmp_path)
    cls = workload_flags.options_class("deepspeed", has_ignored=False)
    with pytest.raises(ConfigError, match="model"):
        generate(cls(config=str(tmp_path / "job.json")))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("fsdp_version: 2", {"data_parallel": "fsdp", "reduce_dtype": "bf16"}),
        ("fsdp_sharding_strategy: NO_SHARD", {"data_parallel": "ddp"}),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", {"reshard_after_forward": "no"}),
        ("fsdp_reshard_after_forward: true", {"reshard_after_forward": "yes"}),
        ("fsdp_activation_checkpointing: true", {"recompute": "full"}),
        ("fsdp_sharding_strategy: HYBRID_SHARD", {"dp_shard": "4"}),
        ("fsdp_sharding_strategy: 5", {"dp_shard": "4", "reshard_after_forward": "no"}),
    ],
)
def test_accelerate_with_fsdp(config: str, options: dict[str, str], tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="FSDP") + f"fsdp_config:\n  {config}\n"
    file = read(text, tmp_path)
    assert file.framework == "pytorch"
    assert {name: file.options[name] for name in options} == options
    assert job(text, tmp_path).world_size == 8


def test_accelerate_with_deepspeed_and_its_file(tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="DEEPSPEED") + "deepspeed_config:\n  zero_stage: 3\n"
    assert read(text, tmp_path).options["stage"] == "3"
    named = text.replace("zero_stage: 3", "deepspeed_config_file: zero.json")
    with pytest.raises(ConfigError, match="a DeepSpeed file in its folder"):
        read(named, tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps(ZERO3))
    assert read(named, tmp_path).options["reduce_bucket_size"] == "100000000"


@pytest.mark.parametrize(
    ("kind", "lines", "message"),
    [
        ("MULTI_CPU", "", "distributed_type MULTI_CPU is invalid"),
        ("MEGATRON_LM", "", "distributed_type MEGATRON_LM is invalid"),
        ("FSDP", "use_cpu: true", "use_cpu true is invalid"),
        ("FSDP", "fsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP", "policy NO_WRAP is invalid"),
        ("FSDP", "fsdp_config:\n  fsdp_sharding_strategy: 7", "strategy 7 is invalid"),
        ("DEEPSPEED", "", "mixed_precision fp8 is invalid"),
    ],
)
def test_what_accelerate_is_refused_is_named(
    kind: str, lines: str, message: str, tmp_path: Path
) -> None:
    text = ACCELERATE.format(kind=kind) + lines
    if kind == "DEEPSPEED":
        text = text.replace("mixed_precision: bf16", "mixed_precision: fp8")
    with pytest.raises(ConfigError, match=message):
        read(text, tmp_path)


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU"])
def test_accelerate_reduces_the_last_micro_batch_alone(kind: str, tmp_path: Path) -> None:
    text = ACCELERATE.format(kind=kind) + "gradient_accumulation_steps: 4\n"
    step = job(text, tmp_path)
    assert (step.num_microbatches, step.settings["grad_sync"]) == (4, "last")


def test_more_of_accelerate(tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="FSDP") + "gradient_accumulation_steps: 2\n"
    text += "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    file = read(text.replace("bf16", "fp16"), tmp_path)
    assert file.framework == "pytorch"
    assert (file.options["param_dtype"], file.options["reduce_dtype"]) == ("fp16", "fp16")
    regional = read(text + "  dynamo_use_regional_compilation: true\n", tmp_path)
    assert regional.options["compile"] == "layers"
    other = read(ACCELERATE.format(kind="MULTI_XPU"), tmp_path)
    assert other.options["data_parallel"] == "ddp"
    assert any("the device is that of --device" in note for note in other.notes)
    deepspeed = read(text.replace("FSDP", "DEEPSPEED"), tmp_path)
    assert any("dynamo_backend" in note and "not modelled" in note for note in deepspeed.notes)


@pytest.mark.parametrize(
    ("optimizer", "note"),
    [("AdamW", ""), ("Lamb", "the optimizer is Adam"), ("OneBitAdam", "before freeze_step")],
)
def test_optimizers(optimizer: str, note: str, tmp_path: Path) -> None:
    file = read(ZERO3 | {"optimizer": {"type": optimizer}}, tmp_path)
    notes = [each for each in file.notes if each.startswith("not modelled: optimizer.type")]
    assert [note in each for each in notes] == [True] * bool(note)
    with pytest.raises(ConfigError, match="Muon is not modelled"):
        read(ZERO3 | {"optimizer": {"type": "Muon"}}, tmp_path)


def test_fsdp_of_accelerate_is_version_1_without_a_version(tmp_path: Path) -> None:
    text = ACCELERATE.format(kind="FSDP")
    assert any("fsdp_version" in note for note in read(text, tmp_path).notes)
    newer = read(text + "fsdp_config:\n  fsdp_version: 2\n", tmp_path)
    assert not any("not modelled: fsdp_config.fsdp_version" in note for note in newer.notes)
