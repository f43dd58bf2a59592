"""Weights depend on the seed and their name: not on stages, wrappers, shards or processes."""

from typing import Any

import pytest
import torch
from tests.ranks_pool import Pool
from tests.training.models import made
from tests.training.weights_on_ranks import check_all
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stepmark.model.model_tables import find_model
from stepmark.training.transformer import Transformer, canonical_name, init_weights, tie

KINDS = ("gpt2-125m", "llama-3.1-8b", "deepseek-v3")


def values(transformer: Transformer) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in transformer.named_parameters()}


@pytest.mark.parametrize("name", KINDS)
def test_stages_have_the_weights_of_the_whole(name: str) -> None:
    model = find_model(name).tiny()
    whole = values(made(model))
    parts = values(made(model, layers=range(1))) | values(made(model, layers=range(1, 2)))
    if model.tied_embeddings:
        assert torch.equal(parts.pop("output.head.weight"), whole["embedding.tokens.weight"])
    assert parts.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(parts[key], value), key


@pytest.mark.parametrize("name", KINDS)
def test_matrices_are_normal_norms_one_and_biases_zero(name: str) -> None:
    for key, value in values(made(find_model(name).tiny())).items():
        if key.endswith("bias"):
            assert not value.any(), key
        elif "norm" in key:
            assert (value == 1).all(), key
        else:
            # Six standard errors of mean and deviation.
            assert value.mean().abs() < 0.02 * 6 / value.numel() ** 0.5, key
            assert value.std() == pytest.approx(0.02, rel=6 / (2 * value.numel()) ** 0.5), key


def test_another_seed_or_name_is_another_draw() -> None:
    model = find_model("llama-3.1-8b").tiny()
    first, second = values(made(model, seed=1)), values(made(model, seed=2))
    drawn = [value for key, value in [*first.items(), *second.items()] if "norm" not in key]
    assert len({tuple(value.flatten()[:4].tolist()) for value in drawn}) == len(drawn)
    assert torch.equal(
        first["blocks.0.ffn.up.weight"], values(made(model, seed=1))["blocks.0.ffn.up.weight"]
    )


def test_wrappers_change_nothing() -> None:
    model = find_model("llama-3.1-8b").tiny()
    wrapped = made(model, seed=9)
    for name, block in list(wrapped.blocks.items()):
        compiled: Any = torch.compile(checkpoint_wrapper(block), backend="eager")
        wrapped.blocks[name] = compiled
    outer = torch.nn.Sequential()
    outer.add_module("module", wrapped)
    init_weights(outer, 0)
    names = [name for name, _ in outer.named_parameters()]
    assert "module.blocks.0._orig_mod._checkpoint_wrapped_module.ffn.up.weight" in names
    expected = values(made(model))
    for name, weight in outer.named_parameters():
        assert torch.equal(weight, expected.pop(canonical_name(name))), name
    assert not expected


def test_bf16_weights_are_the_same_draw_rounded() -> None:
    model = find_model("llama-3.1-8b").tiny()
    with torch.device("meta"):
        small = Transformer(model).to(torch.bfloat16)
    small.to_empty(device="cpu")
    init_weights(small, 0)
    for key, value in values(made(model)).items():
        assert torch.equal(small.get_parameter(key), value.bfloat16()), key


@pytest.mark.parametrize("name", KINDS)
def test_tables_are_filled(name: str) -> None:
    transformer, fresh = made(find_model(name).tiny()), Transformer(find_model(name).tiny())
    tables = dict(transformer.named_buffers())
    assert tables
    for key, table in fresh.named_buffers():
        assert torch.equal(tables[key], table), key
    assert not transformer.state_dict().keys() & tables.keys()


def test_tying_again() -> None:
    with torch.device("meta"):
        transformer = Transformer(find_model("gpt2-125m").tiny())
    transformer.to_empty(device="cpu")
    assert transformer.output
    assert transformer.embedding
    assert transformer.output.head.weight is not transformer.embedding.tokens.weight
    tie(torch.nn.Sequential(transformer))
    assert transformer.output.head.weight is transformer.embedding.tokens.weight


def test_on_four_ranks() -> None:
    with Pool(4) as pool:
        pool.run(check_all, timeout_s=180)
