"""What Megatron-LM would refuse, or cannot divide, is one line that says what would fit."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.layers import Layer
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.narrow import Fp8Format
from stepmark.workloads.rules.megatron.pipeline_layout import chunks_of
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.rules.megatron.settings import (
    AttentionBackend,
    CpComm,
    Granularity,
    RouterDtype,
)

from .jobs import DENSE, EXPERTS, LATENT, PREDICTING, SINKS, SLIDING, comms, make

SP = {"sequence_parallel": True}
SIZES = "hierarchical_context_parallel_sizes"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
# Model, mesh, settings, and words that the refusal has to have.
REFUSED: list[tuple[Any, Mapping[str, int], Mapping[str, Any], str]] = [
    (DENSE, {"tp": 3}, {}, "tp.*3.*heads"),
    (replace(PREDICTING, max_positions=64), {}, {}, "max_positions.*rotary.*multi-token"),
    (replace(PREDICTING, tied_embeddings=True), {"pp": 2}, {}, "pp.*tied embeddings"),
    (PREDICTING, {"cp": 2}, {}, "cp.*multi-token.*not modelled"),
    (LATENT, {"cp": 2}, {"cp_comm_type": CpComm.A2A}, "cp_comm_type a2a.*narrower than keys"),
    (LATENT, {"cp": 2}, {"cp_comm_type": CpComm.ALL_GATHER}, "all_gather.*narrower than keys"),
    (
        replace(DENSE, num_kv_heads=2),
        {"cp": 4},
        {"cp_comm_type": CpComm.A2A},
        r"cp 4 .*divisor of a rank's heads \(8\) and kv_heads \(2\)",
    ),
    *(
        (
            DENSE,
            {"cp": cp},
            {"cp_comm_type": CpComm.A2A_P2P, SIZES: sizes},
            f"{SIZES} .*{words}",
        )
        for cp, sizes, words in (
            (4, "", r"two numbers from 2 whose product is cp \(4\)"),
            (4, "4,1", "two numbers"),
            (4, "2,4", "two numbers"),
            (4, "2,2,1", "two numbers"),
            (1, "2,2", "two numbers"),
            (16, "8,2", r"8 .*divisor of a rank's heads \(8\) and kv_heads \(4\)"),
        )
    ),
    (
        SLIDING,
        {"cp": 4},
        {"cp_comm_type": CpComm.A2A_P2P, SIZES: "2,2"},
        r"cp_comm_type a2a\+p2p .*sliding windows",
    ),
    (SLIDING, {"cp": 2}, {}, "cp_comm_type p2p .*a2a or all_gather with sliding windows"),
    (SINKS, {"cp": 2}, {"cp_comm_type": CpComm.ALL_GATHER}, "all_gather .*a2a with attention"),
    (
        SINKS,
        {"cp": 2},
        {"cp_comm_type": CpComm.A2A, "attention_backend": AttentionBackend.FLASH},
        "attention_backend flash .*auto or fused with attention sinks",
    ),
    (
        replace(DENSE, pattern=(Layer(chunk=16), Layer())),
        {"cp": 2},
        {"cp_comm_type": CpComm.A2A},
        "cp 2 .*chunks",
    ),
    (
        replace(DENSE, pattern=(Layer(window=16, num_kv_heads=2), Layer())),
        {"cp": 4},
        {"cp_comm_type": CpComm.A2A},
        r"cp 4 .*and kv_heads \(2\)",
    ),
    (
        PREDICTING,
        {},
        {"recompute_granularity": Granularity.FULL, "recompute_num_layers": 2},
        "recompute_num_layers 2.*multi-token",
    ),
    (PREDICTING, {}, {"fp8_format": Fp8Format.HYBRID}, "fp8_recipe delayed.*multi-token"),
    (
        PREDICTING,
        {"ep": 2, "dp_shard": 2},
        {"overlap_moe_expert_parallel_comm": True},
        "overlap_moe_expert_parallel_comm.*multi-token",
    ),
    (
        replace(DENSE, num_heads=12, num_kv_heads=6),
        {"tp": 4},
        {},
        "tp 4 is invalid: it must be a divisor or multiple of small's kv_heads \\(6\\)",
    ),
    (
        replace(DENSE, num_heads=32, num_kv_heads=1),
        {"tp": 32},
        {},
        "tp 32 is invalid: it must be a divisor of the rows of keys and values \\(16\\)",
    ),
    (DENSE, {"pp": 9}, {}, "pp.*9.*divides 8 layers \\(1, 2, 4, 8; .*2, 5, 10\\)"),
    (replace(DENSE, seq_len=60), {"tp": 4, "cp": 2}, SP, "seq-len.*60"),
    (replace(DENSE, seq_len=62), {"cp": 2}, {}, "seq-len.*62.*4"),
    (DENSE, {"ep": 2, "dp_shard": 2}, {}, "ep.*no experts"),
    (EXPERTS, {"tp": 2}, {}, "sequence_parallel"),
    (replace(DENSE, attention_bias=True), {}, {}, "attention_bias.*--linear-bias"),
    (EXPERTS, {"ep": 4, "dp_shard": 2}, {}, "ep.*4.*tp x cp x dp \\(2\\)"),
    (EXPERTS, {"ep": 3, "dp_shard": 3}, {}, "ep.*3.*8 experts"),
    (EXPERTS, {"dp_shard": 2}, {"expert_tensor_parallel_size": 3}, r"expert tp \(3\)"),
    (
        DENSE,
        {"dp_shard": 2, "dp_replicate": 2},
        {},
        "dp-replicate 2 is invalid: "
        "it must be 1 without use_distributed_optimizer: give that, or dp-shard 4",
    ),
    (
        DENSE,
        {"pp": 4},
        {FIRST: 1},
        "^decoder_first_pipeline_num_layers 1 is invalid: "
        "it must be a number that leaves equal parts of 8 layers",
    ),
    (
        DENSE,
        {"pp": 4},
        {FIRST: 8},
        "first.* 8 is invalid: it must be a number that leaves equal parts .* not none",
    ),
    (
        DENSE,
        {"pp": 4},
        {FIRST: 1, LAST: 4},
        "first.* 1 is inv.* leaves equal parts .*, with decoder_last_pipeline_num_layers 4",
    ),
    (
        DENSE,
        {"pp": 2},
        {FIRST: 3, LAST: 4},
        "a number that adds up to 8 layers over pp 2, with .*last.* 4",
    ),
    (
        DENSE,
        {},
        {LAST: 4},
        "last.* 4 is invalid: it must be a number that adds up to 8 layers over pp 1",
    ),
    (
        replace(DENSE, num_layers=10),
        {"pp": 4},
        {FIRST: 1, "virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size.*2.*1 layers",
    ),
    (
        DENSE,
        {},
        {
            "recompute_granularity": Granularity.SELECTIVE,
            "recompute_modules": "core_attn,mla_up_proj",
        },
        "recompute_modules mla_up_proj is invalid: .* left out for a model without latent",
    ),
    (
        DENSE,
        {},
        {"accumulate_allreduce_grads_in_fp32": False},
        "accumulate_allreduce_grads_in_fp32 .* without fp16; with bf16 grad_reduce_in_bf16",
    ),
    (
        DENSE,
        {"cp": 2},
        {"attention_backend": AttentionBackend.UNFUSED},
        "attention_backend unfused is invalid: it must be auto, flash or fused with cp > 1",
    ),
    (
        DENSE,
        {},
        {"attention_backend": AttentionBackend.LOCAL, "fp8_format": Fp8Format.HYBRID},
        "attention_backend local is invalid: .* auto, flash, fused or unfused with narrow",
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
        ({"moe_expert_capacity_factor": math.nan}, "above 0"),
        (
            {"moe_aux_loss_coeff": -1.0},
            "moe_aux_loss_coeff -1.0 is invalid: it must be 0 or more",
        ),
        ({"moe_aux_loss_coeff": math.inf}, "0 or more"),
        (
            {
                "moe_pad_expert_input_to_capacity": True,
                "moe_expert_capacity_factor": -1.0,
            },
            "only with moe_expert_capacity_factor",
        ),
        ({"hidden_dropout": 1.0}, "hidden_dropout 1.0 is invalid: .* from 0 to below 1"),
        ({FIRST: 0}, "decoder_first_pipeline_num_layers 0 is invalid: it must be 1 or more"),
        ({LAST: 0}, "decoder_last_pipeline_num_layers 0 is invalid: it must be 1 or more"),
        ({"ddp_bucket_size": 0}, "ddp_bucket_size"),
        ({"recompute_method": "odd"}, "uniform or block"),
        (
            {"recompute_granularity": Granularity.SELECTIVE, "recompute_modules": "mlp,x"},
            "recompute_modules.*x.*core_attn",
        ),
        (
            {LAST: 1, "account_for_loss_in_pipeline_split": True},
            "^account_for_loss_in_pipeline_split is invalid: "
            "it works only without decoder_last_",
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


@pytest.mark.parametrize("dtype", sorted(set(DType) - {DType.FP32, DType.BF16, DType.FP16}))
def test_only_types_that_are_modelled_are_taken(dtype: DType) -> None:
    with pytest.raises(
        ConfigError, match=f"dtype {dtype} is invalid: it must be fp32, bf16 or fp16"
    ):
        workload(replace(make(), dtype=dtype), Megatron())


def test_a_capacity_below_zero_is_none() -> None:
    assert Megatron(moe_expert_capacity_factor=-1.0) == Megatron()


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "sizes"),
    [
        (61, 16, 1, [4] * 15 + [1]),
        (29, 4, 1, [8, 8, 8, 5]),
        (26, 4, 2, [6, 6, 6, 8]),
        (8, 3, 1, [3, 3, 2]),
    ],
)
def test_a_last_stage_has_what_the_others_leave(
    layers: int, pp: int, chunks: int, sizes: list[int]
) -> None:
    """As in NVIDIA's recipe of DeepSeek-V3: 61 layers on 16 stages."""
    job = make(replace(DENSE, num_layers=layers), pp=pp, microbatches=pp)
    settings = {"virtual_pipeline_model_parallel_size": chunks}
    program = workload(job, Megatron(**settings))
    assert [len(stage.layers) for stage in program.stages] == sizes
    (note,) = (note for note in program.notes if "do not divide" in note)
    assert f"--decoder-last-pipeline-num-layers {sizes[-1]}" in note
    given = workload(job, Megatron(**settings, **{LAST: sizes[-1]}))
    assert (given.blocks, given.stages) == (program.blocks, program.stages)


