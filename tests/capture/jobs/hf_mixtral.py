"""Hugging Face's Mixtral under FSDP2, experts one after the other."""

from collections.abc import Callable

import torch
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM


def build() -> Callable[[], None]:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        num_local_experts=4,
        experts_implementation="eager",
    )
    model = MixtralForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        tokens = torch.randint(32, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
