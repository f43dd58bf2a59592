"""What `train` does not run of a model is refused by name."""

from dataclasses import fields, replace

import pytest

from stepmark.cli.main import status
from stepmark.model.model_tables import find_model, load_models
from stepmark.training.model_refusals import CONFIGS, LACKING, PARTS, RUN, parts


def test_every_field_of_a_model_is_run_or_has_a_name() -> None:
    names = {
        prefix + each.name for prefix, config in CONFIGS.items() for each in fields(config)
    }
    assert names == RUN | PARTS.keys()
    assert not RUN & PARTS.keys()
    assert PARTS.keys() >= LACKING


def test_a_model_of_old_has_no_part() -> None:
    for name in ("gpt2-125m", "llama-3.1-8b", "qwen3-8b", "mixtral-8x7b"):
        assert parts(load_models()[name], PARTS) == []


def test_the_parts_of_a_model_are_named_once() -> None:
    words = parts(find_model("gpt-oss-20b"), PARTS)
    assert {"sliding windows", "attention sinks"} <= set(words)
    assert len(words) == len(set(words))


def test_a_model_that_the_step_lacks_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["train", "deepseek-v3.2", "--scale", "tiny", "--device", "cpu", "--nproc", "1"]
    assert status([*argv, "--dry-run"]) == 2
    assert "DeepSeek's indexer: train cannot run them" in capsys.readouterr().err


def test_modules_of_multi_token_prediction_are_refused() -> None:
    model = replace(find_model("llama-3.1-8b"), num_mtp_layers=1)
    assert parts(model, LACKING) == ["multi-token prediction"]
