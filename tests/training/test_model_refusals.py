"""What `train` does not run of a model is refused by name."""

from dataclasses import fields, replace

import pytest
from tests.training.curves import spread

from stepmark.cli.main import status
from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model, load_models
from stepmark.training.model_refusals import CONFIGS, LACKING, PARTS, RUN, parts
from stepmark.training.scores import all_scores
from stepmark.training.train_options import TrainOptions
from stepmark.training.train_refusals import check


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("deepseek-v3.2", "DeepSeek's indexer: train cannot run them"),
        ("gemma-3-1b --attention flash", "it must be auto or math, since gemma-3-1b@tiny has"),
        ("gpt-oss-20b --attention efficient", "--attention efficient is invalid"),
        ("gemma-3-1b --cp 2", "has sliding windows or chunks"),
        ("qwen3-next-80b-a3b --cp 2", "has layers that carry a state"),
        ("gpt-oss-20b --tp 2", "--tp 2 is invalid: it must be 1"),
    ],
)
def test_what_the_step_lacks_is_refused_by_name(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", *words.split(), "--scale", "tiny", "--device", "cpu", "--nproc", "4"]
    assert status([*argv, "--strategy", "fsdp", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_activation_with_parameters_is_refused() -> None:
    model = replace(find_model("llama-2-7b").tiny(), activation="xielu")
    with pytest.raises(ConfigError, match="without xIELU: train cannot run them"):
        check(spread(model, "fsdp", dp_shard=2), TrainOptions())


def test_windows_as_long_as_the_sequence_are_none() -> None:
    model = replace(find_model("gemma-3-1b"), seq_len=512)
    assert all(scores.is_plain for scores in all_scores(model))
    longer = replace(model, seq_len=513)
    assert [scores.window for scores in all_scores(longer)] == [512, 0]


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_later_tokens_are_predicted_on_whole_ranks(axis: str) -> None:
    model = replace(find_model("llama-2-7b").tiny(), num_mtp_layers=1)
    words = f"^{axis} 2 is invalid: it must be 1, since .* has multi-token prediction"
    with pytest.raises(ConfigError, match=words):
        check(spread(model, "fsdp", dp_shard=2, **{axis: 2}), TrainOptions())
