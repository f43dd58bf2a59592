"""Patterns of layers: every built-in model trains a few steps, and its loss falls."""

import pytest
import torch
from tests.training.models import batch, made

from stepmark.model.model_tables import load_models
from stepmark.training.model_refusals import LACKING, PARTS, parts

PATTERNS = [
    name
    for name, model in load_models().items()
    if parts(model, PARTS) and not parts(model, LACKING)
]


@pytest.mark.parametrize("name", PATTERNS)
def test_the_loss_falls(name: str) -> None:
    model = load_models()[name].tiny()
    transformer = made(model)
    trained = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    tokens_BT, labels_BT = batch(model)
    losses = []
    for _ in range(4):
        loss = transformer(tokens_BT, labels_BT)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for key, weight in transformer.named_parameters():
            assert not weight.requires_grad or weight.grad is not None, key
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
