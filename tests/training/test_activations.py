"""The memory estimate's activations against what a real forward pass keeps."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Precision, Recompute
from stepmark.model.model import Activation, ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.step_memory.memory import estimate
from stepmark.training import parallelize
from stepmark.training.transformer import Transformer, init_weights, tie

MBS = 2
# With kernels that the CPU has, too: its RMSNorm and grouped heads make copies.
TINY = dataclasses.replace(
    find_model("gpt2-125m").tiny(), hidden_size=128, num_kv_heads=4, head_dim=32
)


def transformer(model: ModelConfig) -> Transformer:
    """Return a model in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = Transformer(model)
    finally:
        torch.set_default_dtype(before)
    tie(built)
    init_weights(built, 0)
    return built


def forward(built: Transformer, model: ModelConfig) -> None:
    """Run the blocks."""
    assert built.embedding is not None
    x_BTC = built.embedding(torch.zeros((MBS, model.seq_len), dtype=torch.int64))
    for index, block in built.blocks.items():
        x_BTC = block(x_BTC, *built.rotary_tables(index))


def kept_by_blocks(model: ModelConfig) -> int:
    """Bytes of all storages but weights and tables that wait for the backward pass."""
    built = transformer(model)
    tensors = [*built.parameters(), *built.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(built, model)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("max_positions", [64, 0])
def test_blocks_keep_what_the_estimate_says(activation: Activation, max_positions: int) -> None:
    model = dataclasses.replace(TINY, activation=activation, max_positions=max_positions)
    case = TrainCase(model=model, mbs=MBS, precision=Precision.BF16, device="cpu")
    last_norm = 2 * 2 * model.hidden_size * MBS * model.seq_len
    expected = estimate(case).activations_bytes - last_norm
    assert kept_by_blocks(model) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_selected_results_are_those_that_the_estimate_counts(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each block its input, attention with statistics, and every second product.

    The loss is so large that the peak is there, before anything is computed again.
    """
    model = dataclasses.replace(TINY, activation=activation, vocab_size=8192)
    case = TrainCase(
        model=model,
        mbs=MBS,
        precision=Precision.BF16,
        device="cpu",
        recompute=Recompute.OPS,
    )
    rows, elements = MBS * model.seq_len, list[int]()

    def contexts(policy: Any) -> Any:
        def counting(context: Any, op: Any, *args: Any, **more: Any) -> Any:
            found = policy(context, op, *args, **more)
            if found is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
                is_product = str(op).startswith(("aten.mm", "aten.addmm"))
                width = args[-1].shape[1] if is_product else model.num_heads * model.d_v
                statistics = 0 if is_product else 2 * model.num_heads  # of 4 bytes, not 2
                elements.append(rows * (width + statistics))
            return found

        return create_selective_checkpoint_contexts(counting)

    monkeypatch.setattr(parallelize, "create_selective_checkpoint_contexts", contexts)
    built = transformer(model)
    parallelize._checkpoint(built.blocks, case)
    forward(built, model)
    inputs, last_norm = (
        model.num_layers * rows * model.hidden_size,
        2 * rows * model.hidden_size,
    )
    expected = estimate(case).activations_bytes
    assert 2 * (inputs + last_norm + sum(elements)) == expected
