"""The memory estimate's activations against what a real forward pass keeps."""

import dataclasses

import pytest
import torch

from stepmark.app.train_plan import estimated_memory as estimate
from stepmark.bench.training.transformer import Transformer, init_weights, tie
from stepmark.core.model import Activation, ModelConfig, find_model
from stepmark.core.train_case import TrainCase
from stepmark.core.training import Precision

MBS = 2
# With kernels that the CPU has, too: its RMSNorm and grouped heads make copies.
TINY = dataclasses.replace(
    find_model("gpt2-125m").tiny(), hidden_size=128, num_kv_heads=4, head_dim=32
)


def kept_by_blocks(model: ModelConfig) -> int:
    """Bytes of all storages but weights and tables that wait for the backward pass."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = Transformer(model)
    finally:
        torch.set_default_dtype(before)
    tie(built)
    init_weights(built, 0)
    tensors = [*built.parameters(), *built.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    assert built.embedding is not None
    x_BTC = built.embedding(torch.zeros((MBS, model.seq_len), dtype=torch.int64))
    tables = [built.cos_TD, built.sin_TD] if not model.max_positions else [None, None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in built.blocks.values():
            x_BTC = block(x_BTC, *tables)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("max_positions", [64, 0])
def test_blocks_keep_what_the_estimate_says(activation: Activation, max_positions: int) -> None:
    model = dataclasses.replace(TINY, activation=activation, max_positions=max_positions)
    case = TrainCase(model=model, mbs=MBS, precision=Precision.BF16, device="cpu")
    last_norm = 2 * 2 * model.hidden_size * MBS * model.seq_len
    expected = estimate(case).activations_bytes - last_norm
    assert kept_by_blocks(model) == pytest.approx(expected, rel=0.01)
