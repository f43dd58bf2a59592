"""Operands of FP8 products laid out for the tensor cores: torchao's, but for who copies."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.training import precision

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"
))]  # fmt: skip
SHAPES = [(1, 1), (16, 48), (257, 300), (1000, 17), (64, 4096)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_transposed_is_the_transpose(
    device: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, device=device).to(dtype)

    y = precision.transposed(x)

    assert y.dtype is dtype
    assert y.is_contiguous()
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8).t())


@pytest.mark.parametrize("device", DEVICES)
def test_transposed_takes_a_part_of_a_matrix(device: str) -> None:
    x = torch.randn((32, 64), device=device).to(torch.float8_e4m3fn)[:, 16:48]

    y = precision.transposed(x)

    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8).t())


def test_the_operator_is_one_that_compile_can_trace() -> None:
    x = torch.zeros((8, 24), dtype=torch.uint8)
    torch.library.opcheck(precision.transposed, (x,))


class Ops:
    """What lay_out needs of torchao.float8.float8_ops, and whether its copies were needed."""

    @staticmethod
    def is_row_major(stride: tuple[int, int]) -> bool:
        return stride[0] > stride[1] and stride[1] == 1

    @staticmethod
    def preprocess_addmm(a: Any, b: Any) -> tuple[Tensor, Any, Tensor, Any]:
        assert Ops.is_row_major(a._data.stride())
        assert not Ops.is_row_major(b._data.stride())
        return a._data, a._scale, b._data, b._scale


@pytest.mark.parametrize(("a_is_turned", "b_is_turned"), [*itertools.product([0, 1], repeat=2)])
def test_torchao_finds_nothing_left_to_copy(
    a_is_turned: int, b_is_turned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    float8 = pytest.importorskip("torchao.float8.float8_training_tensor").Float8TrainingTensor
    monkeypatch.setattr(Ops, "preprocess_addmm", staticmethod(Ops.preprocess_addmm))
    precision.lay_out(Ops)

    def operand(turned: int, shape: tuple[int, int], scale: float) -> Any:
        data = torch.randn(shape[::-1] if turned else shape).to(torch.float8_e4m3fn)
        return float8(data.t() if turned else data, torch.tensor(scale), torch.bfloat16, None)

    a, b = operand(a_is_turned, (16, 32), 2.0), operand(b_is_turned, (32, 48), 4.0)
    a_data, a_scale, b_data, b_scale = Ops.preprocess_addmm(a, b)

    assert (a_scale, b_scale) == (2.0, 4.0)
    assert torch.equal(a_data.view(torch.uint8), a._data.view(torch.uint8))
    assert torch.equal(b_data.view(torch.uint8), b._data.view(torch.uint8))


def test_laying_out_twice_is_laying_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ops, "preprocess_addmm", staticmethod(Ops.preprocess_addmm))

    precision.lay_out(Ops)
    first = Ops.preprocess_addmm
    precision.lay_out(Ops)

    assert Ops.preprocess_addmm is first


def test_torchao_has_what_is_replaced() -> None:
    """A version without it would run, slower, and say nothing."""
    float8_ops = pytest.importorskip("torchao.float8.float8_ops")

    assert callable(float8_ops.preprocess_addmm)
    assert callable(float8_ops.is_row_major)


def test_a_bias_in_the_product_is_a_bias_after_it() -> None:
    float8 = pytest.importorskip("torchao.float8")
    from stepmark.training import fp8_bias

    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    config = float8.Float8LinearConfig(emulate=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    float8.convert_to_float8_training(model, config=config)
    (layer,) = model.children()
    assert isinstance(layer, torch.nn.Linear)
    parameters = [x, *layer.parameters()]

    want = layer(x)
    got = fp8_bias.multiply(layer, x)

    assert torch.equal(got, want)
    grads = [torch.autograd.grad(one.square().sum(), parameters) for one in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)
