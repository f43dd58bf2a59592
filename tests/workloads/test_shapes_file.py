import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import FAMILIES, Attention, Gemm, GroupedGemm, Layout, Phase
from stepmark.workloads.formats.shapes import read_shapes

from .mutations import mutated, only_config_errors

GOOD: list[dict[str, Any]] = [
    {"m": 4096, "n": 4096, "k": 1024, "dtype": "fp16", "layout": "tn", "model": "x"},
    {"m": 16, "n": 32, "k": 48, "role": "qkv", "mbs": 2, "out_dtype": "fp32"},
]
ATTENTION = [
    {
        "batch": 1,
        "seq_q": 10,
        "seq_kv": 10,
        "heads": 4,
        "kv_heads": 2,
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "varlen": [4, 6],
        "phase": "bwd",
    }
]


def read(tmp_path: Path, content: object, family: str = "gemm") -> list[Any]:
    path = tmp_path / "shapes.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_shapes(path, family, {"dtype": DType.BF16})


def test_fields_labels_and_defaults(tmp_path: Path) -> None:
    (first, one), (second, two) = read(tmp_path, GOOD)
    assert one == Gemm(m=4096, n=4096, k=1024, dtype=DType.FP16, layout=Layout.TN)
    assert two == Gemm(m=16, n=32, k=48, out_dtype=DType.FP32)
    assert (first.model, first.role, first.mbs) == ("x", "", None)
    assert (second.model, second.role, second.mbs) == ("", "qkv", 2)


def test_lists_and_passes(tmp_path: Path) -> None:
    ((_, op),) = read(tmp_path, ATTENTION, "attention")
    assert isinstance(op, Attention)
    assert op.varlen == (4, 6)
    assert op.phase is Phase.BWD
    item = {"num_groups": 2, "tokens": 4, "n": 1, "k": 1, "skew": 1}
    ((_, grouped),) = read(tmp_path, [item], "grouped-gemm")
    assert grouped == GroupedGemm(num_groups=2, tokens=4, n=1, k=1, skew=1.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"m": 1, "n": 1}], ["shapes.json[0]", "k", "missing"]),
        ([{"m": 1, "n": 1, "k": 1}, {"m": 1, "n": 1, "kk": 1}], ["[1]", "kk", "did you mean"]),
        ([{"m": 1, "n": 1, "k": "1"}], ["[0]: k", "a whole number"]),
        ([{"m": 1, "n": 1, "k": 1.5}], ["[0]: k", "a whole number"]),
        ([{"m": 1, "n": 1, "k": True}], ["[0]: k", "a whole number"]),
        ([{"m": 1, "n": 1, "k": None}], ["[0]: k", "a whole number"]),
        ([{"m": 1, "n": 1, "k": 0}], ["[0]: k 0 is invalid"]),
        ([{"m": 1, "n": 1, "k": 2**60}], ["[0]: k"]),
        ([{"m": 1, "n": 1, "k": 1, "dtype": "int4"}], ["dtype", "int4", "bf16"]),
        ([{"m": 1, "n": 1, "k": 1, "mbs": "2"}], ["[0]: mbs"]),
        ([{"m": 1, "n": 1, "k": 1, "mbs": True}], ["[0]: mbs"]),
        ([{"m": 1, "n": 1, "k": 1, "mbs": 0}], ["[0]: mbs"]),
        ([{"m": 1, "n": 1, "k": 1, "model": 3}], ["[0]: model"]),
        ([], ["at least one"]),
        ({}, ["list of shapes"]),
        ([1], ["list of shapes"]),
        (b"", ["list of shapes"]),
        (b"\xff\xfe", ["list of shapes"]),
        (b"[" * 100_000, ["list of shapes"]),
        (b"x" * 2**20, ["list of shapes"]),
    ],
)
def test_what_is_refused(tmp_path: Path, content: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text, text


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "a\x00b"):
        with pytest.raises(ConfigError):
            read_shapes(path, "gemm", {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, family: str) -> None:
    from dataclasses import asdict

    from tests.model.ops_samples import PLAIN

    content = [asdict(PLAIN[family])] * 2
    files = mutated(content, 300, seed=len(family))
    good, bad = only_config_errors(
        lambda path: read_shapes(path, family, {"dtype": DType.FP32}),
        files,
        tmp_path / "s.json",
    )
    assert good + bad == 300
    assert bad > 100
