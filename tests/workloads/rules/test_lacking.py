"""What Megatron-LM and DeepSpeed's rules lack of a model is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from tests.workloads.rules.pytorch.jobs import DENSE, PER_LAYER

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import Layer
from stepmark.model.parallel import ParallelConfig
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES

SHARED = (Layer(), Layer(has_kv=False))
# Of a model: the change, and the words of the refusal.
LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "values that are keys": ({"pattern": (Layer(shares_kv=True),)}, "values that are keys"),
    "layer norms": (
        {"qk_norm": True, "qk_norm_kind": "layernorm_each"},
        "layer norms of queries and keys",
    ),
    "activation": ({"activation": "xielu"}, "xIELU"),
    "convolutions": (
        {"conv_width": 3, "pattern": (Layer(), Layer(mixer="conv"))},
        "short convolutions|a layer without attention",
    ),
    "width of values": ({"value_head_dim": 4}, "values of another width"),
    "scaled values": ({"value_multiplier": 0.7}, "values"),
    "sinks": ({"has_sinks": True, "pattern": (Layer(), Layer(has_sinks=False))}, "sinks"),
    "rotated widths": (
        {"pattern": (Layer(), Layer(rotary_dim=4))},
        "rotated widths of single layers",
    ),
    "normed values": ({"v_norm": True}, "normed values"),
    "scaled layers": ({"layer_scale": True}, "scaled layers"),
    "embeddings per layer": ({"per_layer_width": 16}, "embeddings per layer"),
    "shared keys": ({"pattern": SHARED}, "layers that share keys and values"),
    "norms of experts": ({"moe": PER_LAYER.moe}, "norms"),
}


def job(changes: dict[str, Any], **mesh: int) -> Job:
    parallel = ParallelConfig(**mesh)
    model = replace(DENSE, **changes)
    return Job(model=model, parallel=parallel, mbs=1, gbs=parallel.data_ranks)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
@pytest.mark.parametrize(("changes", "words"), LACKING.values(), ids=LACKING)
def test_a_part_that_a_framework_lacks_is_refused_by_name(
    framework: str, changes: dict[str, Any], words: str
) -> None:
    rule = RULES[framework]
    with pytest.raises(ConfigError, match=f"model small is invalid: .*{words}"):
        rule.workload(job(changes, dp_shard=2), rule.make())
    assert RULES["fsdp"].workload(job(changes, dp_shard=2), RULES["fsdp"].make()).stages
