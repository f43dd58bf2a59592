"""What Megatron-LM would refuse, or cannot divide, is one line that says what would fit."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from stepmark.core.errors import ConfigError
from stepmark.core.model import find_model
from stepmark.core.parallel import ParallelConfig
from stepmark.workload.job import Job
from stepmark.workload.rules.megatron.rule import Megatron, workload
from stepmark.workload.rules.megatron.settings import CpComm, Granularity, RouterDtype

from .jobs import DENSE, EXPERTS, LATENT, make

SP = {"sequence_parallel": True}
# Model, mesh, settings, and words that the refusal has to have.
REFUSED: list[tuple[Any, Mapping[str, int], Mapping[str, Any], str]] = [
    (DENSE, {"tp": 3}, {}, "tp.*3.*heads"),
    (DENSE, {"tp": 8}, {}, "tp.*8.*kv_heads \\(4\\)"),
    (DENSE, {"pp": 3}, {}, "pp.*3.*divides 8 layers \\(1, 2, 4, 8; .*2, 5, 10\\)"),
    (replace(DENSE, seq_len=60), {"tp": 4, "cp": 2}, SP, "seq-len.*60"),
    (replace(DENSE, seq_len=62), {"cp": 2}, {}, "seq-len.*62.*4"),
    (DENSE, {"ep": 2, "dp_shard": 2}, {}, "ep.*no experts"),
    (EXPERTS, {"tp": 2}, {}, "sequence_parallel"),
    (EXPERTS, {"ep": 4, "dp_shard": 2}, {}, "ep.*4.*tp x cp x dp \\(2\\)"),
    (EXPERTS, {"ep": 3, "dp_shard": 3}, {}, "ep.*3.*8 experts"),
    (EXPERTS, {"dp_shard": 2}, {"expert_tensor_parallel_size": 3}, "expert tp 3"),
    (DENSE, {"dp_shard": 2, "dp_replicate": 2}, {}, "dp-replicate.*use_distributed_optimizer"),
    (DENSE, {"pp": 4}, {"decoder_first_pipeline_num_layers": 1}, "first.*1.*3 other stages"),
    (
        replace(DENSE, num_layers=10),
        {"pp": 4},
        {"decoder_first_pipeline_num_layers": 1, "virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size.*2.*1 layers",
    ),
    (DENSE, {}, {"virtual_pipeline_model_parallel_size": 2}, "vpp.*one pipeline stage"),
    (
        DENSE,
        {"pp": 2},
        {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        "pp.*overlap_p2p_comm",
    ),
    (
        DENSE,
        {"pp": 4},
        {"virtual_pipeline_model_parallel_size": 2},
        "micro-batches.*2.*pp \\(4\\).*4",
    ),
    (
        DENSE,
        {},
        {"recompute_granularity": Granularity.FULL, "recompute_num_layers": 3},
        "recompute_num_layers.*3.*8 layers",
    ),
    (
        DENSE,
        {"pp": 2},
        {"recompute_granularity": Granularity.FULL, "recompute_num_layers": 9},
        "recompute_num_layers.*9",
    ),
]


@pytest.mark.parametrize(("model", "mesh", "settings", "words"), REFUSED)
def test_what_does_not_divide_is_refused(
    model: Any, mesh: Mapping[str, int], settings: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(make(model, **mesh), Megatron(**settings))
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlap_param_gather": True}, "overlap_param_gather.*use_distributed_optimizer"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_expert_capacity_factor"),
        ({"moe_expert_capacity_factor": 0.0}, "above 0"),
        ({"ddp_bucket_size": 0}, "ddp_bucket_size"),
        ({"recompute_method": "odd"}, "uniform or block"),
        (
            {"recompute_granularity": Granularity.SELECTIVE, "recompute_modules": "mlp,x"},
            "recompute_modules.*x.*core_attn",
        ),
        (
            {
                "decoder_first_pipeline_num_layers": 1,
                "account_for_loss_in_pipeline_split": True,
            },
            "account_for",
        ),
        (
            {"calculate_per_token_loss": True, "ddp_average_in_collective": True},
            "ddp_average_in_collective",
        ),
    ],
)
def test_settings_that_exclude_each_other(settings: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Megatron(**settings)


def test_batches_of_a_tutorial_that_do_not_divide_name_what_would() -> None:
    """AICB's README: GPT-7B, global batch 16, 4096 ranks of which 1024 read data."""
    model = find_model("gpt-7b")
    with pytest.raises(ConfigError) as caught:
        Job(model=model, parallel=ParallelConfig(tp=4, dp_shard=1024), mbs=1, gbs=16)
    assert "global-batch" in str(caught.value)
    assert "1 x 1024 = 1024" in str(caught.value)
    assert str(caught.value).endswith("e.g. 1024")


