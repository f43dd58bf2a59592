"""The chunked loss equals the plain one, multiplies the head once, holds one chunk."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.models import apart, batch, gradients, made
from torch import Tensor, nn

from stepmark.model.model_tables import find_model
from stepmark.training.transformer import IGNORED, chunked_loss, mean_loss


class Counting(nn.Linear):
    """A head of another kind: it has a bias and keeps count."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().forward(x)


@settings(max_examples=40)
@given(
    num_tokens=st.integers(1, 40),
    num_chunks=st.integers(1, 9),
    ignored=st.sets(st.integers(1, 39)),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
)
def test_chunked_is_plain(
    num_tokens: int, num_chunks: int, ignored: set[int], scale: float
) -> None:
    torch.manual_seed(0)
    head = Counting(8, 11)
    x_NC = torch.randn(num_tokens, 8, requires_grad=True)
    labels_N = torch.randint(11, (num_tokens,))
    labels_N[[at for at in ignored if at < num_tokens]] = IGNORED

    plain = mean_loss(head(x_NC), labels_N)
    expected = torch.autograd.grad(plain * scale, (x_NC, *head.parameters()))
    head.rows.clear()
    loss = chunked_loss(head, x_NC, labels_N, num_chunks=num_chunks)
    got = torch.autograd.grad(loss * scale, (x_NC, *head.parameters()))

    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, expected)
    assert sum(head.rows) == num_tokens, "each row is multiplied once"
    assert max(head.rows) == -(-num_tokens // num_chunks)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_of_a_model(is_tied: bool, autocast: bool) -> None:
    model = replace(find_model("llama-3.1-8b").tiny(), tied_embeddings=is_tied)
    plain, chunked = made(model), made(model, loss_chunks=3)
    losses = []
    for transformer in (plain, chunked):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(transformer(*batch(model)))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    wanted = gradients(plain)
    limit = 1e-2 if autocast else 1e-5  # bf16 keeps 8 bits of each chunk's gradient
    for name, grad in gradients(chunked).items():
        assert grad.dtype == torch.float32
        assert apart(grad, wanted.pop(name)) < limit, name
    assert not wanted


def test_a_frozen_head_gets_no_gradient() -> None:
    head = nn.Linear(8, 11).requires_grad_(False)
    x_NC = torch.randn(6, 8, requires_grad=True)
    labels_N = torch.arange(6)
    (expected,) = torch.autograd.grad(mean_loss(head(x_NC), labels_N), x_NC)
    chunked_loss(head, x_NC, labels_N, num_chunks=2).backward()
    assert x_NC.grad is not None
    torch.testing.assert_close(x_NC.grad, expected)
    assert head.weight.grad is None
