"""Hugging Face's Llama with adapters of low rank put in as peft does, under DDP."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

WARM_UPS = 2


class LoraLinear(nn.Module):
    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def build() -> Callable[[], None]:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "v_proj")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoraLinear(module, 2))
    model = nn.parallel.DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step() -> None:
        tokens = torch.randint(32, (2, 8))
        mask = torch.ones_like(tokens)
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
