"""PARAM's operator configs. Source of the format: param, train/compute/python/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Bmm, Gemm, Layout
from stepmark.workloads.formats.shapes import ParamConfig, read_config

from .mutations import mutated, only_config_errors


def tensor(*shape: Any, dtype: str = "float") -> dict[str, Any]:
    return {"type": "tensor", "dtype": dtype, "shape": list(shape)}


def config(name: str, *args: Any) -> dict[str, Any]:
    entry = {"input_data_generator": "PyTorch:DefaultDataGenerator"}
    return {name: entry | {"config": [{"input": [{"args": list(args), "kwargs": {}}]}]}}


def read(tmp_path: Path, content: object) -> ParamConfig:
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_config(path)


def test_products(tmp_path: Path) -> None:
    content = config("torch.mm", tensor(2048, 4096, dtype="bfloat16"), tensor(4096, 2048))
    content |= config("torch.bmm", tensor(8, 4, 16), tensor(8, 16, 2))
    found = read(tmp_path, content)
    assert found.ops == (
        ("torch.mm", Gemm(m=2048, n=2048, k=4096, dtype=DType.BF16, layout=Layout.NN)),
        ("torch.bmm", Bmm(batch=8, m=4, n=2, k=16, dtype=DType.FP32, layout=Layout.NN)),
    )
    assert found.lacking == ()


def test_what_is_lacking_is_named(tmp_path: Path) -> None:
    content = config("torch.mm", tensor(4, 4), tensor(4, 4)) | config("torch.nn.Conv2d", 3)
    assert read(tmp_path, content).lacking == ("torch.nn.Conv2d",)


def test_ranges_expand(tmp_path: Path) -> None:
    content = config("torch.mm", tensor(["__range__", 128, 512, 128], 64), tensor(64, 8))
    ops = [op for _, op in read(tmp_path, content).ops]
    assert [op.m for op in ops if isinstance(op, Gemm)] == [128, 256, 384, 512]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"x" * 2**20,
        {"torch.mm": 3},
        {"torch.mm": {}},
        {"torch.mm": {"config": [{}]}},
        config("torch.mm", tensor(4, 4)),
        config("torch.mm", tensor(4, 4), tensor(5, 4)),
        config("torch.mm", tensor(4, 4), tensor(4)),
        config("torch.mm", tensor(4, 4), 7),
        config("torch.mm", tensor(4, 0), tensor(0, 4)),
        config("torch.mm", tensor(4, -4), tensor(-4, 4)),
        config("torch.mm", tensor(4, 4, dtype="int4"), tensor(4, 4)),
        config("torch.mm", tensor(4, 4, dtype="fp8"), tensor(4, 4)),
        config("torch.mm", tensor(4, 2**62), tensor(2**62, 4)),
        config("torch.mm", tensor(4, ["__range__", 4, 1, 1]), tensor(4, 4)),
        config("torch.mm", tensor(4, ["__range__", True, 2, 1]), tensor(4, 4)),
        config("torch.mm", tensor(["__range__", 1, 2**40, 1], 4), tensor(4, 4)),
        config("torch.mm", *[tensor(["__range__", 1, 9999, 1], 4)] * 2),
        config("torch.bmm", tensor(2, 4, 4), tensor(3, 4, 4)),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "config" in text


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "a\x00b"):
        with pytest.raises(ConfigError):
            read_config(path)


def test_a_mutated_file_is_read_or_refused(tmp_path: Path) -> None:
    content = config("torch.mm", tensor(["__range__", 1, 3, 1], 64), tensor(64, 8))
    content |= config("torch.bmm", tensor(8, 4, 16), tensor(8, 16, 2))
    files = mutated(content, 2000, seed=1)
    good, bad = only_config_errors(read_config, files, tmp_path / "config.json")
    assert good > 100
    assert bad > 500
