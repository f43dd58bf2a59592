"""Kinds of files, told by content; files that are none, or hostile."""

import builtins
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation import framework_files as published

from stepmark.framework_files import configuration
from stepmark.framework_files.shell import training_words
from stepmark.framework_files.yaml_text import read_yaml
from stepmark.ground.errors import ConfigError
from stepmark.workloads.models import is_model_file, read_models

ROOT = Path(__file__).parents[2]
HUGGING_FACE = ROOT / "examples" / "hf" / "llama-3.1-8b" / "config.json"
MODEL = ROOT / "src" / "stepmark" / "data" / "models" / "deepseek-v3.toml"


def test_files_that_are_not_a_frameworks(tmp_path: Path) -> None:
    for name, text in {
        "w.json": '{"format": "stepmark workload"}',
        "list.json": "[]",
        "notes.txt": "num-layers",
        "broken.toml": "[model",
        "empty.yaml": "",
        "list.yaml": "- a\n- b\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert not configuration.is_framework_file(str(tmp_path / name))
    assert not configuration.is_framework_file(str(HUGGING_FACE))
    assert not configuration.is_framework_file(str(MODEL))
    assert not configuration.is_framework_file(str(tmp_path))
    assert not configuration.is_framework_file("llama-3.1-8b")
    with pytest.raises(ConfigError, match="a file of one of these: megatron-args"):
        configuration.read(str(tmp_path / "w.json"))
    with pytest.raises(ConfigError, match="a file that exists"):
        configuration.read(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bomb.yaml", "distributed_type: FSDP\na: &a [1,1]\nb: &b [*a,*a]\nc: [*b,*b]\n"),
        ("deep.yaml", "train: " + "[" * 5000),
        ("deep.json", '{"train_batch_size": ' + "[" * 5000 + "]" * 5000 + "}"),
        ("binary.sh", "--num-layers \0"),
        ("large.sh", "--num-layers 4 " * 100_000),
    ],
)
def test_hostile_files_get_one_sentence(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError):
        configuration.read(str(path))


def test_aliases_of_yaml_are_not_followed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an alias"):
        read_yaml("a: &a [1]\nb: [*a, *a]\n", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "A=(" + "#" * 50_000,
        "A=(" + "$(" * 50_000,
        '"' * 99_999,
        "$((" * 60_000,
        "if " * 30_000,
        "case a in b) " * 9_000,
    ],
)
def test_hostile_scripts_take_no_longer_than_their_length(text: str) -> None:
    start = time.process_time()
    with contextlib.suppress(ConfigError):  # it nests too deep
        training_words(text)
    assert time.process_time() - start < 5


@given(st.lists(st.text("abc -$\"'\\\n#(){}", max_size=8), max_size=8))
def test_any_script_is_read(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):  # what a command prints, in an open quote
        training_words("\n".join(words) + "\npython x.py --num-layers 4")


def test_yaml_without_pyyaml_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP")
    original = builtins.__import__

    def without_yaml(name: str, *more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return original(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(ConfigError, match="needs PyYAML"):
        configuration.read(str(path))


def test_a_config_of_any_name_and_a_toml_are_models(tmp_path: Path) -> None:
    config = tmp_path / "mistral-7b.cfg"
    config.write_bytes(HUGGING_FACE.read_bytes())
    own = tmp_path / "mine.toml"
    own.write_bytes(MODEL.read_bytes())
    assert is_model_file(config)
    assert is_model_file(own)
    assert not is_model_file(ROOT / "pyproject.toml")
    (llama,) = read_models(str(config))
    (deepseek,) = read_models(str(own))
    assert llama.num_layers == 32
    assert (deepseek.name, deepseek.num_params) == ("mine", 671_026_419_200)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_layers", "num_layer", "num_layer 61 is invalid: did you mean num_layers?"),
        ("hidden_size = 7168", "hidden_size = 'wide'", "hidden_size wide is invalid"),
        ("top_k = 8", "", "moe.top_k is missing"),
        ("[moe]", "[moe", "a TOML file"),
    ],
)
def test_a_wrong_model_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = MODEL.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_models(str(path))
    assert message in str(error.value)


def test_published_files_are_read_and_every_refusal_names_a_key(tmp_path: Path) -> None:
    accepted = 0
    refused: list[str] = []
    rows = published.rows()
    for row in rows:
        path = tmp_path / ("file.sh" if row["path"].endswith(".sh") else "file.json")
        path.write_text(row["text"])
        try:
            file = configuration.read(str(path))
        except ConfigError as error:
            refused.append(error.field)
            continue
        accepted += 1
        assert file.options
    assert all("/file." in field for field in refused)
    assert len(rows) == 100
    assert accepted == 76


def test_json_of_an_unknown_kind_is_no_framework_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"model_type": "llama", "fp16": True}))
    assert not configuration.is_framework_file(str(path))
