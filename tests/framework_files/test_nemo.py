"""YAML of NeMo and Megatron-Bridge."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.framework_files import configuration
from stepmark.framework_files.table import Translation
from stepmark.ground.errors import ConfigError

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
BRIDGE: dict[str, Any] = {
    "model": MODEL | {"seq_length": 64},
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
}


def read(content: object, folder: Path) -> Translation:
    path = folder / "job.json"
    path.write_text(json.dumps(content))
    return configuration.read(str(path))


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16_mixed", {"dtype": "bf16", "fp8_format": None}),
        ("fp16-mixed", {"dtype": "fp16"}),
        (
            {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
            {"dtype": "bf16", "fp8_format": "hybrid", "fp8_recipe": "delayed"},
        ),
        ({"bf16": True, "fp8": "e4m3"}, {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}),
        (
            "bf16_with_fp8_current_scaling_mixed",
            {
                "fp8_recipe": "tensorwise",
                "first_last_layers_bf16": "True",
                "fp8_param_gather": "True",
            },
        ),
        ("bf16_with_fp8_subchannel_scaling_mixed", {"fp8_recipe": "blockwise"}),
        ("bf16_with_mxfp8_mixed", {"fp8_recipe": "mxfp8", "fp8_param_gather": "True"}),
        (
            {"bf16": True, "fp8": "hybrid", "fp8_dot_product_attention": True},
            {"fp8_dot_product_attention": "True", "fp8_multi_head_attention": None},
        ),
        ("bf16_with_nvfp4_mixed", {"fp4_recipe": "nvfp4", "fp8_format": None}),
    ],
)
def test_recipes_are_those_of_megatron_bridge(
    precision: object, options: dict[str, str | None], tmp_path: Path
) -> None:
    file = read(BRIDGE | {"mixed_precision": precision}, tmp_path)
    assert {name: file.options.get(name) for name in options} == options


def test_modules_to_offload_are_a_list(tmp_path: Path) -> None:
    model = MODEL | {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_proj"],
    }
    file = read(BRIDGE | {"model": model}, tmp_path)
    assert file.options["fine_grained_activation_offloading"] == "True"
    assert file.options["offload_modules"] == "core_attn,attn_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mixed_precision": "nanov2_bf16_with_fp8_current_scaling_mixed"},
            "precision nanov2_bf16_with_fp8_current_scaling_mixed is invalid",
        ),
        ({"peft": {"dim": 16}}, "peft is invalid"),
        (
            {"model": MODEL | {"activation_func": "silu", "gated_linear_unit": False}},
            "activation-func silu is invalid",
        ),
        ({"model": MODEL | {"megatron_amp_O2": False}}, "megatron-amp-o2 off is invalid"),
    ],
)
def test_what_is_refused_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read(BRIDGE | changes, tmp_path)
    assert message in str(error.value)


def test_a_gate_of_gelu_is_noted(tmp_path: Path) -> None:
    file = read(BRIDGE | {"model": MODEL | {"gated_linear_unit": True}}, tmp_path)
    assert file.options["swiglu"] == "True"
    assert any("quick-geglu" in note and "not modelled" in note for note in file.notes)


def test_the_vocabulary_is_that_of_the_file_or_asked_for(tmp_path: Path) -> None:
    assert "vocab_size" not in read(BRIDGE, tmp_path).options
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 1000}
    of_tokenizer = read(BRIDGE | {"tokenizer": tokenizer}, tmp_path).options
    assert of_tokenizer["vocab_size"] == "1000"
    assert "make_vocab_size_divisible_by" not in of_tokenizer
    own = read(BRIDGE | {"model": MODEL | {"vocab_size": 1000}}, tmp_path).options
    assert own["make_vocab_size_divisible_by"] == "1"


def test_distillation_is_refused(tmp_path: Path) -> None:
    content = BRIDGE | {"model": BRIDGE["model"] | {"teacher": {"seq_length": 64}}}
    with pytest.raises(ConfigError, match="a teacher as well, is not modelled"):
        read(content, tmp_path)


def test_what_a_recipe_sets_besides_its_file_is_noted(tmp_path: Path) -> None:
    note = "settings-of-a-recipe-in-Python"
    assert any(note in each for each in read(BRIDGE, tmp_path).notes)
    whole = BRIDGE | {"ddp": {"use_distributed_optimizer": True}}
    assert not any(note in each for each in read(whole, tmp_path).notes)


def test_classes_of_megatron_bridge_have_defaults(tmp_path: Path) -> None:
    assert read(BRIDGE, tmp_path).options["cross_entropy_loss_fusion"] == "True"
    model = MODEL | {"cross_entropy_loss_fusion": False}
    unfused = read(BRIDGE | {"model": model}, tmp_path)
    assert unfused.options.get("cross_entropy_loss_fusion") != "True"
    by_data = read(BRIDGE | {"model": MODEL, "dataset": {"sequence_length": 128}}, tmp_path)
    assert by_data.options["seq_len"] == "128"
    assert read(BRIDGE | {"model": MODEL | {"fp16": True}}, tmp_path).options["dtype"] == "fp16"
    provider = {"_target_": "megatron.bridge.models.llama.Llama3ModelProvider8B"}
    with pytest.raises(ConfigError, match="model-provider Llama3ModelProvider8B is invalid"):
        read(BRIDGE | {"model": MODEL | provider}, tmp_path)
    own = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
    assert read(BRIDGE | {"model": MODEL | own}, tmp_path).options["num_layers"] == "4"


def test_weights_in_fp32_of_nemo_are_refused_where_a_file_leaves_them(tmp_path: Path) -> None:
    model = MODEL | {"encoder_seq_length": 64, "micro_batch_size": 1, "global_batch_size": 8}
    content = {"trainer": {"devices": 8, "precision": "bf16"}, "model": model}
    with pytest.raises(ConfigError, match="megatron-amp-o2"):
        read(content, tmp_path)
    notes = read(content | {"model": model | {"megatron_amp_O2": True}}, tmp_path).notes
    assert any("no-mcore-gpt" in note for note in notes)
