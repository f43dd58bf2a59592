"""Steps of packed sequences: attention is of pieces, all else of tokens."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases import flops
from stepmark.framework_files import megatron, torchtitan
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Attention
from stepmark.model.packing import Packing
from stepmark.predictions.costs import SheetCosts
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.step_memory.megatron_memory import stage_memories
from stepmark.timeline.step_cost import Source
from stepmark.workloads.formats.framework_keys import keys_of
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.megatron.rule import Megatron, workload
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

from .megatron.jobs import DENSE, SINKS, SLIDING, make

LAW = Packing(mean=10, longest=32)
SFT: dict[str, Any] = {"create_attention_mask_in_dataloader": False}
MEGATRON: dict[str, Any] = {"framework": "megatron", **SFT}
FSDP: dict[str, Any] = {"framework": "fsdp"}
MODEL: dict[str, Any] = {
    "model": "llama-3.1-8b",
    **{"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2},
    **{"ffn_hidden_size": 128, "vocab_size": 512, "seq_len": 64, "world_size": 8},
}


def made(flags: Mapping[str, Any], packing: Packing | None = LAW) -> Workload:
    values = MODEL | dict(flags) | {"packing": packing}
    return generate(options_class(values["framework"])(**values))


def ops(program: Workload, kind: type) -> list[Any]:
    return [
        op
        for stage in range(len(program.stages))
        for op in program.expand(stage)
        if isinstance(op, kind)
    ]


def attention(program: Workload) -> list[Attention]:
    return [op.op for op in ops(program, ComputeOp) if isinstance(op.op, Attention)]


def rest(program: Workload) -> list[Any]:
    """Return all that is neither attention nor the boundaries of pieces."""
    return [
        op
        for op in [*ops(program, ComputeOp), *ops(program, CommOp)]
        if not (isinstance(op, ComputeOp) and isinstance(op.op, Attention))
        and op.module != "data"
    ]


@pytest.mark.parametrize(
    "flags",
    [
        MEGATRON | {"tp": 2},
        MEGATRON | {"cp": 2},
        MEGATRON | {"pp": 2, "gbs": 16},
        FSDP | {"tp": 2},
        {"framework": "ddp"},
    ],
)
def test_attention_alone_depends_on_pieces(flags: Mapping[str, Any]) -> None:
    plain, packed = made(flags, None), made(flags)
    assert rest(packed) == rest(plain)
    assert packed.model is not None
    share = LAW.pairs_per_token() / (MODEL["seq_len"] / 2)
    counted = sum(op.flops for op in attention(packed))
    whole = sum(op.flops for op in attention(plain))
    # Pairs of an operator are rounded to one.
    assert counted == pytest.approx(share * whole, rel=0.01)
    assert packed.notes[0].startswith("packing 10,32: lengths of pieces are assumed to have")
    assert "at least to 5 (equal pieces) and at most to 16 " in packed.notes[0]


def test_a_step_has_the_flops_that_its_tokens_count() -> None:
    job = make(replace(DENSE, seq_len=256, packing=Packing(mean=100, longest=256)), mbs=1)
    program = workload(job, Megatron(**SFT))
    counted = sum(op.flops for op in attention(program)) / job.num_microbatches
    per_token = sum(flops.attention(job.model, layer) for layer in job.model.layers)
    assert counted == pytest.approx(3 * per_token * 256, rel=1e-4)


@pytest.mark.parametrize("flags", [MEGATRON | {"tp": 2}, FSDP])
def test_pieces_as_long_as_sequences_are_the_plain_step(flags: Mapping[str, Any]) -> None:
    whole = Packing(mean=64, longest=64)
    assert native.encode(made(flags, whole)) == native.encode(made(flags, None))


@pytest.mark.parametrize("flags", [MEGATRON | {"cp": 2}, FSDP])
def test_a_file_describes_its_job(flags: Mapping[str, Any]) -> None:
    program = native.decode(native.encode(made(flags)))
    assert program.model is not None
    assert program.model.packing == LAW
    described = RULES[program.rules].job_of(program)
    assert described is not None
    again = RULES[program.rules].workload(*described)
    assert (again.blocks, again.groups) == (program.blocks, program.groups)


def test_memory_does_not_depend_on_pieces() -> None:
    jobs = [make(replace(DENSE, packing=law), mbs=1) for law in (None, LAW)]
    one, two = (stage_memories(job, Megatron(**SFT)) for job in jobs)
    assert one == two


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_passes_the_same_bytes_and_has_all_pairs(cp: int) -> None:
    """Each rank has an equal part of each piece."""
    model = replace(DENSE, packing=Packing(mean=20, longest=64))
    alone = sum(op.flops for op in attention(workload(make(model, mbs=1), Megatron(**SFT))))
    program = workload(make(model, mbs=1, cp=cp), Megatron(**SFT))
    assert cp * sum(op.flops for op in attention(program)) == pytest.approx(alone, rel=0.01)
    plain = workload(make(mbs=1, cp=cp), Megatron(**SFT))
    assert ops(program, CommOp) == ops(plain, CommOp)


def test_windows_count_within_pieces() -> None:
    model = replace(SLIDING, packing=Packing(mean=30, longest=64))
    programs = workload(make(model, mbs=1), Megatron(**SFT))
    windows = {op.window: op.pairs for op in attention(programs)}
    assert set(windows) == {0, 16}
    for window, pairs in windows.items():
        law = Packing(mean=30, longest=64).pairs_per_token(window)
        assert pairs == round(64 * law)


def boundaries(program: Workload) -> list[tuple[int, str]]:
    return [(op.count, str(op.dtype)) for op in ops(program, CommOp) if op.module == "data"]


def test_boundaries_of_pieces_are_broadcast_over_tp() -> None:
    """get_batch_on_this_tp_rank: number, boundaries and the longest, on one stage twice."""
    one = make(replace(DENSE, packing=LAW), mbs=1, microbatches=1, tp=2)
    tokens = [(64, "int64"), (64, "int64"), (64, "fp32"), (64, "int64")]
    pieces = [(1, "int64"), (7, "int32"), (1, "int32")]  # six pieces of ten tokens
    assert boundaries(workload(one, Megatron(**SFT))) == [*tokens, *pieces, *pieces]
    staged = make(replace(DENSE, packing=LAW), mbs=1, microbatches=2, tp=2, pp=2)
    last = [
        op
        for op in workload(staged, Megatron(**SFT)).expand(1)
        if isinstance(op, CommOp) and op.module == "data" and op.microbatch == 0
    ]
    assert [(op.count, str(op.dtype)) for op in last] == [tokens[1], tokens[2], *pieces]


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_stages_without_boundaries_in_the_script_are_noted(pp: int, chunks: int) -> None:
    job = make(replace(DENSE, packing=LAW), mbs=1, microbatches=4, pp=pp)
    settings = Megatron(**SFT, virtual_pipeline_model_parallel_size=chunks)
    notes = [note for note in workload(job, settings).notes if "no boundaries" in note]
    assert len(notes) == (pp * chunks > 2)


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    (MEGATRON | {"mbs": 2}, "mbs 2 .*1 with packing"),
    ({"framework": "megatron"}, "create_attention_mask_in_dataloader .*false with packing"),
    (MEGATRON | {"attention_backend": "local"}, "attention_backend local .*with packing"),
    (MEGATRON | {"attention_backend": "unfused"}, "attention_backend unfused .*with packing"),
    (MEGATRON | {"cp": 2, "cp_comm_type": "a2a"}, "cp_comm_type a2a .*p2p with packing"),
    (MEGATRON | {"cp": 2, "cp_comm_type": "all_gather"}, "all_gather .*p2p with packing"),
    (FSDP | {"cp": 2}, "cp 2 .*1 with packing"),
    (FSDP | {"attention_backend": "flash1"}, "attention_backend flash1 .*with packing"),
    (FSDP | {"trainer": "llm-foundry"}, "trainer llm-foundry .*stepmark with packing"),
    ({"framework": "deepspeed"}, "packing 10,32 .*left out"),
    (FSDP | {"seq_len": 16}, r"packing 10,32 .*at most seq_len \(16\)"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_what_packed_sequences_cannot_be_with(flags: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(flags)


def test_a_ring_needs_pieces_that_all_its_ranks_divide() -> None:
    rule = r"packing 10,30 .*multiple of 2 x cp \(4\)"
    with pytest.raises(ConfigError, match=rule):
        made(MEGATRON | {"cp": 2}, Packing(mean=10, longest=30))


def test_sinks_have_no_kernel_of_packed_sequences_in_transformer_engine() -> None:
    job = make(replace(SINKS, packing=LAW), mbs=1)
    with pytest.raises(ConfigError, match=r"packing 10,32 .*left out with attention sinks"):
        workload(job, Megatron(**SFT))


def test_times_are_of_kernels_that_mask_pieces() -> None:
    """FlexAttention's in PyTorch, FlashAttention-2's where it is chosen (varlen_attn)."""
    device = load_devices()["h100-sxm"]
    law = Packing(mean=1000, longest=4096)

    def seconds(packing: Packing | None, **flags: Any) -> float:
        values = {"seq_len": 8192, "head_dim": 128} | flags
        program = made(values, packing)
        costs = SheetCosts(device, program.settings)
        (op,) = {
            op
            for op in ops(program, ComputeOp)
            if isinstance(op.op, Attention)
            and op.phase == "fwd"
            and op.layer in (0, None)
            and op.microbatch in (0, None)
        }
        cost = costs(op)
        assert cost is not None
        assert (cost.source is Source.RULE) is (packing is not None)
        return cost.total_s

    flex = seconds(law, **FSDP)
    flash = seconds(law, **FSDP, attention_backend="flash")
    auto = seconds(law, **MEGATRON)
    assert auto < flex < flash
    assert flash < seconds(None, **FSDP, attention_backend="flash")
    assert flex == seconds(law, **FSDP, attention_backend="flex")


SCRIPT = """pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8
--position-embedding-type rope --vocab-size 512 --bf16 --transformer-impl transformer_engine
--no-create-attention-mask-in-dataloader --sft
"""
TITAN = """[model]
name = "llama3"
flavor = "debugmodel"
attn_mask_type = "block_causal"
[training]
local_batch_size = 1
seq_len = 64
"""


TABLES = {"megatron": megatron.TABLE, "fsdp": torchtitan.TABLE}


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("sft.args", SCRIPT.replace("\n", " "), "sft true"),
        ("job.toml", TITAN, "model.attn_mask_type block_causal"),
    ],
)
def test_files_with_packed_data_need_their_lengths(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    flags: dict[str, Any] = {"config": str(path), "world_size": 8}
    framework = "megatron" if "sft" in name else "fsdp"
    cls = options_class(framework)
    with pytest.raises(ConfigError, match=f"{key} .*with --packing, which the file does not"):
        generate(cls(**flags))
    program = generate(cls(**flags, packing=LAW))
    assert {op.packing for op in attention(program)} == {LAW}
    with pytest.raises(ConfigError, match="packing a file of a framework can say"):
        keys_of(program, TABLES[framework])