def test_embedding_and_head_take_a_layers_place_only_where_that_divides() -> None:
    model = find_model("llama-3.1-405b")
    mesh = {"tp": 8, "pp": 16, "dp_shard": 2}
    settings = Megatron(sequence_parallel=True, virtual_pipeline_model_parallel_size=8)
    program = workload(make(model, microbatches=16, **mesh), settings)
    assert [len(stage.layers) for stage in program.stages] == [7, *[8] * 14, 7]
    assert any(
        "126 layers + embedding + head = 16 stages x 8 chunks" in note for note in program.notes
    )
    assert program.stages[0].layers == (15, 31, 47, 63, 79, 95, 111)
    with pytest.raises(ConfigError, match=r"pp.*12.*126 layers"):
        workload(make(model, microbatches=12, tp=8, pp=12, dp_shard=2), Megatron())


def test_only_what_has_an_effect_is_noted() -> None:
    program = workload(make(), Megatron(sequence_parallel=True))
    assert any("sequence_parallel has no effect" in note for note in program.notes)
    odd = replace(DENSE, vocab_size=500)
    program = workload(make(odd), Megatron())
    assert program.model is not None
    assert program.model.vocab_size == 512
    assert program.notes == ("vocabulary padded from 500 to 512",)
    assert workload(make(), Megatron()).notes == ()


@bounds(max_examples=100, deadline=None)
@given(
    st.sampled_from((DENSE, EXPERTS, LATENT)),
    st.fixed_dictionaries(
        {name: st.integers(1, 6) for name in ("tp", "pp", "cp", "ep", "dp_shard")}
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "sequence_parallel": st.booleans(),
            "use_distributed_optimizer": st.booleans(),
            "overlap_grad_reduce": st.booleans(),
            "overlap_param_gather": st.booleans(),
            "virtual_pipeline_model_parallel_size": st.integers(1, 3),
            "ddp_bucket_size": st.integers(1, 10**5),
            "decoder_first_pipeline_num_layers": st.integers(0, 5),
            "decoder_last_pipeline_num_layers": st.integers(0, 5),
            "account_for_embedding_in_pipeline_split": st.booleans(),
            "account_for_loss_in_pipeline_split": st.booleans(),
            "cp_comm_type": st.sampled_from(CpComm),
            "expert_tensor_parallel_size": st.integers(1, 4),
            "moe_expert_capacity_factor": st.floats(0.1, 4),
            "moe_router_dtype": st.sampled_from(RouterDtype),
            "recompute_granularity": st.sampled_from(Granularity),
            "recompute_method": st.sampled_from(("uniform", "block")),
            "recompute_num_layers": st.integers(1, 5),
        },
    ),
)
def test_any_job_is_a_workload_or_refused(
    model: Any, mesh: dict[str, int], settings: dict[str, Any]
) -> None:
    try:
        program = workload(make(model, **mesh), Megatron(**settings))
    except ConfigError:
        return
    program.check()
    for stage in range(len(program.stages)):
        assert program.num_operations(stage) == sum(1 for _ in program.expand(stage))
