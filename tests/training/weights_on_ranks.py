"""What test_weights runs on four gloo ranks."""

from dataclasses import replace

import torch
from tests.training.models import apart, batch, gradients, made
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stepmark.measuring.ranks import Ranks
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.training.transformer import Transformer, init_weights, tie

PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "ffn.gate": ColwiseParallel(),
    "ffn.up": ColwiseParallel(),
    "ffn.down": RowwiseParallel(),
}


def sharded(model: ModelConfig, fsdp: DeviceMesh, tp: DeviceMesh | None) -> Transformer:
    with torch.device("meta"):
        transformer = Transformer(model, loss_chunks=3)
    for block in transformer.blocks.values():
        if tp is not None:
            parallelize_module(block, tp, PLAN)
        fully_shard(block, mesh=fsdp)
    fully_shard(transformer, mesh=fsdp)
    transformer.to_empty(device="cpu")
    tie(transformer)
    init_weights(transformer, 3)
    return transformer


def check(model: ModelConfig, fsdp: DeviceMesh, tp: DeviceMesh | None) -> None:
    """Values, loss and gradients are those of one process; every rank has the same batch."""
    got, expected = sharded(model, fsdp, tp), made(model, seed=3)
    for (name, weight), value in zip(
        got.named_parameters(), expected.parameters(), strict=True
    ):
        assert isinstance(weight, DTensor), name
        assert torch.equal(weight.full_tensor(), value), name
    loss = got(*batch(model))
    wanted = expected(*batch(model))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    loss.backward()
    wanted.backward()
    grads = gradients(expected)
    for name, grad in gradients(got).items():
        assert isinstance(grad, DTensor), name
        assert apart(grad.full_tensor(), grads.pop(name)) < 1e-5, name
    assert not grads


def check_all(_ranks: Ranks) -> None:
    whole = init_device_mesh("cpu", (4,))
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    llama = find_model("llama-3.1-8b").tiny()
    check(llama, axes["dp_shard"], axes["tp"])
    # A vocabulary that four ranks cannot share evenly, tied or not; whole experts.
    check(replace(llama, vocab_size=509, tied_embeddings=True), whole, None)
    check(find_model("deepseek-v3").tiny(), whole, None)
