"""The update: clipping, and fp32 weights beside bf16 ones."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stepmark.cases.training import Precision, Schedule
from stepmark.measuring.ranks import Ranks
from stepmark.model.model import ModelConfig
from stepmark.training.optimizer import Masters, clip_gradients

from .curves import GPT2, LLAMA, case, losses

ALONE = Ranks(rank=0, num_ranks=1, local_rank=0, device=torch.device("cpu"))


def parameters(values: list[list[float]]) -> list[Tensor]:
    made = []
    for grads in values:
        one = torch.zeros(len(grads), requires_grad=True)
        one.grad = torch.tensor(grads)
        made.append(one)
    return made


finite = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.lists(finite, min_size=1, max_size=5), min_size=1, max_size=4))
def test_clipping_is_torchs(values: list[list[float]]) -> None:
    mine, theirs = parameters(values), parameters(values)
    norm = clip_gradients(mine, 1.0)
    want = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.allclose(norm, want)
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad)


def test_gradients_are_scaled_by_a_factor_of_their_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one of another dtype every tensor is a kernel of its own."""
    one = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    one.grad = torch.full_like(one, 3.0)
    two = torch.zeros(1, requires_grad=True)
    two.grad = torch.full_like(two, 4.0)
    dtypes: list[set[torch.dtype]] = []
    multiply = torch._foreach_mul_

    def noted(tensors: list[Tensor], factor: Tensor) -> None:
        dtypes.append({factor.dtype, *(tensor.dtype for tensor in tensors)})
        multiply(tensors, factor)

    monkeypatch.setattr(torch, "_foreach_mul_", noted)
    norm = clip_gradients([one, two], 1.0)
    assert norm.item() == pytest.approx(34**0.5, rel=2**-8)
    assert torch.allclose(two.grad, torch.tensor([4.0]) / norm)
    assert torch.allclose(one.grad.float(), torch.full((2,), 3.0) / norm, rtol=2**-7)
    assert dtypes == [{torch.bfloat16}, {torch.float32}]


def test_other_stages_count_in_the_norm() -> None:
    one = parameters([[3.0]])
    norm = clip_gradients(one, 1.0, lambda square: square + 16)
    assert norm.item() == pytest.approx(5)
    assert one[0].grad is not None
    assert one[0].grad.item() == pytest.approx(3 / 5)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("device", "count"),
    [("cpu", 1), *(pytest.param("cuda", n, marks=ON_GPU) for n in (1, 2**18 + 1, 3 * 2**20))],
)
def test_small_gradients_add_up_in_masters(device: str, count: int) -> None:
    """In bf16 256 + 1 is 256 again."""
    weight = torch.zeros(count, dtype=torch.bfloat16, device=device, requires_grad=True)
    masters = Masters([weight])
    for value in (256.0, 1.0, 1.0):
        weight.grad = torch.full_like(weight, value)
        masters.collect()
        assert weight.grad is None
    (master,) = masters.weights
    assert master.grad is not None
    assert bool((master.grad == 258).all())
    master.data.fill_(0.5)
    masters.publish()
    assert bool((weight == 0.5).all())
    assert not bool(master.grad.any())


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_masters_learn_as_autocast_does(model: ModelConfig) -> None:
    """The same weights in the products; norms are bf16 instead of fp32."""
    of = case(model, mbs=8, grad_accum=2, schedule=Schedule.STEP)
    amp, master, frozen = (
        losses(replace(of, precision=precision, lr=lr), ALONE)
        for precision, lr in (
            (Precision.AMP, of.lr),
            (Precision.MASTER, of.lr),
            (Precision.MASTER, 0.0),
        )
    )
    assert master == pytest.approx(amp, rel=1e-3)
    assert frozen[-1] > 1.1 * master[-1]
