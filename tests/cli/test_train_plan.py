"""From the flags of `stepmark train` to cases: what is planned, what is refused, and why."""

import dataclasses
import itertools
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.parsing import parse

from stepmark.cases.fields import former_values
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Fp8, Precision, Recompute
from stepmark.cli.main import status
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, plain
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.runs import dry_run, run
from stepmark.step_memory.memory import estimate
from stepmark.store.commands import command_of
from stepmark.training import train, train_plan, train_refusals
from stepmark.training.train_options import STRATEGIES, TrainOptions

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = ["gpt2-125m", "--device", "cpu"]
LLAMA = ["llama-3.1-8b", "--device", "cpu"]
MOE = ["qwen3-30b-a3b", "--device", "cpu"]
TINY = ["--scale", "tiny"]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not (tmp_path / "runs").exists(), "a plan must not start a run"


def plan(words: list[str]) -> list[TrainCase]:
    """The cases of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        cases: list[TrainCase] = []
        patch.setattr(
            dry_run, "show", lambda plan, *_: cases.extend(each.case for each in plan.entries)
        )
        assert status(["train", *words, "--dry-run"]) == 0
        return cases


def one(words: list[str]) -> TrainCase:
    (case,) = plan(words)
    return case


def test_a_plain_command_is_one_rank_on_a_cpu() -> None:
    case = one(GPT)
    assert (case.num_ranks, case.strategy, case.mbs) == (1, "single", 1)
    assert (case.precision, case.reduce_dtype, case.workers) == ("fp32", "fp32", 0)
    assert (case.device, case.backend) == ("cpu", "gloo")
    assert (case.schedule, case.grad_accum, case.grad_sync) == ("step", 1, "every")
    assert (case.compile, case.fp8, case.recompute) == ("none", "none", "none")
    assert (case.data, case.attention, case.clip, case.lr) == ("random", "auto", 1.0, 3e-4)


def test_defaults_on_accelerators() -> None:
    plain = parsed(["llama-3.1-8b"])
    (case,) = train_plan.cases(plain, "cuda", 8)
    assert (case.strategy, case.parallel) == ("fsdp", ParallelConfig(dp_shard=8))
    assert (case.precision, case.reduce_dtype, case.workers) == ("amp", "fp32", 2)
    assert (case.device, case.backend) == ("cuda", "nccl")
    assert train_plan.default_nproc(plain, "cuda") == "all"
    single = parsed(["llama-3.1-8b", "--strategy", "single"])
    assert train_plan.default_nproc(single, "cuda") == "1"
    words = ["llama-3.1-8b", "--strategy", "ddp"]
    (ddp,) = train_plan.cases(parsed(words), "cuda", 8)
    assert ddp.reduce_dtype == "fp32"
    (low,) = train_plan.cases(parsed([*words, "--precision", "bf16"]), "cuda", 8)
    assert low.reduce_dtype == "bf16"


@pytest.mark.parametrize(
    ("words", "axes", "strategy"),
    [
        ("--strategy single", {}, "single"),
        ("--nproc 1", {}, "single"),
        ("--nproc 4", {"dp_shard": 4}, "fsdp"),
        ("--strategy ddp", {"dp_replicate": 2}, "ddp"),
        ("--strategy ddp --nproc 4", {"dp_replicate": 4}, "ddp"),
        ("--strategy fsdp", {"dp_shard": 2}, "fsdp"),
        (
            "--strategy fsdp --nproc 8 --dp-replicate 2",
            {"dp_replicate": 2, "dp_shard": 4},
            "hsdp",
        ),
        ("--strategy fsdp --dp-replicate 2 --nproc 4 --reshard yes", {}, "hsdp"),
        ("--strategy tp --nproc 4", {"tp": 4}, "tp4"),
        ("--tp 2 --nproc 2", {"tp": 2}, "tp2"),
        ("--strategy tp", {"tp": 2}, "tp2"),
        ("--strategy tp --pp 2 --nproc 4", {"tp": 2, "pp": 2}, "tp2 x pp2"),
        ("--strategy pp --tp 2 --nproc 4", {"tp": 2, "pp": 2}, "tp2 x pp2"),
        ("--strategy fsdp --tp 2 --nproc 8", {"tp": 2, "dp_shard": 4}, "fsdp x tp2"),
        ("--strategy fsdp --tp 2", {"tp": 2, "dp_shard": 2}, "fsdp x tp2"),
        ("--strategy fsdp --pp 2 --nproc 4", {"pp": 2, "dp_shard": 2}, "fsdp x pp2"),
        ("--strategy cp", {"cp": 2}, "ddp x cp2"),
        ("--strategy cp --nproc 4", {"cp": 4}, "ddp x cp4"),
        ("--cp 2 --nproc 2", {"cp": 2}, "ddp x cp2"),
        ("--strategy ddp --cp 2 --nproc 4", {"dp_replicate": 2, "cp": 2}, "ddp x cp2"),
        ("--strategy fsdp --cp 2", {"dp_shard": 2, "cp": 2}, "fsdp x cp2"),
        ("--strategy fsdp --cp 2 --nproc 2", {"dp_shard": 1, "cp": 2}, "fsdp x cp2"),
        ("--tp 2 --cp 2 --nproc 4", {"dp_shard": 1, "tp": 2, "cp": 2}, "fsdp x tp2 x cp2"),
        (
            "--strategy fsdp --nproc 8 --dp-replicate 2 --cp 4",
            {"dp_replicate": 2, "dp_shard": 1, "cp": 4},
            "hsdp x cp4",
        ),
    ],
)
def test_how_ranks_are_divided(words: str, axes: dict[str, int], strategy: str) -> None:
    case = one([*LLAMA, *shlex.split(words)])
    assert case.strategy == strategy
    for axis, size in axes.items():
        assert getattr(case.parallel, axis) == size
    assert case.parallel.world_size == case.num_ranks


@given(
    strategy=st.sampled_from(STRATEGIES),
    spare=st.integers(1, 8),
    sizes=st.fixed_dictionaries(
        {},
        optional={name: st.integers(1, 8) for name in ("tp", "pp", "cp", "ep", "dp_replicate")},
    ),
)
def test_all_ranks_are_used_or_the_flags_refused(
    strategy: str, spare: int, sizes: dict[str, int]
) -> None:
    world = spare * math.prod(sizes.values())
    try:
        _, parallel = train_plan.layout(TrainOptions(**sizes), strategy, world)
    except ConfigError:
        return
    assert parallel.world_size == world
    for name, size in sizes.items():
        if size > 1:
            assert getattr(parallel, name) == size, name
    divides = parallel.dp_shard * parallel.cp > 1
    assert divides if strategy == "fsdp" else parallel.dp_shard == 1


def test_batches_and_models_make_cases() -> None:
    found = plan(["gpt2-125m", "llama-3.1-8b", "--device", "cpu", "--bsz", "1-2,4"])
    keys = [(case.model.name, case.mbs) for case in found]
    assert keys == list(itertools.product(("gpt2-125m", "llama-3.1-8b"), (1, 2, 4)))
    by_flag = plan(["--model", "gpt2-125m,llama-3.1-8b", "--mbs", "1,2,2,4", *GPT[1:]])
    assert [case.case_id for case in by_flag] == [case.case_id for case in found]


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("more", ["", "--fp8-recipe rowwise", "--fp8-head --compile"])
def test_precision_fp8_is_fp8(device: str, more: str) -> None:
    words = ["llama-3.1-8b", "--device", device, "--nproc", "2", *more.split()]
    (by_precision,) = plan([*words, "--precision", "fp8"])
    (by_switch,) = plan([*words, "--fp8"])
    assert by_precision == by_switch
    assert by_precision.case_id == by_switch.case_id


def test_several_strategies_are_cases_of_one_run() -> None:
    found = plan([*LLAMA, "--strategy", "ddp,fsdp,tp"])
    assert [(case.strategy, case.num_ranks) for case in found] == [
        *(("ddp", 2), ("fsdp", 2), ("tp2", 2))
    ]


def test_find_batch_tries_rising_batches() -> None:
    found = [case.mbs for case in plan([*LLAMA, "--find-batch"])]
    assert found == sorted(found)
    assert found[0] == 1
    assert len(found) > 8
    assert [c.mbs for c in plan([*LLAMA, "--find-batch", "--mbs", "8,2"])] == [2, 8]
    piped = plan([*LLAMA, "--find-batch", "--strategy", "pp", "--nproc", "4"])
    assert all(case.mbs % 4 == 0 for case in piped)


def test_files_are_models_and_the_command_names_them() -> None:
    for file, seq_len in (
        ("llm-train-bench/gpt2-1.5b.json", 1024),
        ("hf/llama-3.1-8b/config.json", 8192),
    ):
        case = one([str(EXAMPLES / file), "--device", "cpu"])
        assert (case.model_file, case.model.seq_len) == (str(EXAMPLES / file), seq_len)
        assert str(EXAMPLES / file) in command_of(case)
    folder = one([str(EXAMPLES / "hf/llama-3.1-8b"), "--device", "cpu"])
    assert folder.model.num_params == find_model("llama-3.1-8b").num_params


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--sac none", (Recompute.NONE, (1, 1))),
        ("--sac full", (Recompute.FULL, (1, 1))),
        ("--sac ops", (Recompute.OPS, (1, 1))),
        ("--ac selective", (Recompute.OPS, (1, 1))),
        ("--ac 1/4", (Recompute.BLOCKS, (1, 4))),
        ("--sac 2/4", (Recompute.BLOCKS, (2, 4))),
        ("--sac 1/1", (Recompute.FULL, (1, 1))),
        ("--sac-freq 1/4", (Recompute.BLOCKS, (1, 4))),
        ("--sac_freq 1/1", (Recompute.NONE, (1, 1))),
    ],
)
def test_which_blocks_are_computed_again(
    words: str, expected: tuple[Recompute, tuple[int, int]]
) -> None:
    case = one([*LLAMA, *words.split()])
    assert (case.recompute, case.recompute_blocks) == expected


def test_flags_of_llm_train_bench() -> None:
    ours = "--mbs 4 --workers 3 --grad-accum 4 --fp8 --compile --compile-mode reduce-overhead"
    ours += " --strategy fsdp --sac 1/4 --steps 8"
    for dash in "-_":
        theirs = f"--bsz 4 --n{dash}workers 3 --grad{dash}acc{dash}steps 4 --use{dash}fp8"
        theirs += f" --pt{dash}compile --compile{dash}mode reduce-overhead --strategy fsdp"
        theirs += f" --sac{dash}freq 1/4 --n{dash}steps 8"
        found = one([*LLAMA, *theirs.split()])
        assert found == one([*LLAMA, *ours.split()])
    assert (found.compile, found.fp8, found.precision) == ("block", "tensorwise", "amp")
    assert found.fp8_all_gather
    assert not found.fp8_head


def test_micro_has_eight_steps_to_the_optimizer() -> None:
    case = one([*LLAMA, "--schedule", "micro"])
    assert (case.grad_accum, case.cycle, case.micro_steps) == (8, 8, 1)
    assert one([*LLAMA, "--schedule", "micro", "--grad-accum", "2"]).cycle == 2


def test_both_schedules_are_two_cases() -> None:
    found = plan([*LLAMA, "--schedule", "micro,step"])
    assert [(case.schedule, case.grad_accum) for case in found] == [("micro", 8), ("step", 1)]


# The law of options_of(): its words plan the same case.
SPREADS = (
    "--strategy single",
    "--strategy ddp --nproc 4",
    "--strategy fsdp --nproc 4",
    "--strategy fsdp --nproc 8 --dp-replicate 2 --tp 2",
    "--strategy tp --nproc 2",
    "--strategy pp --nproc 2 --mbs 4",
    "--strategy pp --nproc 4 --tp 2 --pp-schedule interleaved --pp-microbatches 4 --mbs 8",
    "--strategy fsdp --nproc 8 --tp 2 --pp 2 --mbs 2",
    "--strategy cp --nproc 2",
    "--strategy fsdp --nproc 4 --cp 2 --dp-replicate 2",
    "--strategy fsdp --nproc 4 --cp 2 --tp 2",
)
ANY = (
    *("", "--ac full", "--ac selective", "--sac ops", "--sac 1/4", "--sac 3/8"),
    *("--text", "--scale 1/8", "--num-layers 4", "--scale 1/8 --layers 99"),
    *("--fp8", "--fp8 --fp8-head", "--fp8 --fp8-recipe rowwise", "--precision bf16"),
    *("--precision master", "--precision fp8 --fp8-head", "--precision mxfp8 --fp8-head"),
    "--precision nvfp4",
    *("--fp8 --no-fp8-all-gather --precision bf16", "--compile", "--compile-scope model"),
    *("--compile --compile-mode max-autotune", "--attention flash", "--lr 1e-05"),
    *("--lr 0.1", "--clip 0", "--clip 0.25", "--seed 7", "--workers 5", "--seq-len 512"),
    *("--grad-accum 4", "--grad-accum 4 --grad-sync last", "--schedule micro", "--mbs 24"),
    *("--reduce-dtype fp32", "--reduce-dtype bf16", "--cuda-graph", "--loss-chunks 4"),
    *("--reshard no", "--reshard 2", "--prefetch 3", "--blocks-per-group 4"),
    *("--bucket-mb 100", "--bucket-mb 25", "--bucket-view", "--compile --async-tp"),
    *("--no-embedding-in-backward", "--tp-plan whole", "--pp-split even"),
)


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "gpt2-1.5b", "gpt2-125m", "qwen3-8b"]),
    spread=st.sampled_from(SPREADS),
    flags=st.lists(st.sampled_from(ANY), max_size=4),
)
def test_the_words_of_a_command_plan_the_same_case(
    model: str, spread: str, flags: list[str]
) -> None:
    words = [model, *spread.split(), *" ".join(flags).split(), "--device", "cpu"]
    try:
        (case,) = [again(words)]
    except ConfigError:
        assume(False)
    program, verb, *told = shlex.split(command_of(case))
    assert (program, verb) == ("stepmark", "train")
    assert again(told) == dataclasses.replace(case)
    assert again(told).case_id == case.case_id


@pytest.mark.parametrize("spread", SPREADS)
def test_the_command_of_an_earlier_case_has_what_was_its_default(spread: str) -> None:
    """What had no option then has one now, wherever it has an effect."""
    words = ["llama-3.1-8b", *spread.split(), "--device", "cpu"]
    earlier = dataclasses.replace(again(words), **former_values(TrainCase))
    planned = again(shlex.split(command_of(earlier))[2:])
    assert planned.case_id == earlier.case_id


def again(words: list[str]) -> TrainCase:
    """As `plan`, but errors are raised."""
    options = parsed(words)
    device = options.device or "cpu"
    (case,) = train_plan.cases(options, device, int(train_plan.default_nproc(options, device)))
    return case


def parsed(words: list[str]) -> TrainOptions:
    """The options of a command line; a plan keeps them as plain data."""
    options = parse(TrainOptions, words)
    assert build(TrainOptions, plain(options)) == options
    return options


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("flags", ANY)
def test_most_single_techniques_go_with_every_spread(spread: str, flags: str) -> None:
    """Each is planned, or refused for a reason that names it or what it needs."""
    words = ["llama-3.1-8b", *spread.split(), *flags.split(), "--device", "cpu"]
    asked = {word.removeprefix("--") for word in flags.split() if word.startswith("--")}
    try:
        case = again(words)
    except ConfigError as error:
        refused = error.field
    else:
        refused = ""
        assert again(shlex.split(command_of(case))[2:]).case_id == case.case_id
    asked |= {word.removeprefix("no-") for word in asked}
    assert refused in {"", *asked} | ({"mbs", "fp8-all-gather"} if flags else set())


REFUSED = [
    # who takes part
    (
        LLAMA,
        "--strategy magic",
        "strategy magic is invalid: it must be one of single, ddp, fsdp, tp, pp, cp",
    ),
    (
        LLAMA,
        "--strategy single --nproc 2",
        "nproc 2 is invalid: it must be 1 with --strategy single",
    ),
    (
        LLAMA,
        "--strategy single --tp 2",
        "nproc 1 is invalid: it must be a multiple of --tp (2)",
    ),
    (
        LLAMA,
        "--strategy ddp --nproc 1",
        "strategy ddp is invalid: it needs at least 2 data ranks, and has 1",
    ),
    (
        LLAMA,
        "--strategy fsdp --tp 2 --nproc 2",
        "strategy fsdp is invalid: it needs at least 2 data ranks next to --tp (2), and has 1",
    ),
    (LLAMA, "--nproc 3 --tp 2", "nproc 3 is invalid: it must be a multiple of --tp (2)"),
    (
        LLAMA,
        "--strategy tp --tp 2 --nproc 8",
        "tp 2 is invalid: it must be 8, which is what 8 ranks leave for it",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 1",
        "strategy tp is invalid: it needs at least 2 ranks, and has 1 of 1",
    ),
    (LLAMA, "--tp 0", "tp 0 is invalid: it must be from 1 to 1048576"),
    (LLAMA, "--nproc 0", "nproc 0 is invalid: it must be all, or from 1 to 1024"),
    (
        LLAMA,
        "--strategy ddp --nproc 4 --dp-replicate 2",
        "dp-replicate 2 is invalid: it must be 4 with ddp",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 4 --dp-replicate 3",
        "dp-replicate 3 is invalid: it must be a divisor of 4",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 4 --dp-replicate 4",
        "dp-replicate 4 is invalid: it must be a divisor of 4",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 2 --dp-replicate 2",
        "dp-replicate 2 is invalid: it must be 1 with tp",
    ),
    # models
    ([], "--device cpu", "model is missing: give a name, or a file"),
    (["--model", "lama-3", "--device", "cpu"], "", "model lama-3 is invalid: did you mean"),
    (LLAMA, "--model gpt2-125m", "model gpt2-125m is invalid: it must be given once"),
    (LLAMA, "--seq-len 0", "seq-len 0 is invalid: it must be from 1 to 16777216"),
    (GPT, "--seq-len 2048", "seq-len 2048 is invalid: it must be from 1 to 1024 for gpt2-125m"),
    (LLAMA, "--scale 2", "scale 2 is invalid: it must be above 0 and at most 1"),
    (LLAMA, "--mbs 0", "mbs 0 is invalid: it must be whole numbers from 1"),
    # axes and models
    (
        LLAMA,
        "--strategy tp --nproc 16",
        "tp 16 is invalid: it must be a divisor of llama-3.1-8b's kv_heads (8)",
    ),
    (
        GPT,
        "--strategy tp --nproc 5",
        "tp 5 is invalid: it must be a divisor of gpt2-125m's heads (12)",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 4 --seq-len 510",
        "tp 4 is invalid: it must be a divisor of the sequence",
    ),
    (
        MOE,
        "--strategy tp --nproc 2",
        "tp 2 is invalid: it must be 1, since qwen3-30b-a3b has experts",
    ),
    (
        LLAMA,
        "--strategy cp --nproc 2 --seq-len 510",
        "cp 2 is invalid: it must be a divisor of half the sequence length (510 / 2)",
    ),
    (
        GPT,
        "--strategy fsdp --nproc 6 --cp 3",
        "cp 3 is invalid: it must be a divisor of half the sequence length (1024 / 2)",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 4 --cp 2",
        "cp 2 is invalid: it must be 1 with tp or pp alone; with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 4 --cp 2 --mbs 2",
        "cp 2 is invalid: it must be 1 with tp or pp alone; with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy cp --nproc 4 --tp 2",
        "tp 2 is invalid: it must be 1 with ddp; with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy cp --nproc 2 --attention cudnn",
        "attention cudnn is invalid: it must be auto, flash, e",
    ),
    (
        LLAMA,
        "--strategy cp --nproc 2 --dp-replicate 2",
        "dp-replicate 2 is invalid: it must be 1 with cp",
    ),
    (
        LLAMA,
        "--strategy cp --nproc 2 --seq-len 64 --loss-chunks 64",
        "loss-chunks 64 is invalid: it must be a d",
    ),
    (
        LLAMA,
        "--tp 4 --cp 2 --nproc 8 --seq-len 20",
        "tp 4 is invalid: it must be a divisor of the sequence length 20 over 2 cp ranks",
    ),
    (
        MOE,
        "--strategy fsdp --nproc 4 --cp 2 --ep 3",
        "ep 3 is invalid: it must be a divisor of 4 FSDP ranks",
    ),
    (
        LLAMA,
        "--strategy ddp --nproc 4 --tp 2",
        "tp 2 is invalid: it must be 1 with ddp; with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy ddp --nproc 4 --pp 2 --mbs 2",
        "pp 2 is invalid: it must be 1 with ddp; with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 4 --ep 2",
        "ep 2 is invalid: it must be 1, because llama-3.1-8b has no expert",
    ),
    (
        MOE,
        "--strategy fsdp --nproc 4 --ep 3",
        "ep 3 is invalid: it must be a divisor of 4 FSDP ranks",
    ),
    (
        MOE,
        "--strategy ddp --nproc 4 --ep 2",
        "ep 2 is invalid: it must be 1, or --strategy fsdp",
    ),
    (
        MOE,
        "--strategy fsdp --nproc 256 --ep 256",
        "ep 256 is invalid: it must be a divisor of 128 experts",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 64",
        "pp 64 is invalid: it must be at most 32: llama-3.1-8b has 32 layers",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 32 --pp-schedule interleaved",
        "pp 32 is invalid: it must be at most 16: llama-3.1-8b has 32 layers for 64 stages",
    ),
    (
        GPT,
        "--strategy pp --nproc 2",
        "pp 2 is invalid: it must be 1, since gpt2-125m ties its input",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 4 --mbs 6",
        "mbs 6 is invalid: it must be a multiple of 4, because",
    ),
    (
        LLAMA,
        "--pp-microbatches 4",
        "pp-microbatches 4 is invalid: it works only with pipeline stages (--pp)",
    ),
    (
        LLAMA,
        "--pp-schedule interleaved",
        "pp-schedule interleaved is invalid: it works only with pipeline",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --pp-schedule looped",
        "pp-schedule looped is invalid: it must be one of 1f1b",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --mbs 4 --pp-schedule interleaved --pp-stages 1",
        "pp-stages 1 is invalid: it must be 2 or more with interleaved",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --mbs 4 --pp-schedule zbv --ac full",
        "ac full is invalid: it must be none with zbv, which would recompute many times",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --mbs 4 --pp-schedule zbv --compile",
        "compile block is invalid: it must be none with zbv: torch does not split",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --mbs 4 --pp-schedule zb1p --fp8",
        "pp-schedule zb1p is invalid: it must be 1f1b, interleaved or gpipe: not zb1p",
    ),
    (
        LLAMA,
        "--strategy fsdp --pp 2 --nproc 4 --mbs 4 --pp-schedule zbv --reshard yes",
        "reshard is invalid: it must be no with zbv: torch would drop",
    ),
    (LLAMA, "--async-tp", "async-tp is invalid: it works only with tensor parallelism (--tp)"),
    (
        LLAMA,
        "--strategy tp --nproc 2 --async-tp",
        "async-tp is invalid: it works only with --compile",
    ),
    # techniques
    (
        ["llama-3.1-70b-proxy-1l", *GPT[1:]],
        "--sac full",
        "sac full is invalid: it must be none: llama-3.1-70b-pr",
    ),
    (
        ["llama-3.1-70b-proxy-1l", *GPT[1:]],
        "--sac 1/1",
        "sac full is invalid: it must be none: llama-3.1-70b-pr",
    ),
    (
        LLAMA,
        "--sac half",
        "sac half is invalid: it must be one of none, full, selective, or q/p",
    ),
    (
        LLAMA,
        "--sac 2/1",
        "sac 2/1 is invalid: it must be none, full, selective, or q/p with 1 <= q <= p",
    ),
    (LLAMA, "--sac 0/4", "sac 0/4 is invalid: it must be none, full, selective, or q/p"),
    (LLAMA, "--sac 1/", "sac 1/ is invalid: it must be none, full, selective, or q/p"),
    (LLAMA, "--sac -1/4", "sac -1/4 is invalid: it must be none, full, selective, or q/p"),
    (
        LLAMA,
        "--sac 1/64",
        "sac 1/64 is invalid: it must be q/p with p at most 32, the number of layers",
    ),
    (LLAMA, "--sac-freq full", "sac-freq full is invalid: it must be q/p with 1 <= q <= p"),
    (
        LLAMA,
        "--sac 1/4 --sac-freq 1/4",
        "sac-freq 1/4 is invalid: it cannot be combined with --ac",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 2 --precision master",
        "precision master is invalid: it must be amp with fsdp",
    ),
    (
        LLAMA,
        "--precision fp64",
        "precision fp64 is invalid: did you mean nvfp4? It must be one of amp, master",
    ),
    (
        LLAMA,
        "--fp8 --precision fp32",
        "fp8 tensorwise is invalid: it works only with --precision amp, master or bf16",
    ),
    (
        LLAMA,
        "--fp8 --fp8-recipe block",
        "fp8-recipe block is invalid: it must be one of tensorwise, rowwise, te",
    ),
    (
        LLAMA,
        "--fp8-recipe rowwise",
        "fp8-recipe rowwise is invalid: it works only with --precision fp8",
    ),
    (LLAMA, "--precision mxfp8 --fp8", "precision mxfp8 is invalid: it must be fp8 with --fp8"),
    (
        LLAMA,
        "--precision nvfp4 --fp8-recipe te",
        "fp8-recipe te is invalid: it works only with --precision fp8",
    ),
    (LLAMA, "--fp8-head", "fp8-head is invalid: it works only with --precision fp8, mxfp8"),
    (
        LLAMA,
        "--no-fp8-all-gather",
        "no-fp8-all-gather is invalid: it works only with --precision fp8",
    ),
    (
        LLAMA,
        "--fp8 --fp8-all-gather",
        "fp8-all-gather is invalid: it works only with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy fsdp --fp8 --fp8-recipe rowwise --fp8-all-gather",
        "fp8-all-gather is invalid: it works only with --fp8-recipe tensorwise",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 2 --fp8 --fp8-recipe te",
        "tp 2 is invalid: it must be 1 with --fp8-recipe te",
    ),
    (
        GPT,
        "--fp8 --seq-len 1000 --mbs 1",
        "fp8 tensorwise is invalid: it works only with widths that are multiples of 16: toke",
    ),
    (
        LLAMA,
        "--compile-scope model",
        "compile-scope model is invalid: it works only with --compile",
    ),
    (
        LLAMA,
        "--compile-mode default",
        "compile-mode default is invalid: it works only with --compile",
    ),
    (
        LLAMA,
        "--compile --compile-mode fast",
        "compile-mode fast is invalid: it must be one of default, reduce-",
    ),
    (
        LLAMA,
        "--compile --compile-scope layer",
        "compile-scope layer is invalid: did you mean layers? It must be one of block, layers, "
        "loss, model",
    ),
    (LLAMA, "--compile-fallback", "compile-fallback is invalid: it works only with --compile"),
    (
        LLAMA,
        "--attention magic",
        "attention magic is invalid: it must be one of auto, cudnn, flash",
    ),
    (
        LLAMA,
        "--strategy ddp --cuda-graph",
        "cuda-graph is invalid: it works only with --strategy single",
    ),
    (
        LLAMA,
        "--cuda-graph --compile --compile-mode reduce-overhead",
        "compile-mode reduce-overhead is invalid: it cannot be combined with --cuda-graph",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --compile --compile-mode reduce-overhead",
        "compile-mode reduce-overhead is invalid: it must be default with a pipeline",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 2 --grad-accum 2 --grad-sync last --compile "
        "--compile-mode max-autotune",
        "compile-mode max-autotune is invalid: "
        "it must be default with fsdp and --grad-sync last",
    ),
    (LLAMA, "--loss-chunks 3", "loss-chunks 3 is invalid: it must be a divisor of 8192 tokens"),
    (LLAMA, "--loss-chunks 0", "loss-chunks 0 is invalid: it must be from 1 to 65536"),
    (
        LLAMA,
        "--strategy tp --nproc 2 --compile --sac full",
        "sac full is invalid: it must be selective with tp and",
    ),
    (
        LLAMA,
        "--strategy tp --nproc 2 --loss-chunks 2",
        "loss-chunks 2 is invalid: it must be 1 with tp",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --pp-microbatches 1",
        "pp-microbatches 1 is invalid: it must be at least 2, the number of stages",
    ),
    (
        LLAMA,
        "--strategy pp --nproc 2 --loss-chunks 2",
        "loss-chunks 2 is invalid: it must be 1 with a pipeline",
    ),
    # gradients
    (LLAMA, "--schedule cycle", "schedule cycle is invalid: it must be one of step, micro"),
    (LLAMA, "--grad-accum 0", "grad-accum 0 is invalid: it must be from 1 to 65536"),
    (
        LLAMA,
        "--grad-sync never",
        "grad-sync never is invalid: did you mean every? It must be one of every, last",
    ),
    (
        LLAMA,
        "--grad-accum 2 --grad-sync last",
        "grad-sync last is invalid: it must be every, with one data rank",
    ),
    (
        LLAMA,
        "--strategy ddp --grad-sync last",
        "grad-sync last is invalid: it must be every, with one micro-step",
    ),
    (
        LLAMA,
        "--reduce-dtype bf16",
        "reduce-dtype bf16 is invalid: it works only with several data ranks",
    ),
    (
        LLAMA,
        "--strategy ddp --reduce-dtype fp16",
        "reduce-dtype fp16 is invalid: did you mean bf16? It must be one of fp32, bf16",
    ),
    (
        LLAMA,
        "--strategy ddp --reduce-dtype half-way",
        "reduce-dtype half-way is invalid: it must be one of fp32, bf16",
    ),
    (
        LLAMA,
        "--strategy ddp --precision bf16 --reduce-dtype fp32",
        "reduce-dtype fp32 is invalid: it must be bf16: ddp reduces gradients as they are",
    ),
    (LLAMA, "--lr 0", "lr 0 is invalid: it must be from 1e-12 to 1000000000000"),
    (LLAMA, "--lr nan", "lr nan is invalid: it must be from 1e-12 to 1000000000000"),
    (LLAMA, "--clip -1", "clip -1 is invalid: it must be from 0 to 1000000"),
    (LLAMA, "--bucket-mb 50", "bucket-mb 50 is invalid: it works only with --strategy ddp"),
    (LLAMA, "--strategy ddp --bucket-mb 0", "bucket-mb 0 is invalid: it must be from 1 to"),
    (LLAMA, "--reshard no", "reshard no is invalid: it works only with --strategy fsdp"),
    (
        LLAMA,
        "--strategy ddp --reshard no",
        "reshard no is invalid: it works only with --strategy fsdp",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 8 --reshard 3",
        "reshard 3 is invalid: it must be one of yes, no, 2, 4 for 8",
    ),
    (
        LLAMA,
        "--strategy fsdp --nproc 8 --reshard 8",
        "reshard 8 is invalid: it must be one of yes, no, 2, 4 for 8",
    ),
    (
        MOE,
        "--strategy fsdp --nproc 8 --ep 8 --reshard 2",
        "reshard 2 is invalid: it must be a divisor of 1 shards of experts",
    ),
    (LLAMA, "--prefetch 2", "prefetch 2 is invalid: it works only with --strategy fsdp"),
    (
        LLAMA,
        "--strategy fsdp --blocks-per-group 64",
        "blocks-per-group 64 is invalid: it must be at most 32",
    ),
    # data
    (
        [*LLAMA, "--scale", "1/1024"],
        "--text",
        "text text is invalid: it works only with random data: llama",
    ),
    (
        LLAMA,
        "--text-file none.txt",
        "text-file none.txt is invalid: it must be a file that can be read",
    ),
    (
        LLAMA,
        "--text --text-file none.txt",
        "text-file none.txt is invalid: it cannot be combined with --text",
    ),
    (LLAMA, "--workers -1", "workers -1 is invalid: it must be from 0 to 256"),
    (LLAMA, "--seed -1", "seed -1 is invalid: it must be from 0 to"),
    # how
    (LLAMA, "--steps 0", "steps 0 is invalid: it must be from 1"),
    (
        LLAMA,
        "--schedule micro --steps 12",
        "steps 12 is invalid: it must be a multiple of 8: whole optimizer",
    ),
    (LLAMA, "--launches 0", "launches 0 is invalid: it must be from 1"),
    (LLAMA, "--timeout soon", "timeout soon is invalid: it must be a duration such as"),
    (LLAMA, "--budget 0s", "budget 0s is invalid: it must be a duration above 0"),
    (LLAMA, "--profile-ranks 0", "profile-ranks 0 is invalid: it works only with --profile"),
    (
        LLAMA,
        "--profile --profile-ranks 1",
        "profile-ranks 1 is invalid: it must be ranks from 0 to 0",
    ),
    (
        LLAMA,
        "--profile --profile-ranks a",
        "profile-ranks a is invalid: it must be whole numbers",
    ),
    (LLAMA, "--find-batch --mbs 4", "mbs 4 is invalid: it must be several with --find-batch"),
    (
        ["gpt2-125m", *LLAMA],
        "--find-batch",
        "find-batch 'gpt2-125m single step, llama-3.1-8b single step' is invalid: "
        "it must be one model",
    ),
    (LLAMA, "--find-batch --strategy ddp,fsdp", "find-batch 'llama-3.1-8b ddp step, llama-3"),
    (LLAMA, "--find-batch --schedule step,micro", "find-batch 'llama-3.1-8b single micro, ll"),
]


def test_find_batch_tells_models_by_more_than_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 256, "vocab_size": 512, "rms_norm_eps": 1e-5},
        **{"hidden_act": "silu", "max_position_embeddings": 128},
    }
    files = []
    for width in (64, 128):
        file = tmp_path / str(width) / "m" / "config.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({**config, "hidden_size": width}))
        files.append(str(file))
    flags = ["--device", "cpu", "--nproc", "1", "--seq-len", "32", "--find-batch", "--dry-run"]
    assert status(["train", *files, *flags]) == 2
    told = capsys.readouterr().err
    assert "find-batch 'm (hidden 128) single step, m (hidden 64) single step'" in told


@pytest.mark.parametrize(("model", "flags", "said"), REFUSED)
def test_refused_in_one_line(
    model: list[str], flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = status(["train", *model, *flags.split()])
    told = capsys.readouterr()
    assert code == 2, told.err
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert told.err.startswith(f"stepmark: --{said}"), told.err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 4104}, "hidden_size is 4104"),
        ({"ffn_hidden_size": 14344}, "ffn_hidden_size of a rank is 14344"),
        ({"head_dim": 66, "num_heads": 4, "num_kv_heads": 4}, "q, k and v of a rank is 792"),
        ({"vocab_size": 50257}, "vocab_size of a rank is 50257"),
    ],
)
def test_fp8_needs_widths_of_multiples_of_16(changes: dict[str, Any], what: str) -> None:
    model = find_model("llama-3.1-8b")
    case = TrainCase(model=model, fp8=Fp8.TENSORWISE, fp8_head=True)
    train_refusals.check(case, TrainOptions())
    broken = dataclasses.replace(case, model=dataclasses.replace(model, **changes))
    with pytest.raises(ConfigError, match=what):
        train_refusals.check(broken, TrainOptions())


def test_a_dry_run_prints_a_command_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["train", *GPT, *TINY, "--mbs", "1,2", "--dry-run"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert [shlex.split(line)[:3] for line in lines] == [["stepmark", "train", "gpt2-125m"]] * 2
    assert told.err == "2 cases; none was run\n"


def test_the_runner_gets_what_was_asked() -> None:
    asked = parsed([*GPT, "--steps", "7", "--timeout", "2m", "--budget", "30s", "--messages"])
    told = train.how(asked, 2)
    assert (told.steps, told.timeout_s, told.budget_s) == (7, 120.0, 30.0)
    assert (told.messages, told.profile, told.find_batch) == (True, False, False)
    plain = train.how(parsed(GPT), 1)
    assert (plain.steps, plain.timeout_s, plain.budget_s) == (None, 600.0, None)
    profiled = parsed([*GPT, "--profile", "--profile-ranks", "1,0", "--strategy", "ddp"])
    assert train.how(profiled, 2).profile_ranks == (0, 1)


@pytest.mark.parametrize(
    ("num_ranks", "gib", "model", "strategy"),
    [
        (8, 139, "llama-3.1-8b", "fsdp"),
        (8, 16, "gpt2-1.5b", "fsdp"),
        (1, 80, "gpt2-1.5b", "single"),
        (1, 12, "gpt2-125m", "single"),
    ],
)
def test_the_main_job_trains_what_fits(
    num_ranks: int, gib: int, model: str, strategy: str
) -> None:
    found = run.that_fits("llama-3.1-8b", num_ranks, gib * 2**30)
    assert found is not None
    assert (found.model, found.strategy) == (model, (strategy,))
    (case,) = train_plan.cases(found, "cuda", num_ranks)
    assert estimate(case).allocated_bytes < gib * 2**30
    assert run.that_fits("llama-3.1-8b", num_ranks, 2**28) is None


def test_help_imports_nothing_heavy() -> None:
    code = "import sys\nfrom stepmark.cli.main import status\nstatus(['train', '--help-all'])\n"
    code += "assert not {'torch', 'numpy', 'rich', 'msgspec', 'psutil'} & set(sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        check=True,
        text=True,
        capture_output=True,
    )
    assert "--n_workers" in done.stdout


def test_enums_of_a_case_are_members() -> None:
    """Text that equals a member would not survive the store."""
    case = one([*LLAMA, "--strategy", "fsdp", "--fp8", "--compile", "--sac", "ops"])
    assert isinstance(case.data_parallel, DataParallel)
    assert isinstance(case.precision, Precision)
    assert isinstance(case.fp8, Fp8)
    assert isinstance(case.compile, CompileScope)
    assert isinstance(case.recompute, Recompute)
    assert isinstance(case.reduce_dtype, DType)
