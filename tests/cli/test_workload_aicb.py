"""AICB's parameters: each means what ours means, or says in one line that it has no effect."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.options import options
from stepmark.workloads.workload_flags import NO_EFFECT, options_class

from .workload_program import AICB, Program, program, refused

# AICB's names are get_params' and its scripts' at 23eec3c, and those of its older tutorial.
DENSE = (
    "--num-layers 8 --hidden-size 256 --num-heads 8 --seq-len 128 --vocab-size 5000 "
    "--world-size 16"
)
MOE = f"{DENSE} --tp 2 --sp --num-experts 8"
MLA = "--q-lora-rank 64 --kv-lora-rank 32 --qk-nope-head-dim 32 --qk-rope-head-dim 16"
ZERO = f"--framework deepspeed {DENSE} --gbs 32"
SAME = [
    (DENSE, "--frame Megatron", "--framework megatron --model-name custom"),
    (DENSE, "--comm_frame=DeepSpeed", "--framework deepspeed"),
    (DENSE, "--frame DeepSeek", "--framework megatron --model-name custom"),
    (DENSE, "--tensor_model_parallel_size 4", "--tp 4"),
    (DENSE, "--tp_num 4", "--tp 4"),
    (DENSE, "--pipeline_model_parallel 2", "--pp 2"),
    (DENSE, "--pp_num=2", "--pp 2"),
    (DENSE, "--context-parallel-size 2", "--cp 2"),
    (DENSE, "--global_batch 64", "--gbs 64"),
    (DENSE, "--micro_batch 2", "--mbs 2"),
    (DENSE, "--batch_size 2", "--mbs 2"),
    (DENSE, "--dtype float16", "--dtype fp16"),
    (DENSE, "--ffn_hidden_size 640", "--ffn-hidden-size 640"),
    (DENSE, "--model_name GPT-X", "--model-name GPT-X"),
    (DENSE, "--max_position_embeddings 8192", "--max-positions 8192"),
    (DENSE, "--make_vocab_size_divisible_by 256", "--make-vocab-size-divisible-by 256"),
    (DENSE, "--add_bias_linear", "--linear-bias"),
    (DENSE, "--swiglu", "--swiglu --ffn-hidden-size 640"),
    (DENSE, "--tp 2 --enable_sequence_parallel", "--tp 2 --sequence-parallel"),
    (DENSE, "--tp 2 --sp", "--tp 2 --sequence-parallel"),
    (DENSE, "--tp 2 --enable_sequence_parallel=True", "--tp 2 --sequence-parallel"),
    (DENSE, "--use-distributed-optimizer", "--use-distributed-optimizer"),
    (DENSE, "--overlap_grad_reduce", "--overlap-grad-reduce"),
    (DENSE, "--recompute_activations", "--recompute-granularity selective"),
    (DENSE, "--recompute", "--recompute-granularity selective"),
    (MOE, "--expert_model_parallel_size 4", "--ep 4"),
    (MOE, "--moe_enable --ep 4", "--ep 4"),
    (MOE, "--moe_router_topk 4", "--top-k 4"),
    (MOE, "--topk 4", "--top-k 4"),
    (MOE, "--n_dense_layers 1", "--dense-layers 1"),
    (MOE, "--n_dense_layer 1", "--dense-layers 1"),
    (MOE, "--n_shared_expert 2", "--shared-experts 2"),
    (
        DENSE,
        "--q_lora_rank 64 --kv_lora_rank 32 --qk_nope_dim 32 --qk_rope_dim 16 --v_head_dim 32",
        f"{MLA} --v-head-dim 32",
    ),
    (ZERO, "--stage 1", "--stage 1"),
    (ZERO, "--zero_stage 2", "--stage 2"),
    (ZERO, "--reduce_bucket_size 1000000", "--reduce-bucket-size 1e6"),
    (
        ZERO,
        "--stage 2 --allgather_bucket_size 1000000",
        "--stage 2 --allgather-bucket-size 1e6",
    ),
    (ZERO, "--prefetch_bucket_size 100000", "--stage3-prefetch-bucket-size 100000"),
    (ZERO, "--param_persistence_threshold 99", "--stage3-param-persistence-threshold 99"),
    (ZERO, "--model_persistence_threshold 9", "--stage3-model-persistence-threshold 9"),
    (ZERO, "--max_live_parameters 1000000", "--stage3-max-live-parameters 1e6"),
    (ZERO, "--max-live-parameters 1000000", "--stage3-max-live-parameters 1e6"),
]
WIDTHS = {
    "--num_layers 4": "--num-layers 4",
    "--hidden_size 128": "--hidden-size 128",
    "--num_attention_heads 4": "--num-heads 4",
    "--seq_length 64": "--seq-len 64",
    "--seq_len=64": "--seq-len 64",
    "--vocab_size 900": "--vocab-size 900",
    "--world_size 4": "--world-size 4",
}


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("base", "theirs", "ours"),
    [*SAME, *((DENSE, theirs, ours) for theirs, ours in WIDTHS.items())],
    ids=lambda words: words if words != DENSE else "",
)
def test_a_name_of_aicbs_means_what_ours_means(
    run: Program, base: str, theirs: str, ours: str
) -> None:
    one, other = run.made(f"{base} {theirs}"), run.made(f"{base} {ours}")
    assert one.out == other.out
    assert "without effect" not in one.err
    if theirs not in ("--frame Megatron", "--frame DeepSeek"):  # what is the default anyway
        if base not in _BASES:
            _BASES[base] = run.made(base).out
        assert one.out != _BASES[base]


_BASES: dict[str, bytes] = {}


def test_experts_of_the_script(run: Program) -> None:
    ours = run.made(f"{DENSE} --tp 2 --sp --num-experts 8 --top-k 2 --ep 2")
    theirs = run.made(f"{DENSE} --tp 2 --sp --moe_enable --experts 8 --topk 2 --ep 2")
    assert theirs.out == ours.out


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "fsdp"])
def test_the_others_say_that_they_have_no_effect(run: Program, framework: str) -> None:
    title = f"Settings of {framework}"
    own = [one for one in options(options_class(framework)) if one.group == title]
    known = {one.name for one in own}
    known |= {word.lstrip("-").replace("-", "_") for one in own for word in one.words}
    # --recompute without a value is --recompute-activations, which Megatron-LM has.
    known |= {"recompute"} | ({"recompute_activations"} if framework == "megatron" else set())
    there = [name for name in NO_EFFECT if name not in known]
    base = f"--framework {framework} {DENSE}"
    plain = run.made(base)
    words = [f"--{name}" + ("" if _is_switch(run, framework, name) else " 1") for name in there]
    dashed = [word.replace("_", "-") for word in words]
    done = run.made(f"{base} {' '.join(words if framework != 'fsdp' else dashed)}")
    assert done.out == plain.out
    (said,) = re.findall(r"^# AICB's parameters without effect here: (.+)$", done.err, re.M)
    assert said.split(", ") == [f"--{name.replace('_', '-')}" for name in there]
    assert len(there) > 20


def _is_switch(run: Program, framework: str, name: str) -> bool:
    if framework not in _HELP:
        _HELP[framework] = run(f"generate --framework {framework} --help-all").text
    found = re.search(rf"--{name.replace('_', '-')}( [A-Z]+)?\s", _HELP[framework])
    assert found, name
    return not found[1]


_HELP: dict[str, str] = {}


TUTORIAL = [
    "-m 13 --world_size 8 --tp_num 8 --pp_num 1 --comm_frame Megatron --global_batch 2 "
    "--micro_batch 1 --seq_length 4096 --swiglu --use_flash_attn --aiob_enable",
    "-m 7 --world_size 4096 --tp_num 4 --pp_num 1 --comm_frame Megatron --global_batch 8192 "
    "--micro_batch 1 --seq_length 4096 --swiglu --use_flash_attn --aiob_enable "
    f"--comp_filepath {AICB / 'aiob_example.txt'}",
    "--comm_frame=DeepSpeed --stage=2 --world_size=16 --global_batch=16 --epoch_num=1 "
    "--num_layers=40 --hidden_size=5120 --ffn_hidden_size=13824 --num_attention_heads=40 "
    "--reduce_bucket_size=500000000 --allgather_bucket_size=500000000",
    "--comm_frame=Megatron --world_size=16 --tp_num=8 --micro_batch=1 --global_batch=2 "
    "--epoch_num=1 --swiglu --num_layers=40 --hidden_size=5120 --ffn_hidden_size=13824 "
    "--num_attention_heads=40 --enable_sequence_parallel --seq_len=4096 --vocab_size=32000 "
    "--aiob_enable=True",
]


@pytest.mark.parametrize("line", TUTORIAL, ids=["quick start", "simulation", "ZeRO 2", "own"])
def test_the_tutorials_commands(run: Program, line: str) -> None:
    workload = run.made(line).workload
    workload.check()
    said = re.search(r"--world_size[ =](\d+)", line)
    assert said
    assert workload.world_size == int(said[1])


def test_the_tutorials_own_example_cannot_be(run: Program) -> None:
    """Global batch 16 on 1024 data ranks: AICB writes a step of no micro-batch."""
    done = run(
        "generate --model_name GPT-13B --comm_frame=Megatron --world_size=2048 --tp_num=2 "
        "--pp_num=1 --global_batch=16 --micro_batch=1 --num_layers=40 --seq_length=2048 "
        "--hidden_size=5120 --epoch_num=1 --use-distributed-optimizer "
        "--num_attention_heads=40 --aiob_enable --use_flash_attn --swiglu -o w.json"
    )
    refused(done, "global-batch 16", "1 x 1024 = 1024", "e.g. 1024")
    assert not Path("w.json").exists()


# (layers, hidden) of scripts/megatron_workload_with_aiob.sh and, of DeepSeek, of the models.
SIZES = {
    "7": (36, 4096),
    "13": (40, 5120),
    "22": (48, 6144),
    "65": (80, 8192),
    "175": (96, 12288),
    "405": (128, 16384),
    "moe": (32, 4096),
    "deepseek16": (27, 2048),
    "236": (60, 5120),
    "671": (61, 7168),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Program, size: str) -> None:
    experts = "--moe_enable --num_experts 8" if size == "moe" else ""
    model = run.made(f"-m {size} {experts} --world-size 8").workload.model
    assert model
    assert (model.num_layers, model.hidden_size) == SIZES[size]


@pytest.mark.parametrize(("size", "layers"), [("7", 32), ("13", 40), ("30", 60), ("65", 80)])
def test_sizes_of_deepspeed_are_llamas(run: Program, size: str, layers: int) -> None:
    model = run.made(f"--frame DeepSpeed -m {size} --world_size 8").workload.model
    assert model
    assert (model.num_layers, model.norm, model.activation) == (layers, "rmsnorm", "swiglu")
