"""Adapters of low rank beside frozen weights, as of peft, under FSDP2."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class LoraLinear(nn.Module):
    """lora.Linear of peft: base_layer, lora_A, lora_B, a scaling."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def build() -> Callable[[], None]:
    model = nn.Sequential(*(LoraLinear(nn.Linear(8, 8), 2, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
