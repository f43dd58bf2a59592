"""Activations and their gradients, alone and in the forms that FP8 layers and compile get."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stepmark.training.attention import join
from stepmark.training.layers import activate

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def reference(gate: Tensor | None, up: Tensor) -> Tensor:
    if gate is None:
        return functional.gelu(up, approximate="tanh")
    return functional.silu(gate) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", [1, 2048, 5001])
def test_settled_gradients_are_the_gradients(
    device: str, dtype: torch.dtype, is_gated: bool, size: int
) -> None:
    torch.manual_seed(0)
    gate, up, grad = (4 * torch.randn(size, device=device).to(dtype) for _ in range(3))
    inputs = [one.requires_grad_() for one in ([gate, up] if is_gated else [up])]
    exact = [one.detach().double().requires_grad_() for one in inputs]

    got = activate(*(inputs if is_gated else [None, *inputs]), settled=True)
    want = reference(*(exact if is_gated else [None, *exact]))

    rtol, atol = (0.03, 0.03) if dtype is torch.bfloat16 else (1e-4, 2e-5)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
    found = torch.autograd.grad(got, inputs, grad)
    for mine, theirs in zip(
        found, torch.autograd.grad(want, exact, grad.double()), strict=True
    ):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=atol)


# Dynamo makes an instance of the function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_settled_activation_compiles_to_one_graph(is_gated: bool) -> None:
    gate, up = (torch.randn(64, requires_grad=True) for _ in range(2))
    compiled = torch.compile(activate, fullgraph=True, backend="aot_eager")

    got = compiled(gate if is_gated else None, up, settled=True)

    torch.testing.assert_close(got, reference(gate if is_gated else None, up))
    got.sum().backward()
    assert up.grad is not None


@pytest.mark.parametrize("is_permuted", [False, True])
def test_join_is_cat(is_permuted: bool) -> None:
    shapes = [(2, 3, 4, width, 8) for width in (5, 1, 1)]
    parts = [torch.randn(shape) for shape in shapes]
    if is_permuted:  # as gradients of heads-first attention come
        parts = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in parts]

    assert torch.equal(join(parts, -2), torch.cat(parts, -2))


def test_compiled_gelu_is_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-12, 12, 4001, requires_grad=True)
    want = torch.nn.functional.gelu(x.double(), approximate="tanh")
    (want_grad,) = torch.autograd.grad(want.sum(), x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    got = activate(None, x)
    (got_grad,) = torch.autograd.grad(got.sum(), x)

    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=2e-6)
