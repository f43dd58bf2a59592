"""What a reader of a Hugging Face configuration does not model is refused by its key."""

import json
from pathlib import Path
from typing import Any

import pytest
from validation import hugging_face_models as collection

from stepmark.ground.errors import ConfigError
from stepmark.workloads.formats.huggingface.config import read_config

LINES = {
    str(line["name"]): line["config"]
    for path in collection.FILES
    for line in collection.read_lines(path)
}
# Name of a configuration, a change of its decoder's keys, and words of the refusal.
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gemma-4-31B", {"use_bidirectional_attention": "all"}, "a causal decoder"),
    ("gemma-4-E2B", {"vocab_size_per_layer_input": 1000}, r"it must be vocab_size \(262144\)"),
    ("gemma-4-E2B", {"num_kv_shared_layers": 33}, "an earlier layer of each type"),
    (
        "Step-3.7-Flash-hub-keys",
        {"sliding_window": None},
        "sliding_window null .* a number of keys",
    ),
    ("Step-3.7-Flash-hub-keys", {"tie_word_embeddings": True}, "it must be false"),
    ("Step-3.7-Flash-hub-keys", {"moe_layers_enum": "3,x"}, "numbers of layers, with commas"),
    ("Step-3.7-Flash-hub-keys", {"use_head_wise_attn_gate": False}, "it must be true"),
    (
        "Step-3.7-Flash-hub-keys",
        {"attention_other_setting": {"head_dim": 64}},
        "attention_other_setting.head_dim 64 .* 128, as in other layers",
    ),
    ("MiMo-V2-Flash", {"swa_head_dim": 64}, "swa_head_dim 64 .* it must be 192"),
    ("MiMo-V2-Flash", {"add_full_attention_sink_bias": True}, "it must be false"),
    (
        "MiMo-V2-Flash",
        {"hybrid_layer_pattern": [0, 1]},
        "of 2. .* array of 48, one entry per layer",
    ),
    ("MiMo-V2-Flash", {"n_shared_experts": 1}, "it must be null"),
    ("LFM2-1.2B", {"layer_types": ["conv"]}, "an array of 16, one entry per layer"),
    (
        "LFM2-1.2B",
        {"layer_types": ["conv"] * 15 + ["foo"]},
        r"layer_types\[15\] foo .* one of full_attention, conv",
    ),
    (
        "granite-4.0-h-small",
        {"mamba_n_heads": 100},
        r"mamba_n_heads 100 .* mamba_d_head \(64\) are the inner width, 8192",
    ),
    (
        "DeepSeek-V3",
        {"num_key_value_heads": 8},
        "num_key_value_heads 8 .* num_attention_heads=128",
    ),
    ("LFM2-8B-A1B", {"layer_types": None}, "layer_types .* given"),
)


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_what_a_reader_lacks_is_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = LINES[name]
    if "text_config" in config:
        config = {**config, "text_config": {**config["text_config"], **change}}
    else:
        config = {**config, **change}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    assert next(iter(change)) in str(caught.value)
