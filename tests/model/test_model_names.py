"""Models of one name are told apart by what they compute, and by no more than that."""

from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest

from stepmark.model.layers import MlaConfig
from stepmark.model.model import NO_IDENTITY, ModelConfig
from stepmark.model.model_names import architecture, distinct_names
from stepmark.model.model_tables import find_model, load_models

LLAMA = find_model("llama-3.1-8b")
MIXTRAL = find_model("mixtral-8x7b")
DEEPSEEK = find_model("deepseek-v3")


def test_models_with_names_of_their_own_keep_them() -> None:
    models = load_models().values()
    assert distinct_names(models) == {model: model.name for model in models}


def test_a_name_has_no_more_than_tells_its_models_apart() -> None:
    narrow, wide = (replace(LLAMA, name="m", hidden_size=width) for width in (2048, 8192))
    deep = replace(wide, num_layers=64)
    assert distinct_names([narrow, wide, LLAMA]) == {
        narrow: "m (hidden 2048)",
        wide: "m (hidden 8192)",
        LLAMA: "llama-3.1-8b",
    }
    assert list(distinct_names([narrow, wide, deep]).values()) == [
        "m (hidden 2048, layers 32)",
        "m (hidden 8192, layers 32)",
        "m (hidden 8192, layers 64)",
    ]


def test_any_models_that_compute_something_else_have_different_names() -> None:
    """All built-in models under one name, pair by pair and all together."""
    models = [replace(model, name="m") for model in load_models().values()]
    for some in [*combinations(models, 2), models]:
        names = distinct_names(some)
        for one, other in combinations(some, 2):
            assert (names[one] == names[other]) is (architecture(one) == architecture(other))


def test_length_and_source_are_no_difference() -> None:
    others = [
        replace(LLAMA, seq_len=LLAMA.seq_len // 2),
        replace(LLAMA, source="elsewhere"),
        replace(LLAMA, aliases=("other",)),
        replace(LLAMA, published_params=1, published_active_params=1),
    ]
    assert set(distinct_names([LLAMA, *others]).values()) == {LLAMA.name}


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda model: model.name)
def test_every_field_counts(model: ModelConfig) -> None:
    """Only name, length and the source are left out of what is compared."""
    flat = architecture(model)
    own = {field.name for field in fields(model)} - {"name", "seq_len", *NO_IDENTITY}
    nested: dict[str, Any] = {"moe": model.moe, "mla": model.mla}
    inner = {
        f"{name}.{field.name}"
        for name, config in nested.items()
        if config is not None
        for field in fields(config)
    }
    absent = {name for name, config in nested.items() if config is None}
    assert set(flat) == own - set(nested) | absent | inner


def test_kinds_of_layers_are_named_in_words() -> None:
    dense = replace(MIXTRAL, moe=None, ffn_hidden_size=14336)
    assert MIXTRAL.ffn_hidden_size != dense.ffn_hidden_size
    same = replace(MIXTRAL, ffn_hidden_size=14336)
    assert list(distinct_names([same, dense]).values()) == [
        "mixtral-8x7b (experts 8)",
        "mixtral-8x7b (no experts)",
    ]
    tied = replace(LLAMA, tied_embeddings=True)
    assert list(distinct_names([LLAMA, tied]).values()) == [
        "llama-3.1-8b (no tied embeddings)",
        "llama-3.1-8b (tied embeddings)",
    ]
    assert isinstance(DEEPSEEK.mla, MlaConfig)
    direct = replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, q_lora_rank=None))
    assert distinct_names([DEEPSEEK, direct])[direct] == "deepseek-v3 (no mla q lora rank)"
