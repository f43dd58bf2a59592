"""What of a model is not modelled: every verb that takes the model says it."""

import json
from pathlib import Path

import pytest

from stepmark.cli.main import status

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "attention_sinks": True,
    "final_logit_softcapping": 30.0,
}
SINKS = "not modelled: attention_sinks (true): attention has no sinks"
CAP = "not modelled: final_logit_softcapping (30.0): logits are not capped"
MTP = "deepseek-v3: not modelled: multi-token prediction"
VERBS = (
    "train {} --nproc 1 --device h100-sxm --dry-run",
    "calibrate {} --nproc 1 --device h100-sxm --dry-run",
    "predict {} --nproc 1 --device h100-sxm",
    "op gemm --model {} --device h100-sxm --dry-run",
    "op all --model {} --device h100-sxm --dry-run",
    "comm all_reduce --model {} --nproc 2 --device h100-sxm --dry-run",
    "workload generate --model {} --framework fsdp --world-size 8",
    "workload generate --model {} --framework deepspeed --world-size 8",
    "workload generate --model {} --framework megatron --world-size 8 --format simai",
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.parametrize("words", VERBS)
def test_every_verb_says_what_of_a_file_is_not_modelled(
    words: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(words.format(config).split()) == 0
    told = "".join(capsys.readouterr())
    for note in (SINKS, CAP):
        assert told.count(note) == 1, told


@pytest.mark.parametrize("words", VERBS)
def test_every_verb_says_what_of_a_built_in_model_is_not_modelled(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(words.format("deepseek-v3").split()) == 0
    told = "".join(capsys.readouterr())
    assert told.count(MTP) == 1, told


def test_a_file_of_the_step_and_what_is_made_of_it_say_it(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    words = f"workload generate --model {config} --framework fsdp --world-size 8 -o {file}"
    assert status(words.split()) == 0
    capsys.readouterr()
    for words in (f"workload show {file}", f"predict {file} --device h100-sxm"):
        assert status(words.split()) == 0
        told = "".join(capsys.readouterr())
        assert told.count(SINKS) == told.count(CAP) == 1, told
        assert status([*words.split(), "--json", "-"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        texts = [note if isinstance(note, str) else note["note"] for note in notes]
        assert sum(SINKS in text for text in texts) == 1


def test_a_model_without_a_note_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    for words in VERBS:
        assert status(words.format("llama-3.1-8b").split()) == 0
        assert "not modelled: " not in "".join(capsys.readouterr())
