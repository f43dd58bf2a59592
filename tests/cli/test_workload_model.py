"""Models of `stepmark workload generate`: files of one's own, published ones, recommenders."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from stepmark.cli import main
from stepmark.model.ops import Gemm
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Workload

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llama_workload.py"
OWN = """
from stepmark.workloads.architecture import Architecture, Batch, unit

def build(batch):
    table = unit("embed", batch.embedding("table", 512, 64))
    block = unit("layers", batch.norm("norm", 64), batch.linear("mlp", 64, 64), times=4)
    head = unit("head", batch.linear("head", 512, 64), batch.loss("loss", 512))
    return Architecture(name="mine", units=(table, block, head))
"""
PARAMS = 2 * 512 * 64 + 4 * (2 * 64 + 64 * 64)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


def generate(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    status = main.status(["workload", "generate", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def generated(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[Workload, str]:
    """The workload, and what was noted."""
    status, out, err = generate(capsys, *arguments, "-o", "-")
    assert status == 0, err
    return native.decode(out.encode()), err


def counts(made: Workload, collective: str) -> list[int]:
    ops = (op for op in made.expand() if isinstance(op, CommOp))
    return [op.count for op in ops if op.collective == collective and op.count > 1]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a wrong command ends with."""
    status, out, err = generate(capsys, *arguments)
    assert status == 2
    assert not out
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp", "ddp"])
def test_a_file_of_ones_own_with_every_framework_that_takes_it(
    framework: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", f"{own}:build", "--framework", framework, "--world-size", "4")
    made, noted = generated(capsys, *asked, "--gbs", "8")
    assert made.name.startswith("mine")
    assert made.model is None
    assert made.num_microbatches == 2
    assert "seq-len 2048, as none was given" in noted


def test_sizes_of_messages_are_those_of_the_file(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", f"{own}:build", "--framework", "ddp", "--world-size", "4")
    made, _ = generated(capsys, *asked, "--seq-len", "16")
    assert sum(counts(made, "all_reduce")) == PARAMS


def test_batch_and_length_reach_the_function(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", f"{own}:build", "--framework", "ddp", "--world-size", "2")
    made, noted = generated(capsys, *asked, "--mbs", "3", "--seq-len", "32")
    ops = [op for op in made.expand() if isinstance(op, ComputeOp) and op.phase == "fwd"]
    rows = {op.op.m for op in ops if isinstance(op.op, Gemm)}
    assert rows == {3 * 32}
    assert "seq-len" not in noted


@pytest.mark.parametrize("name", ["gpt-j-6b", "bigbird-roberta-base"])
@pytest.mark.parametrize("framework", ["deepspeed", "fsdp", "ddp"])
def test_published_models_go_by_name(
    name: str, framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", name, "--framework", framework, "--world-size", "8")
    made, noted = generated(capsys, *asked)
    assert made.world_size == 8
    assert "seq-len" not in noted  # its own


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", f"{EXAMPLE}:llama_7b", "--framework", "deepspeed", "--stage", "3")
    status, out, err = generate(capsys, *asked, "--world-size", "128", "--seq-len", "4096")
    assert status == 0, err
    assert "llama-7b deepspeed zero-3" in out


def test_the_function_of_the_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "howto" / "custom-models.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    file = tmp_path / "mine.py"
    file.write_text(code)
    asked = ("--model", f"{file}:build", "--framework", "fsdp", "--world-size", "64")
    made, _ = generated(capsys, *asked, "--gbs", "512", "--mbs", "2", "--seq-len", "4096")
    assert made.num_microbatches == 4


def test_a_config_of_hugging_face_still_is_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ROOT / "examples" / "hf" / "llama-3.1-8b" / "config.json"
    asked = ("--model", config, "--framework", "deepspeed", "--world-size", "8")
    status, _, err = generate(capsys, *asked)
    assert status == 0, err


def test_megatron_takes_decoders_only(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--model", f"{own}:build", "--world-size", "8")
    assert "a decoder for megatron" in said
    assert "deepspeed, pytorch, fsdp, ddp" in said
    assert "a decoder for megatron" in refusal(capsys, "--model", "gpt-j-6b")


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def build(batch):\n    return lost\n", "mine.py:2 in build"),
        ("import nothing_of_that_name\n", "mine.py:1"),
        ("def build(batch)\n", "mine.py:1"),
        ("def build():\n    return 1\n", "build"),
        ("def build(batch):\n    return 1\n", "returns an Architecture"),
        ("def other(batch):\n    return 1\n", "e.g. other"),
        (
            "from stepmark.workloads.architecture import unit\n"
            "def build(batch):\n"
            "    return unit('a', batch.linear('l', 0, 4))\n",
            "mine.py:3",
        ),
        ("raise SystemExit(7)\n", "mine.py:1"),
    ],
)
def test_errors_in_the_file_are_one_line_with_the_place(
    code: str, place: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own.write_text(code)
    asked = ("--model", f"{own}:build", "--framework", "fsdp", "--world-size", "2")
    assert place in refusal(capsys, *asked)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-layers", "3"), "num-layers"),
        (("--num-experts", "8"), "num-experts"),
        (("--scale", "tiny"), "scale"),
        (("--tp", "2"), "tp"),
        (("--pp", "2"), "pp"),
        (("--gbs", "3"), "--gbs 3"),
        (("--seq-len", "0"), "seq-len"),
    ],
)
def test_what_says_nothing_of_such_a_model_is_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", "gpt-j-6b", "--framework", "fsdp", "--world-size", "4")
    assert said in refusal(capsys, *asked, *flags)


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "nowhere.py:build", "--framework", "fsdp", "--world-size", "4")
    assert "a Python file that exists" in refusal(capsys, *asked)


# README of facebookresearch/dlrm, "Multi-gpu and Multi-node training". Its bottom MLP ends in
# 128, which dlrm_s_pytorch.py itself refuses beside a sparse feature size of 64.
DLRM = (
    "--framework=dlrm",
    "--world-size=8",
    "--arch-embedding-size=80000-80000-80000-80000-80000-80000-80000-80000",
    "--arch-sparse-feature-size=64",
    "--arch-mlp-top=512-512-512-256-1",
    "--mini-batch-size=2048",
)


def test_a_recommender(capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = generated(capsys, *DLRM, "--arch-mlp-bot=128-128-128-64")
    # One table a rank: 2048 rows of 64, an eighth to each; there and back.
    assert counts(made, "all_to_all") == [2048 * 64 // 8] * 2
    widths = (128, 128, 128, 64), (8 * 9 // 2 + 64, 512, 512, 512, 256, 1)
    dense = sum(a * b + b for one in widths for a, b in pairwise(one))
    assert sum(counts(made, "all_reduce")) == dense


def test_recommenders_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, *DLRM, "--arch-mlp-bot=128-128-128-128")
    assert "it must end in arch_sparse_feature_size (64)" in said
    bottom = "--arch-mlp-bot=128-64"
    assert "at most one rank per table (8)" in refusal(capsys, *DLRM, bottom, "--world-size=16")
    assert "it has no effect with dlrm" in refusal(capsys, *DLRM, bottom, "--num-layers=3")
    assert "it has no effect with dlrm" in refusal(capsys, *DLRM, bottom, "--model=gpt-j-6b")


def test_a_tiny_model_has_as_many_layers_as_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--model",
        "llama-2-7b",
        "--framework",
        "fsdp",
        "--world-size",
        "2",
        "--scale",
        "tiny",
    ]
    for layers, more in ((2, []), (5, ["--num-layers", "5"])):
        made, _ = generated(capsys, *words, *more)
        assert made.model
        assert made.model.num_layers == layers
        assert {op.layer for op in made.expand() if op.layer is not None} == set(range(layers))
