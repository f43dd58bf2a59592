"""Small models with values, for the tests of this folder."""

import torch
from torch import Tensor

from stepmark.model.model import ModelConfig
from stepmark.step.layout import Inputs, ShardLayout
from stepmark.step.tree import build
from stepmark.training.model_refusals import parts
from stepmark.training.transformer import Transformer, init_weights, tie


def made(
    model: ModelConfig, *, layers: range | None = None, loss_chunks: int = 1, seed: int = 0
) -> Transformer:
    """As a run makes it: on meta first."""
    with torch.device("meta"):
        layers = layers or range(model.num_layers)
        transformer = Transformer(
            model,
            layers=layers,
            has_embedding=layers.start == 0,
            has_output=layers.stop == model.num_layers,
            loss_chunks=loss_chunks,
        )
    transformer.to_empty(device="cpu")
    tie(transformer)
    init_weights(transformer, seed)
    return transformer


def batch(model: ModelConfig, *, seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    """tokens_BT and labels_BT, the next token; the last of each row has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(model.vocab_size, (rows, model.seq_len), generator=generator)
    labels_BT = tokens_BT.roll(-1, dims=1)
    labels_BT[:, -1] = -100
    return tokens_BT, labels_BT


def gradients(transformer: Transformer) -> dict[str, Tensor]:
    """By name; what has no gradient is left out."""
    return {
        name: weight.grad
        for name, weight in transformer.named_parameters()
        if weight.grad is not None
    }


def apart(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((got - expected).norm() / expected.norm())


def assert_parameters(model: ModelConfig) -> None:
    """Names and shapes of the step's parameters are those of the module tree.

    So is the order of registration, but for what torch registers first: vectors of a module
    before the modules in it, and norms before the part that they follow.
    """
    with torch.device("meta"):
        real = [(key, tuple(one.shape)) for key, one in Transformer(model).named_parameters()]
    expected: list[tuple[str, tuple[int, ...]]] = []
    for unit in build(model, ShardLayout(), Inputs(mbs=1, seq_len=64)).inside:
        kind, _, first = unit.name.rpartition(".")
        for index in range(unit.times):
            prefix = f"{kind}.{int(first) + index}." if kind else ""
            expected += [(prefix + one.name, one.shape) for one in unit.all_params]
    if model.tied_embeddings:
        assert expected.pop()[0] == "output.head.weight"
    assert sorted(expected) == sorted(real)
    later = ("has_sinks", "layer.mixer", "norm_placement", "num_mtp_layers")
    assert expected == real or parts(model, later)
