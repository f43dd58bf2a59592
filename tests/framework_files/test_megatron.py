"""Megatron-LM's arguments, in scripts and YAML."""

from pathlib import Path
from typing import Any

import pytest

from stepmark.framework_files import configuration, megatron
from stepmark.framework_files.table import Translation
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Workload
from stepmark.workloads import workload_flags
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.workload import generate

ARGUMENTS = Path(__file__).parents[2] / "validation" / "data" / "megatron_arguments.txt"
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --bf16 "
)
SCRIPT = """#!/bin/bash
GPUS=8
NODES=$((2 * 2))
TP=${TP:-2}
DTYPE="fp8"
MODEL=(
    --num-layers 4   # a comment with a ) and a '
    --hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --seq-length 64 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size 512
)
TRAINING="--micro-batch-size 1 --global-batch-size 64 --bf16"
if [[ "$DTYPE" == "fp8" ]]; then
    MODEL+=("--fp8-format hybrid")
else
    MODEL+=(--fp16)
fi
[ -d /data ] && echo there
torchrun --nproc_per_node $GPUS --nnodes=$NODES pretrain_gpt.py \\
    ${MODEL[@]} $TRAINING --tensor-model-parallel-size $TP --save "$CHECKPOINTS/a b"
"""


def read(text: str, folder: Path, name: str = "train.sh") -> Translation:
    path = folder / name
    path.write_text(text)
    return configuration.read(str(path))


def job(text: str, folder: Path, **options: Any) -> Workload:
    path = folder / "train.sh"
    path.write_text(text)
    cls = workload_flags.options_class("megatron", has_ignored=False)
    return generate(cls(config=str(path), **options))


def test_every_argument_of_the_parser_is_known() -> None:
    names = {line for line in ARGUMENTS.read_text().splitlines() if line.startswith("--")}
    assert len(names) == 865
    assert names <= megatron.known_names()


def test_every_option_is_one_of_ours() -> None:
    for kind in configuration.KINDS.values():
        cls = workload_flags.options_class(kind.table.framework, has_ignored=False)
        names = {option.name for option in workload_flags.options(cls)} | {"grad_accum"}
        assert {entry.option for entry in kind.table.entries.values()} - {""} <= names


def test_a_script_is_read_without_running_it(tmp_path: Path) -> None:
    file = read(SCRIPT, tmp_path)
    expected = {
        "num_layers": "4",
        "num_kv_heads": "2",
        "vocab_size": "512",
        "fp8_format": "hybrid",
        "dtype": "bf16",
        "gbs": "64",
        "tp": "2",
        "world_size": "32",
    }
    assert {name: file.options[name] for name in expected} == expected
    assert any("save" in note for note in file.notes)


def test_the_workload_is_that_of_the_same_flags(tmp_path: Path) -> None:
    cls = workload_flags.options_class("megatron", has_ignored=False)
    typed = generate(
        cls(
            framework="megatron",
            num_layers=4,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            seq_len=64,
            max_positions=64,
            vocab_size=512,
            linear_bias=True,
            mbs=1,
            gbs=64,
            tp=2,
            world_size=32,
            fp8_format="hybrid",
            hidden_dropout=0.1,
        )
    )
    assert job(SCRIPT, tmp_path).blocks == typed.blocks


def test_flags_win(tmp_path: Path) -> None:
    made = job(SCRIPT, tmp_path, tp=4, gbs=128, precision="bf16")
    assert made.settings["tensor_model_parallel_size"] == 4
    assert made.settings["fp8_format"] == "none"
    assert made.num_sequences == 128


def test_a_named_model_replaces_the_architecture(tmp_path: Path) -> None:
    made = job(SCRIPT, tmp_path, model="llama-3.1-8b")
    assert made.model is not None
    assert made.model.num_layers == 32
    assert made.model.seq_len == 64


