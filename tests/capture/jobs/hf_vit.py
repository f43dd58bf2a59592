"""Hugging Face's ViT under DDP."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

WARM_UPS = 2


def build() -> Callable[[], None]:
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    model = nn.parallel.DistributedDataParallel(ViTForImageClassification(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(torch.randn(2, 3, 8, 8), labels=torch.randint(3, (2,))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
