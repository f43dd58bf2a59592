"""The decoder's laws: counts, causality, positions, stages; dtypes; what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.models import batch, gradients, made
from torch import Tensor, nn

from stepmark.ground.errors import ConfigError
from stepmark.model.model_tables import find_model, load_models
from stepmark.training.attention import causal_attention, rope_tables, rotate
from stepmark.training.layers import Norm
from stepmark.training.model_refusals import LACKING, parts
from stepmark.training.transformer import Transformer

KINDS = ("gpt2-125m", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")


def on_meta(name: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(find_model(name))


@pytest.mark.parametrize(
    "name", [name for name, model in load_models().items() if not parts(model, LACKING)]
)
def test_parameters_are_those_that_the_configuration_counts(name: str) -> None:
    weights = on_meta(name).parameters()
    assert sum(weight.numel() for weight in weights) == find_model(name).num_params


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "deepseek-v2-lite"])
def test_biases_of_attention_are_those_that_are_counted(name: str) -> None:
    model = replace(find_model(name), attention_bias=True).with_layers(2)
    with torch.device("meta"):
        weights = list(Transformer(model).parameters())
    assert sum(weight.numel() for weight in weights) == model.num_params
    assert model.num_params > find_model(name).with_layers(2).num_params


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2-1.5b", 1_557_686_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b-proxy-1l", 2_957_008_896),
    ],
)
def test_published_counts(name: str, num_params: int) -> None:
    assert sum(weight.numel() for weight in on_meta(name).parameters()) == num_params


@pytest.mark.parametrize("name", KINDS)
def test_a_token_changes_nothing_before_it(name: str) -> None:
    model = find_model(name).tiny()
    transformer = made(model)
    tokens_BT, _ = batch(model)
    changed_BT, at = tokens_BT.clone(), 40
    changed_BT[:, at] = (changed_BT[:, at] + 1) % model.vocab_size
    with torch.no_grad():
        before, after = transformer(tokens_BT), transformer(changed_BT)
    torch.testing.assert_close(after[:, :at], before[:, :at], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after[:, at:], before[:, at:], atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_stages_chained_are_the_whole(name: str) -> None:
    model = replace(find_model(name).tiny(), num_layers=3)
    whole, tokens_labels = made(model), batch(model)
    stages = [made(model, layers=part) for part in (range(1), range(1, 2), range(2, 3))]
    assert [stage.embedding is None for stage in stages] == [False, True, True]
    assert [stage.output is None for stage in stages] == [True, True, False]

    tokens_BT, labels_BT = tokens_labels
    loss = stages[2](stages[1](stages[0](tokens_BT)), labels_BT)
    expected = whole(tokens_BT, labels_BT)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)

    loss.backward()
    expected.backward()
    parts: dict[str, Tensor] = {}
    for stage in stages:
        parts |= gradients(stage)
    wanted = gradients(whole)
    if model.tied_embeddings:  # each end of the pipeline has its share
        parts["embedding.tokens.weight"] += parts.pop("output.head.weight")
    assert parts.keys() == wanted.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(parts[key], grad, rtol=1e-5, atol=1e-7)


def test_grouped_heads_are_heads_that_share_keys_and_values() -> None:
    grouped = find_model("llama-3.1-8b").tiny()
    group_size = grouped.num_heads // grouped.num_kv_heads
    plain = replace(grouped, num_kv_heads=grouped.num_heads)
    short, full = made(grouped), made(plain)
    full.load_state_dict(short.state_dict() | expanded(short, group_size))
    tokens_BT, _ = batch(grouped)
    with torch.no_grad():
        torch.testing.assert_close(short(tokens_BT), full(tokens_BT), rtol=1e-5, atol=1e-6)


def expanded(short: Transformer, group_size: int) -> dict[str, Tensor]:
    """qkv with a key and a value for each query."""
    model = short.model
    rows = {}
    for name, weight in short.named_parameters():
        if name.endswith("qkv.weight"):
            groups = weight.unflatten(0, (model.num_kv_heads, group_size + 2, model.head_dim))
            heads = [
                torch.cat([group[query], group[-2], group[-1]])
                for group in groups
                for query in range(group_size)
            ]
            rows[name] = torch.cat(heads)
    return rows


@given(shift=st.integers(0, 40), first=st.integers(0, 20), second=st.integers(0, 20))
def test_rotated_products_depend_on_the_distance_alone(
    shift: int, first: int, second: int
) -> None:
    cos_TD, sin_TD = rope_tables(64, 16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator)

    def product(at: int, other: int) -> Tensor:
        q_BTD, k_BTD = (x.expand(1, 64, 16) for x in (q, k))
        return rotate(q_BTD, cos_TD, sin_TD)[0, at] @ rotate(k_BTD, cos_TD, sin_TD)[0, other]

    moved = product(first + shift, second + shift)
    torch.testing.assert_close(moved, product(first, second), rtol=1e-4, atol=1e-4)


def test_rotation_keeps_lengths_and_the_first_position() -> None:
    cos_TD, sin_TD = rope_tables(8, 4, torch.device("cpu"))
    x_BTHD = torch.randn(2, 8, 3, 4)
    turned = rotate(x_BTHD, cos_TD, sin_TD)
    torch.testing.assert_close(turned.norm(dim=-1), x_BTHD.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x_BTHD[:, 0])
    assert not torch.allclose(turned[:, 1], x_BTHD[:, 1])


@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
@pytest.mark.parametrize("value_width", [16, 8])
def test_attention_is_its_definition(kernel: str, value_width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q_BTHD = torch.randn(2, 6, 4, 16, generator=generator)
    k_BTKD = torch.randn(2, 6, 2, 16, generator=generator)
    v_BTKE = torch.randn(2, 6, 2, value_width, generator=generator)
    k, v = (x.repeat_interleave(2, dim=2) for x in (k_BTKD, v_BTKE))
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD, k) / 4
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshe->bthe", scores.softmax(dim=-1), v)
    torch.testing.assert_close(causal_attention(q_BTHD, k_BTKD, v_BTKE, kernel), expected)


@pytest.mark.parametrize("name", KINDS)
def test_under_autocast_the_residual_stream_is_bf16_and_the_loss_fp32(name: str) -> None:
    model = find_model(name).tiny()
    transformer = made(model)
    seen: set[torch.dtype] = set()
    for part in transformer.modules():
        if isinstance(part, Norm | nn.Linear):
            part.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    for block in transformer.blocks.values():
        block.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = transformer(*batch(model))
    assert seen == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(made(model)(*batch(model)).item(), rel=1e-3)
    loss.backward()
    assert {grad.dtype for grad in gradients(transformer).values()} == {torch.float32}


@pytest.mark.parametrize("name", KINDS)
def test_bf16_weights_compute_in_bf16_with_tables_in_fp32(name: str) -> None:
    model = find_model(name).tiny()
    transformer = made(model).to(torch.bfloat16)
    for tables in transformer.tables.values():
        tables.fill_tables()
    loss = transformer(*batch(model))
    loss.backward()
    assert {table.dtype for table in transformer.tables.buffers()} <= {torch.float32}
    assert {grad.dtype for grad in gradients(transformer).values()} == {torch.bfloat16}
    assert loss.item() == pytest.approx(made(model)(*batch(model)).item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_computes_in_fp32(kind: str) -> None:
    norm = Norm("layernorm" if kind == "layernorm" else "rmsnorm", 64)
    nn.init.ones_(norm.weight)
    if norm.bias is not None:
        nn.init.zeros_(norm.bias)
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    exact = norm(x.float())
    assert norm(x).dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, which is what rounding the exact result costs.
    assert ((norm(x).float() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention", "fast"),
        ("loss_chunks", 0),
        ("layers", range(3)),
        ("layers", range(2, 1)),
        ("layers", range(0, 2, 2)),
    ],
)
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} "):
        Transformer(find_model("llama-3.1-8b").tiny(), **{field: value})


@pytest.mark.parametrize(("name", "is_tied"), [("gpt2-125m", True), ("llama-2-7b", False)])
def test_head_and_table_are_one_only_where_tied(name: str, is_tied: bool) -> None:
    transformer = made(find_model(name).tiny())
    assert transformer.embedding
    assert transformer.output
    head, table = transformer.output.head.weight, transformer.embedding.tokens.weight
    assert (head is table) == is_tied
    assert torch.equal(head, table) == is_tied
