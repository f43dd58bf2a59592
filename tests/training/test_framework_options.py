"""A framework's file as options of `train`: the step is the one that the file describes."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.framework_files.test_round_trips import draw, written
from tests.parsing import parse

from stepmark.cases.train_case import TrainCase
from stepmark.cli.main import status
from stepmark.framework_files.configuration import KINDS
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import machine
from stepmark.runs.run import step_case
from stepmark.runs.run_options import RunOptions
from stepmark.step.workload import Workload
from stepmark.store.commands import command_of
from stepmark.training import framework_options, train, train_plan
from stepmark.training.framework_table import OWN_WAY, REFUSED, USED
from stepmark.training.train_options import TrainOptions
from stepmark.workloads import workload_flags
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.workload import generate

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
DEBUG = str(EXAMPLES / "torchtitan-debugmodel.toml")
PROGRAM = ("groups", "blocks", "stages", "world_size", "num_microbatches")
MEGATRON = """
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64
--num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --bf16 --swiglu
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 1000
--use-distributed-optimizer --overlap-grad-reduce
"""
ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    megatron(Path("megatron.sh"))
    Path("zero.json").write_text(json.dumps(ZERO))
    Path("fsdp.yaml").write_text(ACCELERATE)
    text = Path(DEBUG).read_text()
    Path("unknown.toml").write_text(text.replace('"debugmodel"', '"9B"'))
    Path("unclipped.toml").write_text(text.replace("max_norm = 1.0", "max_norm = 0"))


def megatron(path: Path, **arguments: str) -> Path:
    """Write a script with these arguments instead of, or beside, its own; "-": left out."""
    words = MEGATRON.split()
    for name, value in arguments.items():
        argument = f"--{name.replace('_', '-')}"
        if argument in words:
            start = words.index(argument)
            end = start + 1 + (start + 1 < len(words) and not words[start + 1].startswith("--"))
            del words[start:end]
        words += [argument, value] if value != "-" else []
    path.write_text(" ".join(words))
    return path


def plan(words: str, device: str = "cpu") -> tuple[list[TrainCase], tuple[str, ...]]:
    """Return the cases of a command line, and the notes."""
    options = parse(TrainOptions, [*shlex.split(words), "--device", device])
    planned = train.plan(options, machine(device, dry_run=True))
    return [entry.case for entry in planned.entries], planned.notes


def case_of(words: str, device: str = "cpu") -> TrainCase:
    (case,), _ = plan(words, device)
    return case


def of_file(framework: str, path: Path, ranks: int, **options: Any) -> Workload:
    cls = workload_flags.options_class(framework, has_ignored=False)
    return generate(cls(config=str(path), world_size=ranks, **options))


def trained(path: Path, ranks: int, *models: str) -> TrainCase | None:
    """Return the case of a file on H200; None where `train` refuses it."""
    options = TrainOptions(models=(str(path), *models), nproc=str(ranks), device="h200")
    try:
        job = framework_options.with_file(options, machine("h200", dry_run=True))
        with job.naming_keys():
            return train_plan.only_case(job.options, "cuda", ranks)
    except ConfigError:
        return None


def written_job(
    framework: str, seed: int, factory: pytest.TempPathFactory
) -> tuple[Path, Workload] | None:
    """Return the file of a layout that is drawn, and its workload; None: no file can be."""
    drawn = draw(framework, seed)
    try:
        return drawn and (written(drawn, framework, factory.mktemp("written")), drawn)
    except ConfigError:
        return None


@given(seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_of_pytorchs_files_every_operation_is_the_workloads(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = written_job("pytorch", seed, tmp_path_factory)
    case = job and trained(job[0], job[1].world_size)
    # Over torchtitan's weights in fp32 `generate` has products in bf16, which no step has.
    if job is None or case is None or case.precision == "fp32":
        return
    path, drawn = job
    step = of_case(case)
    # train has one product for q, k and v, and does not time the start of a job.
    is_ddp = case.data_parallel == "ddp"
    more = {"fuse_qkv": True} | ({"init_sync": False} if is_ddp else {})
    workload = of_file("pytorch", path, drawn.world_size, **more)
    assert [getattr(step, part) for part in PROGRAM] == [
        getattr(workload, part) for part in PROGRAM
    ]
    assert case.tokens_per_step * case.grad_accum == workload.tokens


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_of_other_frameworks_model_ranks_and_batches_are_the_workloads(
    framework: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = written_job(framework, seed, tmp_path_factory)
    models = ("llama-3.1-8b",) if framework == "deepspeed" else ()
    case = job and trained(job[0], job[1].world_size, *models)
    if job is None or case is None:
        return
    path, drawn = job
    more = {"model": models[0]} if models else {}
    workload = of_file(framework, path, drawn.world_size, **more)
    assert workload.model is not None
    assert dataclasses.replace(case.model, name="model") == dataclasses.replace(
        workload.model, name="model"
    )
    assert case.num_ranks == workload.world_size
    assert case.parallel.pp == len(workload.stages)
    assert case.tokens_per_step * case.grad_accum == workload.tokens
    assert case.num_microbatches * case.grad_accum == workload.num_microbatches


def test_each_option_of_a_file_is_used_refused_or_pytorchs_own_way() -> None:
    options = {
        entry.option for kind in KINDS.values() for entry in kind.table.entries.values()
    } - {""}
    used = [name for names in USED.values() for name in names]
    table = [*used, *OWN_WAY, *REFUSED]
    assert sorted(table) == sorted(options)
    assert set(USED) <= {field.name for field in dataclasses.fields(TrainOptions)}


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (f"{DEBUG} --nproc 2", ("fsdp", 2, 2, 2)),
        (f"{DEBUG} --nproc 1", ("single", 1, 2, 4)),
        ("megatron.sh", ("fsdp x tp2", 4, 1, 4)),
        ("megatron.sh --nproc 2", ("tp2", 2, 1, 8)),
        ("megatron.sh --pp 2", ("tp2 x pp2", 4, 8, 1)),
        ("megatron.sh --tp 1", ("fsdp", 4, 1, 2)),
        ("megatron.sh --mbs 2", ("fsdp x tp2", 4, 2, 2)),
        ("megatron.sh --mbs 2 --grad-accum 1", ("fsdp x tp2", 4, 2, 1)),
        ("megatron.sh --strategy ddp --tp 1", ("ddp", 4, 1, 2)),
        ("zero.json gpt2-125m --nproc 2", ("fsdp", 2, 2, 3)),
        ("gpt2-125m --config zero.json --nproc 4", ("fsdp", 4, 2, 3)),
        ("fsdp.yaml --model gpt2-125m", ("fsdp", 4, 1, 1)),
    ],
)
def test_flags_win_over_the_file(words: str, shape: tuple[str, int, int, int]) -> None:
    case = case_of(words)
    assert (case.strategy, case.num_ranks, case.mbs, case.grad_accum) == shape


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (DEBUG, "recompute_blocks", (1, 2)),
        (f"{DEBUG} --ac none", "recompute", "none"),
        (f"{DEBUG} --seq-len 16", "seq_len", 16),
        (DEBUG, "precision", "amp"),
        (f"{DEBUG} --precision fp32", "precision", "fp32"),
        (f"{DEBUG} --compile", "compile", "block"),
        ("megatron.sh", "reshard", "no"),
        ("megatron.sh --reshard yes", "reshard", "yes"),
        ("megatron.sh", "vocab_size", 1024),
        ("megatron.sh --tp 4", "vocab_size", 1024),
        ("zero.json gpt2-125m --nproc 2", "reshard", "yes"),
        ("zero.json gpt2-125m --nproc 2", "reduce_dtype", "bf16"),
        ("zero.json gpt2-125m --nproc 2 --precision fp32", "reduce_dtype", "fp32"),
        ("zero.json gpt2-125m --nproc 2", "clip", 0.0),
        ("fsdp.yaml gpt2-125m", "reduce_dtype", "bf16"),
    ],
)
def test_techniques_are_the_files_or_the_flags(words: str, field: str, value: object) -> None:
    case = case_of(words)
    assert getattr(case if hasattr(case, field) else case.model, field) == value


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"use_distributed_optimizer": "-"}, {"data_parallel": "fsdp"}),
        (
            {"use_distributed_optimizer": "-", "tensor_model_parallel_size": "1"},
            {"data_parallel": "ddp"},
        ),
        ({"grad_reduce_in_bf16": ""}, {"reduce_dtype": "bf16"}),
        ({"recompute_granularity": "full"}, {"recompute": "full"}),
        ({"attention_backend": "unfused"}, {"attention": "math"}),
        (
            {"pipeline_model_parallel_size": "2", "num_virtual_stages_per_pipeline_rank": "2"},
            {"pp_schedule": "interleaved", "pp_microbatches": 8, "pp_split": "even"},
        ),
        (
            {
                "pipeline_model_parallel_size": "2",
                "num_virtual_stages_per_pipeline_rank": "4",
                "num_layers": "8",
            },
            {"pp_schedule": "interleaved", "pp_stages": 4},
        ),
        ({"bf16": "-"}, {"precision": "fp32"}),
    ],
)
def test_megatrons_arguments(arguments: dict[str, str], fields: dict[str, Any]) -> None:
    case = case_of(str(megatron(Path("own.sh"), **arguments)))
    assert {name: getattr(case, name) for name in fields} == fields


@pytest.mark.parametrize(
    "words",
    [
        f"{DEBUG} --nproc 2",
        f"{DEBUG} --nproc 2 --ac none --clip 1",
        f"{DEBUG} --nproc 2 --compile",
        "unclipped.toml",
        "unclipped.toml --clip 1",
        "megatron.sh",
        "megatron.sh --tp 1 --reshard yes",
        "megatron.sh --pp 2",
        "fsdp.yaml gpt2-125m",
    ],
)
def test_the_command_of_a_case_plans_the_same_case(words: str) -> None:
    case = case_of(words)
    _, verb, *again = shlex.split(command_of(case))
    assert verb == "train"
    assert case_of(shlex.join(again)).case_id == case.case_id


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("zero.json", "--model is missing: give a name beside zero.json, which names none"),
        ("zero.json megatron.sh", "one framework's file"),
        ("gpt2-125m --config none.toml", "a file that exists"),
        ("gpt2-125m --config gpt2-125m", "a file that exists"),
        ("megatron.sh --nproc 3", "--nproc 3 is invalid"),
        ("megatron.sh --tp 3", "world-size 4 is invalid: it must be a multiple of --tp (3)"),
        ("megatron.sh --mbs 3", "megatron.sh: global-batch-size 8 is invalid"),
        ("megatron.sh --mbs 1,2", "only with --grad-accum"),
        (
            "megatron.sh --find-batch",
            "--find-batch is invalid: it works only with --grad-accum",
        ),
        ("megatron.sh --strategy ddp,tp", "--strategy ddp,tp is invalid: it must be one"),
        ("megatron.sh --strategy single", "megatron.sh: world-size 4 is invalid"),
        ("megatron.sh --async-tp", "--async-tp is invalid: it works only with --compile"),
        ("selective.sh", "recompute-granularity selective is invalid: it must be full or none"),
        ("fp16.sh", "fp16.sh: dtype fp16 is invalid: it must be bf16 or fp32"),
        ("unknown.toml", 'unknown.toml: model.flavor "torchtitan\'s llama3 9B" is invalid'),
        ("unknown.toml --model gpt2-126m", "--model gpt2-126m is invalid"),
        ("tokenizer.sh", "tokenizer.sh: vocab-size is missing"),
        ("offload.json gpt2-125m", "offload_optimizer.device cpu is invalid: it must be none"),
        ("auto.json gpt2-125m", "left to a trainer: give --precision"),
    ],
)
def test_refused_by_name(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    megatron(Path("selective.sh"), recompute_granularity="selective")
    megatron(Path("fp16.sh"), bf16="-", fp16="")
    megatron(Path("tokenizer.sh"), vocab_size="-", tokenizer_type="HuggingFaceTokenizer")
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    Path("offload.json").write_text(json.dumps(ZERO | {"zero_optimization": offload}))
    Path("auto.json").write_text(json.dumps(ZERO | {"bf16": {"enabled": "auto"}}))
    assert status(["train", *shlex.split(words), "--device", "cpu", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_find_batch_is_instead_of_the_files_batch() -> None:
    cases, _ = plan("megatron.sh --find-batch --grad-accum 2")
    assert [case.mbs for case in cases][:3] == [1, 2, 3]
    assert {case.grad_accum for case in cases} == {2}


@pytest.mark.parametrize("flags", ["--ac none", "--ac selective"])
def test_a_flag_is_instead_of_what_is_refused(flags: str) -> None:
    path = megatron(Path("selective.sh"), recompute_granularity="selective")
    assert case_of(f"{path} {flags}").strategy == "fsdp x tp2"


def test_notes_tell_the_framework_and_what_is_not_used() -> None:
    _, notes = plan("megatron.sh")
    text = "\n".join(notes)
    assert "PyTorch trains Megatron-LM's job" in text
    assert "ways of its own: overlap-grad-reduce true" in text
    assert "padded to 1024" in text
    Path("always.toml").write_text(
        Path(DEBUG).read_text().replace('forward = "default"', 'forward = "always"')
    )
    _, notes = plan("always.toml --nproc 1")
    assert "layout: parallelism.fsdp_reshard_after_forward always" in "\n".join(notes)


def test_torchtitans_ranks_are_its_axes(tmp_path: Path) -> None:
    text = Path(DEBUG).read_text()
    Path("ddp.toml").write_text(text.replace("replicate_degree = 1", "replicate_degree = 2"))
    assert case_of("ddp.toml").strategy == "ddp"
    assert case_of("ddp.toml --nproc 4").strategy == "hsdp"
    Path("four.toml").write_text(text.replace("shard_degree = -1", "shard_degree = 4"))
    assert case_of("four.toml").num_ranks == 4
    assert case_of("four.toml --tp 2").num_ranks == 8
    assert case_of("four.toml --nproc 2").num_ranks == 2


@pytest.mark.parametrize("words", ["--nproc 2", "--nproc 2 --tp 2", ""])
def test_run_trains_the_same_step(words: str) -> None:
    options = parse(RunOptions, [DEBUG, *words.split(), "--device", "cpu"])
    notes: list[str] = []
    case = step_case(options, machine("cpu"), notes)
    # Without a number of ranks the main job has two on a CPU.
    assert case.case_id == case_of(f"{DEBUG} {words or '--nproc 2'}").case_id
    assert "q, k and v are one product, where torchtitan has three" in notes