@pytest.mark.parametrize(
    ("pp", "chunks", "layout"),
    [
        # Megatron-Bridge's recipes of Kimi K2 and DeepSeek-V3, without m.
        (4, 4, "Et*4|(t*4|)*14tL"),
        (2, 8, "Et*4|(t*4|)*14tL"),
        (4, 2, "Et*8|(t*8|)*6,t*5L"),
        (8, 4, "Et|(tt|)*30L"),
    ],
)
def test_a_last_chunk_has_what_the_others_leave(pp: int, chunks: int, layout: str) -> None:
    job = make(replace(DENSE, num_layers=61), pp=pp, microbatches=pp)
    program = workload(job, Megatron(virtual_pipeline_model_parallel_size=chunks))
    given = workload(job, Megatron(pipeline_model_parallel_layout=layout))
    assert (given.blocks, given.stages) == (program.blocks, program.stages)
    assert given.settings["virtual_pipeline_model_parallel_size"] == chunks
    (note,) = (note for note in program.notes if "do not divide" in note)
    written = note.partition("layout '")[2].partition("'")[0]
    assert chunks_of(written) == chunks_of(layout)


def test_a_layout_places_layers_in_order_through_all_first_chunks() -> None:
    job = make(replace(DENSE, num_layers=6), pp=2, microbatches=2)
    program = workload(job, Megatron(pipeline_model_parallel_layout="Et|tt||tttL"))
    assert [stage.layers for stage in program.stages] == [(0,), (1, 2, 3, 4, 5)]
    assert [(stage.has_embedding, stage.has_head) for stage in program.stages] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            "Et*8L",
            r"model_parallel_layout Et\*8L .* multiple of pp \(2\) parts, not 1",
        ),
        ("Et*4|t*3L", r"8 layers \(t\), not 7"),
        ("Et*4|t*4mL", "0 of m, as many as --num-mtp-layers, not 1"),
        ("Et*4|x*4L", "not x"),
        ("t*4|t*4L", "one E at its beginning and one L at its end"),
        ("Et*4|t*4LL", "one E at its beginning and one L at its end"),
        ("Et*4|(t*999999|)*9999L", "at most 1000000 layers"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        workload(make(pp=2), Megatron(pipeline_model_parallel_layout=layout))


@pytest.mark.parametrize(
    ("layout", "words"),
    [("Et*4|t*4L", "1 of m, as many as --num-mtp-layers, not 0"), ("Et*4m|t*4L", "before L")],
)
def test_multi_token_prediction_is_before_the_head(layout: str, words: str) -> None:
    model = replace(DENSE, num_mtp_layers=1)
    with pytest.raises(ConfigError, match=words):
        workload(make(model, pp=2), Megatron(pipeline_model_parallel_layout=layout))
    settings = Megatron(pipeline_model_parallel_layout="Et*5|t*3mL")
    program = workload(make(model, pp=2), settings)
    assert [stage.layers for stage in program.stages] == [(0, 1, 2, 3, 4), (5, 6, 7)]
    lookups = [sum(op.module == "embedding" for op in program.expand(i)) for i in (0, 1)]
    assert lookups[0] == lookups[1] > 0


def test_a_layout_excludes_other_splits() -> None:
    layout = "Et*4|t*4L"
    with pytest.raises(ConfigError, match=f"only without {LAST}"):
        Megatron(pipeline_model_parallel_layout=layout, decoder_last_pipeline_num_layers=4)
    settings = Megatron(
        pipeline_model_parallel_layout=layout, virtual_pipeline_model_parallel_size=2
    )
    words = r"virtual_pipeline_model_parallel_size 2 .* left out, or the layout's \(1\)"
    with pytest.raises(ConfigError, match=words):
        workload(make(pp=2), settings)


def test_batches_of_a_tutorial_that_do_not_divide_name_what_would() -> None:
    """AICB's README: GPT-7B, global batch 16, 4096 ranks of which 1024 read data."""
    model = find_model("gpt-7b")
    with pytest.raises(ConfigError) as caught:
        Job(model=model, parallel=ParallelConfig(tp=4, dp_shard=1024), mbs=1, gbs=16)
    assert "gbs" in str(caught.value)
    assert "1 x 1024 = 1024" in str(caught.value)
    assert str(caught.value).endswith("e.g. 1024.")


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
    uneven = workload(make(model, microbatches=12, tp=8, pp=12, dp_shard=2), Megatron())
    assert [len(stage.layers) for stage in uneven.stages] == [*[11] * 11, 5]


def test_only_what_has_an_effect_is_noted() -> None:
    odd = replace(DENSE, vocab_size=500)
    program = workload(make(odd), Megatron())
    assert program.model is not None
    assert program.model.vocab_size == 512
    assert program.notes == ("vocabulary padded from 500 to 512",)
    assert workload(make(), Megatron()).notes == ()


@pytest.mark.parametrize(
    ("seq_len", "mesh", "settings", "noted"),
    [
        (131_072, {"tp": 2}, {}, "16 GiB"),
        (32_768, {"tp": 2}, {}, "1 GiB"),
        (16_384, {"tp": 2}, {}, ""),
        (131_072, {}, {}, ""),
        (131_072, {"tp": 2}, {"create_attention_mask_in_dataloader": False}, ""),
    ],
)
def test_a_large_mask_is_noted(
    seq_len: int, mesh: dict[str, int], settings: dict[str, Any], noted: str
) -> None:
    job = make(replace(DENSE, seq_len=seq_len), mbs=1, **mesh)
    program = workload(job, Megatron(**settings))
    largest = max((one.call_bytes() for one in comms(program, 0, "data")), default=0)
    assert [f"mask, {largest / 2**30:g} GiB," in note for note in program.notes] == (
        [True] if noted else []
    )
    assert all(
        f" {noted}, is broadcast over tp; --no-create-attention-mask-in" in note
        for note in program.notes
    )


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_two_optimizers_gather_twice_and_say_so(ep: int, overlapped: bool) -> None:
    """Every parameter once by all-gather, or twice where each of two optimizers gathers all."""
    settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": overlapped}
    settings["overlap_param_gather"] = overlapped
    program = workload(make(EXPERTS, ep=ep, dp_shard=4), Megatron(**settings))
    sent = dict.fromkeys(("all_gather", "reduce_scatter"), 0)
    for op in comms(program, 0, "gradients", "parameters"):
        sent[op.collective] += op.count * program.groups[op.group].size
    twice = ep > 1 and not overlapped
    assert sent["all_gather"] == sent["reduce_scatter"] * (2 if twice else 1)
    assert [note.startswith("parameters are gathered twice") for note in program.notes] == (
        [True] if twice else []
    )


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


def test_only_megatron_shares_kv_heads() -> None:
    """torch divides the heads of keys and values over tp, so each rank needs one of its own."""
    job = make(tp=8)
    assert workload(job, Megatron()).stages
    with pytest.raises(ConfigError, match=r"tp 8 is invalid: .* divisor .* kv_heads \(4\)"):
        RULES["fsdp"].workload(job, RULES["fsdp"].make())
