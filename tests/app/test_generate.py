"""What the flags of `workload generate` make of a model."""

from stepmark.app.workload import generate
from stepmark.app.workload_flags import options_class
from stepmark.core.workload import Workload


def deepseek(**flags: object) -> Workload:
    options = {"model": "deepseek-v3", "num_layers": 4, "world_size": 8, "ep": 8} | flags
    return generate(options_class("megatron")(framework="megatron", **options))


def test_a_q_lora_rank_of_0_is_none() -> None:
    """As in AICB: queries are projected directly."""
    modules = {op.module for op in deepseek().tally()}
    direct = deepseek(q_lora_rank=0)
    assert direct.model
    assert direct.model.mla
    assert direct.model.mla.q_lora_rank is None
    lost = modules - {op.module for op in direct.tally()}
    assert lost
    assert all(".q" in module for module in lost)