def test_yaml_of_functional_tests(tmp_path: Path) -> None:
    lines = [f"  {word}" for word in ("--num-layers: 12", "--hidden-size: 64", "--bf16: true")]
    lines += ["  --num-attention-heads: 4", "  --sequence-parallel: false"]
    file = read("\n".join(("MODEL_ARGS:", *lines, "TEST_TYPE: regular")), tmp_path, "m.yaml")
    assert file.options["num_layers"] == "12"
    assert "sequence_parallel" not in file.options


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("", "vocab_size", None),  # asked for
        ("--merge-file m", "vocab_size", "50257"),  # of GPT2BPETokenizer alone
        ("--tokenizer-type Llama2Tokenizer", "vocab_size", "32000"),
        ("--padded-vocab-size 1000", "make_vocab_size_divisible_by", "1"),
        ("--padded-vocab-size 1000", "vocab_size", "1000"),
        (
            "--recompute-granularity full --recompute-activations",
            "recompute_granularity",
            "selective",
        ),
        ("", "max_positions", "64"),
        ("--position-embedding-type rope", "max_positions", "0"),
        ("--num-query-groups 2", "num_kv_heads", None),  # only with --group-query-attention
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--recompute-modules core_attn mlp", "recompute_modules", "core_attn,mlp"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj",
            "offload_modules",
            "core_attn,attn_proj",
        ),
        ("--num-experts 8 --moe-layer-freq ([0]*1+[1]*3)", "dense_layers", "1"),
        ("--num-experts 8 --moe-layer-freq 1", "dense_layers", "0"),
        ("--num-experts 8", "moe_token_dispatcher_type", "allgather"),
        (
            "--num-experts 8 --moe-token-dispatcher-type flex",
            "moe_token_dispatcher_type",
            "flex",
        ),
        (
            "--num-experts 8 --moe-token-dispatcher-type flex"
            " --moe-flex-dispatcher-backend hybridep",
            "moe_token_dispatcher_type",
            "alltoall",
        ),
        ("--num-experts 8 --moe-router-num-groups 4", "expert_groups", "4"),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2",
            "top_groups",
            "2",
        ),
        ("--multi-latent-attention", "kv_lora_rank", "32"),
        ("--kv-lora-rank 7", "kv_lora_rank", None),
        ("--no-overlap-p2p-communication", "overlap_p2p_comm", "False"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "virtual_pipeline_model_parallel_size",
            "2",
        ),
    ],
)
def test_arguments_mean_what_validate_args_makes_of_them(
    words: str, option: str, value: str | None, tmp_path: Path
) -> None:
    assert read(GPT + words, tmp_path).options.get(option) == value


def test_defaults_are_those_of_megatron(tmp_path: Path) -> None:
    defaults = read(GPT, tmp_path).defaults
    assert defaults["hidden_dropout"] == "0.1"
    assert defaults["linear_bias"] == "True"
    assert defaults["norm"] == "layernorm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layerz 4", "num-layerz 4 is invalid: did you mean num-layers?"),
        ("--moe-latent-size 64", "moe-latent-size 64 is invalid: it must be left out"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-size 1000",
            "vocab-size-of-another-tokenizer 1000 is invalid",
        ),
        ("--optimizer sgd", "optimizer sgd is invalid: it must be"),
        ("--use-megatron-fsdp", "use-megatron-fsdp"),
        ("--cpu-offloading-num-layers 2", "depends on the version of TransformerEngine"),
        ("--num-experts 8 --moe-layer-freq ([1]*1+[0]*3)", "moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq __import__('os')", "moe-layer-freq"),
        ("--num-layers-per-virtual-pipeline-stage 3", "num-layers-per-virtual-pipeline-stage"),
    ],
)
def test_what_is_refused_is_named(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(GPT + words, tmp_path)
    assert message in str(error.value)


def test_an_error_names_the_key_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.sh: global-batch-size 8 is invalid"):
        job(GPT + "--vocab-size 512", tmp_path, world_size=64)


def test_an_unknown_vocabulary_is_asked_for(tmp_path: Path) -> None:
    text = GPT + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model a/b"
    with pytest.raises(ConfigError, match="vocab-size is missing"):
        job(text, tmp_path)
    made = job(text, tmp_path, vocab_size=1000)
    assert made.model is not None
    assert made.model.vocab_size == 1024  # padded


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--num-experts 8", "no-moe-grouped-gemm"),
        ("--multi-latent-attention", "no-qk-layernorm-of-mla"),
        ("--log-num-zeros-in-grad", "log-num-zeros-in-grad"),
        ("--timing-log-level 2", "timing-log-level"),
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size 9", "vocab-size-with-tokenizer"),
    ],
)
def test_what_a_step_lacks_is_noted(words: str, key: str, tmp_path: Path) -> None:
    notes = read(GPT + words, tmp_path).notes
    assert any(note.startswith("not modelled") and key in note for note in notes)


def test_a_padded_vocabulary_is_not_padded(tmp_path: Path) -> None:
    made = job(GPT + "--padded-vocab-size 1000", tmp_path)
    assert made.model is not None
    assert made.model.vocab_size == 1000


