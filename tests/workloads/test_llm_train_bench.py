"""llm-train-bench's JSON files: counts as published there, families told apart, bad files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.workloads.formats.benchmark_models import is_config, read_config

from .mutations import mutated, only_config_errors

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm-train-bench"
GPT: dict[str, Any] = json.loads((EXAMPLES / "gpt2-1.5b.json").read_text())
LLAMA: dict[str, Any] = json.loads((EXAMPLES / "llama-3.1-8b.json").read_text())
PROXY = LLAMA | {"n_layers": 1, "n_heads": 64, "d_embd": 8192}


def read(content: Any, folder: Path) -> ModelConfig:
    file = folder / "made.json"
    file.write_text(json.dumps(content))
    return read_config(file)


@pytest.mark.parametrize(
    ("content", "params"),
    [
        (GPT, 1_557_686_400),
        (GPT | {"n_layers": 12, "n_heads": 12, "d_embd": 768}, 124_475_904),
        (LLAMA, 8_030_261_248),
        (PROXY, 2_957_008_896),
        (PROXY | {"n_layers": 4}, 5_523_972_096),
        (PROXY | {"n_layers": 80}, 70_553_706_496),
    ],
)
def test_parameter_counts_are_those_published(
    content: dict[str, Any], params: int, tmp_path: Path
) -> None:
    assert read(content, tmp_path).num_params == params


@pytest.mark.parametrize("name", ["gpt2-1.5b", "llama-3.1-8b"])
def test_a_file_is_the_built_in_model(name: str) -> None:
    found, known = read_config(EXAMPLES / f"{name}.json"), find_model(name)
    assert found.name == name
    same = {"source": "", "aliases": (), "published_params": None, "seq_len": 1024}
    assert replace(found, **same) == replace(known, **same)


@pytest.mark.parametrize(
    ("width", "mult", "factor", "expected"),
    [
        (4096, 1.3, 1024, 14336),
        (8192, 1.3, 1024, 28672),
        (4096, 1.0, 256, 11008),
        (192, 1.0, 1, 512),
    ],
)
def test_width_of_the_mlp(
    width: int, mult: float, factor: int, expected: int, tmp_path: Path
) -> None:
    found = read(
        LLAMA | {"d_embd": width, "ffn_mult": mult, "ffn_factor": factor}, tmp_path
    ).ffn_hidden_size
    assert found == expected
    assert found % factor == 0
    assert 0 <= found - mult * 8 * width / 3 < factor + 1


def test_a_width_that_is_given_wins(tmp_path: Path) -> None:
    given = {key: value for key, value in LLAMA.items() if not key.startswith("ffn_")}
    assert read(given | {"d_hid": 1000}, tmp_path).ffn_hidden_size == 1000


@pytest.mark.parametrize("extra", [{"arch_name": "gpt"}, {"dropout": 0.1, "bias": True}])
def test_unknown_fields_are_ignored(extra: dict[str, Any], tmp_path: Path) -> None:
    assert read(GPT | extra, tmp_path) == read(GPT, tmp_path)


BAD: list[tuple[Any, str, str]] = [
    (GPT | {"arch_name": "mamba"}, "arch_name", "one of gpt, llama"),
    (GPT | {"arch_name": "llama"}, "n_kv_heads", "a required field"),
    (GPT | {"d_embd": 1601}, "d_embd", "a multiple of n_heads=25"),
    (GPT | {"n_layers": 0}, "n_layers", ">= 1"),
    (GPT | {"n_layers": "48"}, "n_layers", "int, not str"),
    (GPT | {"n_layers": True}, "n_layers", "int, not bool"),
    (LLAMA | {"n_kv_heads": 5}, "n_kv_heads", "a divisor of n_heads=32"),
    (LLAMA | {"ffn_mult": None}, "ffn_mult", "a required field, or d_hid"),
    (LLAMA | {"ffn_mult": 0.0}, "ffn_mult", "> 0"),
    (LLAMA | {"ffn_factor": None}, "ffn_factor", "a required field, or d_hid"),
    ([GPT], "top level", "an object"),
]


@pytest.mark.parametrize(("content", "field", "allowed"), BAD)
def test_bad_files_name_field_value_and_what_is_allowed(
    content: Any, field: str, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content, tmp_path)
    assert caught.value.field == f"{tmp_path / 'made.json'}: {field}"
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(GPT))
def test_each_field_is_required(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing: it is a required field"):
        read({key: value for key, value in GPT.items() if key != name}, tmp_path)


def test_damaged_files_are_a_model_or_one_line(tmp_path: Path) -> None:
    files = mutated(LLAMA, 300, seed=5)
    good, bad = only_config_errors(read_config, files, tmp_path / "damaged.json")
    assert good > 10
    assert bad > 100


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(GPT, True), ({"n_embd": 1, "model_type": "gpt2"}, False), ([], False)],
)
def test_files_of_this_kind_are_recognised(raw: object, expected: bool) -> None:
    assert is_config(raw) is expected
