"""A config of a family without a reader: transformers, another family's reader, refusals."""

import json
import subprocess
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Optimizer
from stepmark.step.workload import ComputeOp, Workload
from stepmark.workloads import workload_model
from stepmark.workloads.formats.huggingface import config as config_reader
from stepmark.workloads.formats.huggingface import traced
from stepmark.workloads.models import read_models
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_flags import options_class

NANOCHAT = {
    "model_type": "nanochat",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
# Two tables; q, k, v, out; up and down; norms have no weights.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128
NUM_PARAMS = 2 * 512 * 64 + 3 * LAYER
QWEN3 = {
    **NANOCHAT,
    "model_type": "qwen3",
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def write(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def generated(model: str, framework: str, **options: Any) -> Workload:
    made = options_class(framework)(
        model=model, framework=framework, world_size=2, gbs=2, seq_len=32, **options
    )
    return generate(made)


def num_updated(made: Workload) -> int:
    return sum(
        op.op.num_params
        for op in made.expand()
        if isinstance(op, ComputeOp) and isinstance(op.op, Optimizer)
    )


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace without another process, which would import torch for each test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from stepmark.capture import transformers_trace
    monkeypatch.setattr(traced, "_traced", lambda request, _: transformers_trace.trace(request))


def test_a_process_of_its_own_traces(tmp_path: Path) -> None:
    made = generated(write(tmp_path, NANOCHAT), "ddp")
    assert num_updated(made) == NUM_PARAMS


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("framework", "options", "ranks"),
    [
        ("fsdp", {}, 2),
        ("deepspeed", {"stage": 0}, 1),
        ("deepspeed", {"stage": 3}, 2),
    ],
)
def test_the_optimizer_updates_each_parameter(
    tmp_path: Path, framework: str, options: dict[str, Any], ranks: int
) -> None:
    made = generated(write(tmp_path, NANOCHAT), framework, **options)
    made.check()
    assert num_updated(made) * ranks == NUM_PARAMS
    assert any("read through transformers 5." in note for note in made.notes)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.filterwarnings("ignore")
def test_a_key_that_the_class_does_not_know_is_noted(tmp_path: Path) -> None:
    made = generated(write(tmp_path, {**NANOCHAT, "hiden_layers": 4}), "ddp")
    assert any(note.endswith("does not declare: hiden_layers") for note in made.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is invalid"),
        ({"hidden_size": 2**40}, "hidden_size 1099511627776 is invalid"),
        ({"x": {"y": [[2**80]]}}, "x.y 12089"),
        ({"layer_types": ["full_attention"] * 200_000}, "at most 100000 values"),
    ],
)
def test_sizes_are_bounded_before_anything_is_built(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    start = time.monotonic()
    path = write(tmp_path, {**NANOCHAT, **changes})
    with (
        mock.patch.object(subprocess, "run", side_effect=AssertionError),
        pytest.raises(ConfigError, match=message),
    ):
        generated(path, "fsdp")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ({"side_effect": subprocess.TimeoutExpired("x", 1)}, "traced within 180 s"),
        (
            {"return_value": subprocess.CompletedProcess("x", -9, b"", b"one\nKilled")},
            "ended with code -9: Killed",
        ),
    ],
)
def test_a_process_that_gives_no_answer_is_one_sentence(
    tmp_path: Path, outcome: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, NANOCHAT)
    with (
        mock.patch.object(subprocess, "run", **outcome),
        pytest.raises(ConfigError, match=message),
    ):
        generated(path, "fsdp")


def test_the_process_is_offline_and_sees_no_device(tmp_path: Path) -> None:
    answer = subprocess.CompletedProcess("x", 1, b"", b"")
    with (
        mock.patch.object(subprocess, "run", return_value=answer) as run,
        pytest.raises(ConfigError),
    ):
        generated(write(tmp_path, NANOCHAT), "fsdp")
    (command,), settings = run.call_args
    assert command[1:] == ["-P", "-m", traced.PROGRAM]
    for name, value in {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        assert settings["env"][name] == value


def test_frameworks_that_take_decoders_alone_name_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--framework deepspeed, pytorch, fsdp, ddp"):
        generated(write(tmp_path, NANOCHAT), "megatron")


@pytest.mark.parametrize("is_installed", [True, False])
def test_other_verbs_name_the_ways_on(tmp_path: Path, is_installed: bool) -> None:
    version = "5.23.0" if is_installed else ""
    with (
        mock.patch.object(config_reader, "transformers_version", return_value=version),
        pytest.raises(ConfigError) as caught,
    ):
        read_models(write(tmp_path, NANOCHAT))
    message = str(caught.value)
    assert "config.json:FAMILY reads the file as that family's" in message
    assert "stepmark workload generate --model config.json --framework fsdp" in message
    assert ("pip install 'stepmark[huggingface]'" in message) is not is_installed


def test_without_transformers_a_workload_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, NANOCHAT)
    with (
        mock.patch.object(workload_model, "transformers_version", return_value=""),
        mock.patch.object(config_reader, "transformers_version", return_value=""),
        pytest.raises(ConfigError, match="pip install"),
    ):
        generated(path, "fsdp")


def test_a_file_is_read_as_another_familys(tmp_path: Path) -> None:
    path = write(tmp_path, {**QWEN3, "model_type": "qwen9"})
    (model,) = read_models(f"{path}:qwen3")
    (same,) = read_models(f"{tmp_path}:qwen3")
    (plain,) = read_models(write(tmp_path, QWEN3))
    assert model.num_params == same.num_params == plain.num_params
    assert model.qk_norm
    assert f"{path}: model_type qwen9 is read as qwen3" in model.unmodelled
    assert not any("is read as" in note for note in plain.unmodelled)


def test_a_misspelled_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean qwen3"):
        read_models(f"{write(tmp_path, QWEN3)}:qwenn3")


def test_predict_reads_a_file_as_another_familys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**QWEN3, "model_type": "qwen9"})
    assert status(["predict", f"{path}:qwen3", "--device", "h100-sxm", "--nproc", "1"]) == 0
    assert "model_type qwen9 is read as qwen3" in capsys.readouterr().out