def test_written_scripts_have_what_megatron_needs(tmp_path: Path) -> None:
    made = generate(
        workload_flags.options_class("megatron", has_ignored=False)(
            framework="megatron",
            model="deepseek-v3",
            world_size=64,
            ep=64,
            gbs=64,
        )
    )
    script = "".join(FORMATS["megatron-args"].load().write(made))
    for argument in (
        "--tokenizer-type NullTokenizer",
        "--qk-layernorm",
        "--moe-grouped-gemm",
        "--moe-router-score-function sigmoid",
        "--attention-dropout 0",
    ):
        assert f"    {argument}\n" in script


def test_another_framework_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(GPT)
    cls = workload_flags.options_class("deepspeed", has_ignored=False)
    with pytest.raises(ConfigError, match="framework deepspeed is invalid"):
        generate(cls(framework="deepspeed", config=str(path)))


def test_a_script_without_a_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "conf.sh"
    path.write_text("MODEL_ARGS='--num-layers 4 --hidden-size 512'\n")
    with pytest.raises(ConfigError, match="a script that starts a Python file with arguments"):
        configuration.read(str(path))


def test_both_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("python pretrain_gpt.py --num-layers 4 --bf16 --fp16\n")
    with pytest.raises(ConfigError, match="left out with --bf16"):
        configuration.read(str(path))


def test_gradients_that_are_not_clipped_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    for clip, is_noted in (("0.0", True), ("1.0", False)):
        path.write_text(f"python pretrain_gpt.py {GPT} --clip-grad {clip}\n")
        notes = configuration.read(str(path)).notes
        assert any("no-clip-grad" in note for note in notes) is is_noted


@pytest.mark.parametrize(
    "flags", [{"pp": 4}, {"num_layers": 8}, {"model": "llama-3.1-8b", "vocab_size": None}]
)
def test_layers_of_a_virtual_stage_fix_what_chunks_depend_on(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    text = f"python pretrain_gpt.py {GPT} --pipeline-model-parallel-size 2 "
    text += "--num-layers-per-virtual-pipeline-stage 1"
    sized: dict[str, Any] = {"world_size": 8, "vocab_size": 512}
    assert job(text, tmp_path, **sized).settings["virtual_pipeline_model_parallel_size"] == 2
    with pytest.raises(ConfigError, match="virtual-pipeline-model-parallel-size"):
        job(text, tmp_path, **sized | flags)
    job(text, tmp_path, **sized | flags, virtual_pipeline_model_parallel_size=1)


def test_an_argument_whose_variable_is_empty_is_named(tmp_path: Path) -> None:
    for script in (f"python pretrain_gpt.py {GPT} --vocab-size $1", f"{GPT} --normalization"):
        with pytest.raises(ConfigError, match="a variable behind it may be empty"):
            read(script, tmp_path)
    assert (
        read(f"python pretrain_gpt.py {GPT} --swiglu $1", tmp_path).options["swiglu"] == "True"
    )


@pytest.mark.parametrize(
    "program",
    [
        "pretrain_bert.py",
        "x/pretrain_t5.py",
        "run_text_generation_server.py",
        "-m a.offline_inference",
    ],
)
def test_programs_of_other_models_are_refused(program: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one that trains a GPT"):
        read(f"torchrun {program} {GPT}", tmp_path)
    for other in ("pretrain_gpt.py", "x/train.py", "pretrain_llama.py", "-m a.pretrain"):
        assert read(f"torchrun {other} {GPT}", tmp_path).options["num_layers"] == "4"


def test_arguments_without_a_program_are_told(tmp_path: Path) -> None:
    lines = f"{GPT}\n--swiglu"
    for text, is_told in ((lines, True), (f"python pretrain_gpt.py {GPT}", False)):
        notes = read(text, tmp_path).notes
        assert any("program: the file names none" in note for note in notes) is is_told
    with pytest.raises(ConfigError, match="this family of models is not modelled"):
        read(f"{GPT} --bert-no-binary-head", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"MODEL_ARGS": {"--num-layers": 4}, "--hidden-size": 64}',
            "--hidden-size outside is",
        ),
        (
            '{"--num-layers": 4, "num-layers": 8}',
            "num-layers 8 is invalid: it must be given once",
        ),
    ],
)
def test_arguments_of_yaml_are_given_once_and_in_their_section(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text, tmp_path, "job.json")
