"""Operators in a few words."""

import pytest

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import MIB
from stepmark.model.ops import Attention, Copy, Gemm, from_shorthand


@pytest.mark.parametrize("text", ["gemm:512", "GEMM:512", " gemm:512x512x512 "])
def test_a_square_product(text: str) -> None:
    assert from_shorthand(text, DType.BF16) == Gemm(m=512, n=512, k=512, dtype=DType.BF16)


def test_a_product_in_its_type() -> None:
    found = from_shorthand("gemm:128x256x512", DType.FP32)
    assert found == Gemm(m=128, n=256, k=512, dtype=DType.FP32)


def test_copies() -> None:
    assert from_shorthand("copy", DType.BF16) == Copy(num_bytes=256 * MIB)
    assert from_shorthand("copy:1.5M", DType.BF16) == Copy(num_bytes=3 * MIB // 2)
    assert from_shorthand("copy:4", DType.BF16) == Copy(num_bytes=4)
    assert from_shorthand("copy:7", DType.BF16) == Copy(num_bytes=4)  # whole words


def test_attention() -> None:
    default = from_shorthand("attention", DType.BF16)
    assert default == from_shorthand("attention:2x4096x32x128", DType.BF16)
    assert isinstance(default, Attention)
    assert default.causal
    assert (default.batch, default.seq_q, default.heads) == (2, 4096, 32)


@pytest.mark.parametrize(
    "text",
    [
        *("", "norm", "gemm", "gemm:", "gemm:0", "gemm:-8", "gemm:8x8", "gemm:8x8x8x8"),
        *("gemm:a", "gemm:8x", "gemm:1e3", "copy:x", "copy:0", "copy:3", "copy:-1"),
        *("attention:", "attention:1x2x3", "attention:1x2x3x0")[1:],
    ],
)
def test_what_is_refused_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_shorthand(text, DType.BF16, "with")
    assert caught.value.field == "with"
