"""The module tree against the real step's modules: names, shapes, products and attentions."""

import pytest
import torch

from stepmark.bench.training.transformer import Transformer
from stepmark.core.model import load_models
from stepmark.workload.layout import Inputs, ShardLayout
from stepmark.workload.tree import build

MODELS = load_models()
INPUTS = Inputs(mbs=1, seq_len=64)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_real_modules(name: str) -> None:
    """Every layer: names, order of registration and shapes."""
    model = MODELS[name].tiny()
    with torch.device("meta"):
        real = [(key, tuple(one.shape)) for key, one in Transformer(model).named_parameters()]
    found: list[tuple[str, tuple[int, ...]]] = []
    for unit in build(model, ShardLayout(), INPUTS).inside:
        base = int(unit.name.rpartition(".")[2]) if unit.name.startswith("blocks") else 0
        for index in range(unit.times):
            prefix = f"blocks.{base + index}." if unit.name.startswith("blocks") else ""
            found += [(prefix + one.name, one.shape) for one in unit.all_params]
    if model.tied_embeddings:
        assert found.pop()[0] == "output.head.weight"
    assert found == real


@pytest.mark.parametrize("name", MODELS)
def test_paths_are_modules_of_the_real_step(name: str) -> None:
    model = MODELS[name].tiny()
    with torch.device("meta"):
        real = Transformer(model)
    names = {key for key, _ in real.named_modules()} | {
        key for key, _ in real.named_parameters()
    }
    for path, _, leaf in build(model, ShardLayout(), INPUTS).leaves():
        assert path in names or not leaf.is_module, path
