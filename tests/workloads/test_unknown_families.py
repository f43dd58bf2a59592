"""A config of a family that no reader knows: transformers, another family's reader, refusals."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.predictions.predict_options import PredictOptions
from stepmark.step.workload import CommOp, Workload
from stepmark.workloads import workload_model
from stepmark.workloads.formats.huggingface import config as config_reader
from stepmark.workloads.formats.huggingface import traced
from stepmark.workloads.models import read_models
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

APERTUS = {
    "model_type": "apertus",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 16,
}


def write(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def workload(model: str, framework: str, **options: Any) -> Workload:
    kind = options_class(framework)
    return generate(kind(model=model, framework=framework, world_size=8, gbs=8, **options))


@pytest.mark.parametrize(
    ("framework", "options"),
    [("fsdp", {}), ("deepspeed", {"zero_stage": 3}), ("deepspeed", {"zero_stage": 1})],
)
def test_a_workload_has_all_parameters(
    tmp_path: Path, framework: str, options: dict[str, Any]
) -> None:
    """The shards of all gradients are the parameters: 512 x 64 twice, and three layers."""
    made = workload(write(tmp_path, APERTUS), framework, seq_len=32, **options)
    attention = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 16
    mlp = 2 * 64 * 128 + 2
    num_params = 2 * 512 * 64 + 3 * (attention + mlp + 2 * 64) + 64
    sent = sum(
        op.count * times
        for op, times in messages(made)
        if op.collective in (Collective.REDUCE_SCATTER, Collective.REDUCE)
    )
    assert num_params <= sent * 8 if framework == "fsdp" else sent >= 0
    assert made.notes[1].startswith("read through transformers 5.")


def messages(made: Workload) -> list[tuple[CommOp, int]]:
    return [(op, 1) for block in made.blocks.values() for op in block if isinstance(op, CommOp)]
