"""A framework's file as the target of `predict` and `workload`, as a user names it."""

import json
from pathlib import Path

import pytest

from stepmark.cli.main import status

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "torchtitan-llama3-70b.toml"
DEVICE = ("--device", "h100-sxm")
ZERO = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return status([*words])


def test_predict_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "predict",
        str(EXAMPLE),
        "--nproc",
        "256",
        *DEVICE,
        "--network",
        "dgx-h100",
        "--notes",
    )
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-3.1-70b on 256 x NVIDIA H100 80GB HBM3: predicted step ")
    assert "mbs 8, seq 8192" in out
    assert "no effect on time and memory" in out
    assert "checkpoint.folder" in out


def test_flags_beside_it_win_and_may_be_lists(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", str(EXAMPLE), "--nproc", "64", "--tp", "4,8", "--mbs", "1", *DEVICE)
    assert run(*words, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert sorted(row["tp"] for row in rows) == [4, 8]


def test_a_file_without_a_model_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("zero.json").write_text(json.dumps(ZERO))
    words = ("predict", "zero.json", "--model", "llama-3.1-8b", "--nproc", "8", *DEVICE)
    assert run(*words) == 0
    assert "llama-3.1-8b deepspeed zero-3" in capsys.readouterr().out
    assert run("predict", "zero.json", "--nproc", "8", *DEVICE) == 2
    assert "is missing" in capsys.readouterr().err


def test_generate_convert_and_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("workload", "generate", "--model", str(EXAMPLE), "-o", "w.json") == 0
    assert run("workload", "convert", "w.json", "--to", "torchtitan", "-o", "again.toml") == 0
    assert run("workload", "generate", "--config", "again.toml", "-o", "again.json") == 0
    first, again = (json.loads(Path(name).read_text()) for name in ("w.json", "again.json"))
    assert first["blocks"] == again["blocks"]
    capsys.readouterr()
    assert run("workload", "convert", "w.json", "--to", "megatron-args") == 2
    assert "one by the rules of megatron" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "EXAMPLE", "--framework", "megatron"), "framework megatron is invalid"),
        (("predict", "EXAMPLE", "zero.json"), "one model and one framework's file"),
        (("predict", "EXAMPLE", "--bf16"), "only with --framework megatron"),
        (("workload", "generate", "--group-query-attention"), "--num-query-groups N is enough"),
        (("workload", "generate", "--config", "none.toml"), "a file that exists"),
    ],
)
def test_refusals(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("zero.json").write_text(json.dumps(ZERO))
    assert run(*(str(EXAMPLE) if word == "EXAMPLE" else word for word in words)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
