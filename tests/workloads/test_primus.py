import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import EXPERTS
from stepmark.model.model_tables import find_model
from stepmark.workloads.formats.benchmark_models import (
    read_attention_shapes,
    read_model_configs,
)
from stepmark.workloads.formats.huggingface.config import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = json.loads((EXAMPLES / "model_configs.json").read_text())
SHAPES = json.loads((EXAMPLES / "attention_shapes.json").read_text())


def message(tmp_path: Path, read: Callable[[Path], object], content: object) -> str:
    path = tmp_path / "file.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ConfigError) as caught:
        read(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "file.json" in text
    return text


def test_the_ten_models() -> None:
    models = read_model_configs(EXAMPLES / "model_configs.json")
    assert len(models) == 10
    for model in models:
        real = find_model(model.name)
        assert model.num_layers == 1
        assert "1 layer" in model.source
        for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            assert getattr(model, field) == getattr(real, field), (model.name, field)
        assert model.seq_len == real.seq_len
        assert model.mla == real.mla
        if real.moe is None:
            assert model.layer_params() == real.layer_params()
        elif model.moe:  # Mixtral is dense in Primus
            assert model.layer_matmul_params(EXPERTS) == real.layer_matmul_params(EXPERTS)


def test_shared_experts_have_their_own_width() -> None:
    models = {m.name: m for m in read_model_configs(EXAMPLES / "model_configs.json")}
    widths = [
        models[f"Deepseek_{v}"].moe.shared_ffn_hidden_size for v in ("V2_Lite", "V2", "V3")
    ]
    assert widths == [2816, 3072, 2048]


def test_the_eight_shapes() -> None:
    shapes = read_attention_shapes(EXAMPLES / "attention_shapes.json")
    assert len(shapes) == 8
    assert [s.model for s in shapes if s.head_dim_qk != s.head_dim_v] == [
        "deepseek_v2_lite",
        "deepseek_v2/v3",
    ]
    assert all(s.causal for s in shapes)


@pytest.mark.parametrize("field", MODELS[0])
def test_dense_field_dropped_misspelt_and_wrong(tmp_path: Path, field: str) -> None:
    check_field(tmp_path, read_model_configs, MODELS[0], field)


@pytest.mark.parametrize("field", MODELS[-1])
def test_deepseek_field_dropped_misspelt_and_wrong(tmp_path: Path, field: str) -> None:
    check_field(tmp_path, read_model_configs, MODELS[-1], field)


@pytest.mark.parametrize("field", SHAPES[0])
def test_shape_field_dropped_misspelt_and_wrong(tmp_path: Path, field: str) -> None:
    check_field(tmp_path, read_attention_shapes, SHAPES[0], field)


def check_field(
    tmp_path: Path, read: Callable[[Path], object], entry: dict[str, object], field: str
) -> None:
    rest = {k: v for k, v in entry.items() if k != field}
    assert f"[1].{field} is missing" in message(tmp_path, read, [entry, rest])
    misspelt = field[0] + field[2:]
    told = message(tmp_path, read, [{**rest, misspelt: entry[field]}])
    assert f"it is an unknown field, did you mean `{field}`?" in told
    for bad in (-1, 2**40, 0.5, [], {}):
        assert f"[0].{field} " in message(tmp_path, read, [{**entry, field: bad}])


@pytest.mark.parametrize("read", [read_model_configs, read_attention_shapes])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{}", "top level: 'an object' is invalid: it must be an array"),
        (b"[]", "top level"),
        (b"3", "top level"),
        (b"[1]", "[0] 1 is invalid: it must be an object"),
        (b"[NaN]", "JSON"),
        (b"[" * 100_000, "JSON (it nests deeper than 100 levels)"),
        (b"", "JSON"),
        (random.Random(0).randbytes(2**20), "JSON"),
    ],
)
def test_bad_files(
    tmp_path: Path, read: Callable[[Path], object], content: bytes, told: str
) -> None:
    assert told in message(tmp_path, read, content)


def test_contradictions_speak_the_file_s_names(tmp_path: Path) -> None:
    told = message(tmp_path, read_model_configs, [MODELS[0] | {"num_key_value_heads": 5}])
    assert (
        "num_attention_heads 32 is invalid: it must be a multiple of num_key_value_heads=5"
        in told
    )
    told = message(tmp_path, read_model_configs, [MODELS[-1] | {"num_experts_per_tok": 257}])
    assert "num_experts_per_tok 257 is invalid: it must be at most n_routed_experts=256" in told
    told = message(tmp_path, read_attention_shapes, [SHAPES[0] | {"num_head_kv": 5}])
    assert "num_head_q 32 is invalid: it must be a multiple of num_head_kv=5" in told
    told = message(tmp_path, read_attention_shapes, [SHAPES[0] | {"seqlen_kv": 5}])
    assert "seqlen_kv 5 is invalid: it must be seqlen_q=4096 when causal" in told


ODD_VALUES: list[object] = [
    None, True, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, math.nan, math.inf, "",
    "x", "\n", "\x00", "\u2028", [], [[]], {}, {"a": [1]}, "x" * 1000,
]  # fmt: skip


def mutate(rng: random.Random, content: object) -> bytes:
    """One to three accidents that files have: in the values, the keys, then the bytes."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        entry = rng.choice(content) if isinstance(content, list) and content else content
        if not isinstance(entry, dict) or not entry:
            continue
        key = rng.choice(list(entry))
        match rng.randrange(5):
            case 0:
                del entry[key]
            case 1:
                at = rng.randrange(len(key) + 1)
                entry[key[:at] + rng.choice(["", "x", "_", "\n", "é"]) + key[at + 1 :]] = (
                    entry.pop(key)
                )
            case 2:
                entry[key] = deepcopy(rng.choice(ODD_VALUES))
            case 3:
                entry[rng.choice(["extra", "head_dim", "kv_lora_rank", "n_inner"])] = deepcopy(
                    rng.choice(ODD_VALUES)
                )
            case 4 if isinstance(content, list):
                content[rng.randrange(len(content))] = deepcopy(rng.choice(ODD_VALUES))
    data = bytearray(json.dumps(content).encode())
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            at = rng.randrange(len(data))
            data[at:at] = rng.choice([b"NaN", b"[" * 2000, b'{"a":', rng.randbytes(20)])
    return bytes(data)


def test_only_config_errors_leave_the_readers(tmp_path: Path) -> None:
    rng = random.Random(20240601)
    configs = [json.loads(p.read_text()) for p in sorted(EXAMPLES.glob("hf/*/config.json"))]
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_positions": 1024, "vocab_size": 50257}  # fmt: skip
    deepseek = {"model_type": "deepseek_v2", "num_hidden_layers": 2,
                "max_position_embeddings": 4096, **MODELS[-1]}  # fmt: skip
    readers = [
        (read_model_configs, MODELS),
        (read_attention_shapes, SHAPES),
        *((read_config, config) for config in (*configs, gpt2, deepseek)),
    ]
    path = tmp_path / "config.json"
    refused: list[str] = []
    accepted = 0
    for _ in range(500):
        for read, content in readers:
            path.write_bytes(mutate(rng, content))
            try:
                read(path)
                accepted += 1
            except ConfigError as error:
                refused.append(str(error))
    assert len(refused) + accepted == 3000
    assert len(refused) > 1000
    assert accepted > 100
    for text in refused:
        assert len(text.splitlines()) == 1
        assert len(text) < 1000
        assert str(path) in text
