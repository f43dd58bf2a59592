"""PARAM's datasets, number by number. Source: facebookresearch/param, compute/pt/dataset.py."""

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import EmbeddingBag, Gemm, Layout, Mlp, Phase
from stepmark.workloads.datasets import dataset

GEMM_A = """128,4096,4096 256,4096,4096 512,4096,4096 1024,4096,4096
128,1024,1024 256,1024,1024 512,1024,1024 1024,1024,1024
4096,4096,128 4096,4096,256 4096,4096,512 4096,4096,1024
1024,1024,128 1024,1024,256 1024,1024,512"""
GEMM_B = """128,4096,40928 256,4096,40928 512,4096,40928 1024,4096,40928
128,40928,4096 256,40928,4096 512,40928,4096 1024,40928,4096
128,1024,2000 256,1024,2000 512,1024,2000 1024,1024,2000
1024,2000,128 1024,2000,256 1024,2000,512 1024,2000,1024
4096,40928,128 4096,40928,256 4096,40928,512 4096,40928,1024"""
GEMM_C = "1024,1024,64 1024,64,1024 1024,4096,1024 1024,1024,4096"


@pytest.mark.parametrize(
    ("name", "count", "text"), [("A", 15, GEMM_A), ("B", 20, GEMM_B), ("C", 4, GEMM_C)]
)
def test_gemms(name: str, count: int, text: str) -> None:
    ops = dataset("gemm", name, DType.FP32)
    assert len(ops) == count
    found = [(op.m, op.n, op.k) for op in ops if isinstance(op, Gemm)]
    assert found == [tuple(map(int, dims.split(","))) for dims in text.split()]
    # torch.mm of two row-major matrices.
    assert {(op.layout, op.dtype) for op in ops if isinstance(op, Gemm)} == {
        (Layout.NN, DType.FP32)
    }


def test_embedding_bags() -> None:
    forward = [op for op in dataset("embedding-bag", "A", DType.FP32) if op.phase is Phase.FWD]  # type: ignore[union-attr]
    found = [
        (o.rows, o.dim, o.pooling, o.batch) for o in forward if isinstance(o, EmbeddingBag)
    ]
    batches = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert len(found) == 16
    assert found == [(r, 128, 30, b) for r in (14_000_000, 26_000_000) for b in batches]


def test_embedding_bags_b() -> None:
    ops = dataset("embedding-bag", "b", DType.FP32)
    assert len(ops) == 12  # 6 shapes, forward and backward
    batches = (2048, 4096, 8192, 16384, 32768, 65536)
    assert [op.batch for op in ops[::2] if isinstance(op, EmbeddingBag)] == list(batches)
    for op in ops:
        assert isinstance(op, EmbeddingBag)
        assert (op.rows, op.dim, op.pooling, op.alpha) == (4_800_000, 56, 34, 0.0)


def test_mlps() -> None:
    ops = dataset("mlp", "A", DType.FP32)
    steps = [op for op in ops if isinstance(op, Mlp) and op.phase is Phase.STEP]
    assert len(steps) == 12
    found = [(op.layers, op.input, op.hidden, op.output, op.batch) for op in steps]
    batches = (128, 256, 512, 1024, 2048, 4096)
    assert found == [(18, w, w, w, b) for w in (1024, 4096) for b in batches]
    for op in steps:
        assert len(op.widths) == 20  # PARAM's printed #Layer
        assert op.optimizer == "sgd"
        # PARAM's 6 x weights x batch counts the gradient of the data as well.
        nominal = 6 * op.num_weights * op.batch
        assert nominal - op.flops == 2 * op.batch * op.input * op.hidden


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16, DType.TF32])
def test_the_dtype_is_kept(dtype: DType) -> None:
    assert {op.dtype for op in dataset("gemm", "C", dtype)} == {dtype}


@pytest.mark.parametrize(
    ("family", "name"),
    [("gemm", "D"), ("gemm", ""), ("mlp", "B"), ("embedding-bag", "C"), ("norm", "A")],
)
def test_unknown_datasets(family: str, name: str) -> None:
    with pytest.raises(ConfigError, match="dataset"):
        dataset(family, name, DType.FP32)
