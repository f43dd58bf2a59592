"""Patterns of layers train: their loss falls, their parameters are those of the module tree.

Scans and masks equal their definitions, token by token.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.curves import spread
from tests.training.models import assert_parameters, batch, made
from torch import Tensor
from torch.nn.functional import cross_entropy

from stepmark.model.layers import DeltaConfig, Layer, MambaConfig, MoeConfig
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.step_memory.memory import estimate
from stepmark.training.masked_attention import by_flex, by_products, is_visible
from stepmark.training.model_refusals import LACKING, PARTS, parts
from stepmark.training.scans import CausalConv, decayed_scan, delta_scan
from stepmark.training.scores import Scores
from stepmark.training.transformer import Block, Transformer

BUILT_IN = {
    name: model.tiny()
    for name, model in load_models().items()
    if parts(model, PARTS) and not parts(model, LACKING)
}
LLAMA = replace(find_model("llama-3.1-8b").tiny(), seq_len=32)
MAMBA = MambaConfig(num_heads=4, head_dim=16, num_groups=2, state_dim=16, chunk=8)
DELTA = DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)
LATENT = MoeConfig(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=32,
    num_shared_experts=1,
    shared_ffn_hidden_size=48,
    scoring="sigmoid",
    num_groups=2,
    top_groups=1,
    router_bias=True,
    latent_size=32,
)


def of_llama(*pattern: Layer, **values: Any) -> ModelConfig:
    layers = pattern or (Layer(),)
    return replace(LLAMA, pattern=layers, num_layers=max(2, len(layers)), **values)


# What no built-in model has.
OTHERS = {
    "searched widths": of_llama(
        Layer(num_heads=8, num_kv_heads=4, ffn_hidden_size=64),
        Layer(head_dim=32, ffn=""),
        Layer(mixer="", ffn_hidden_size=32),
    ),
    "attention and states": of_llama(Layer(mixer="attention+mamba"), mamba=MAMBA),
    "states or experts": of_llama(
        Layer(mixer="mamba", ffn=""),
        Layer(has_rope=False, ffn=""),
        Layer(mixer="", ffn="experts"),
        mamba=replace(MAMBA, conv_bias=False, has_norm=False, has_bias=True),
        moe=LATENT,
        activation="relu2",
    ),
    "lightning": of_llama(Layer(mixer="lightning", has_rope=False), Layer()),
    "delta": of_llama(Layer(mixer="delta", has_rope=False, ffn="dense"), delta=DELTA),
    "gated heads": of_llama(gate="head", embedding_norm=True, embedding_multiplier=2.0),
    "values are keys": of_llama(shares_kv=True, norm="layernorm_no_weight", activation="relu"),
    "caps": of_llama(
        Layer(chunk=12), softcap=5.0, logit_softcap=8.0, biases=("head", "out", "mlp")
    ),
    "layer norms of heads": of_llama(qk_norm=True, qk_norm_kind="layernorm"),
    "layers of their own": of_llama(
        Layer(window=5), Layer(has_sinks=False, shares_kv=True, rotary_dim=4), has_sinks=True
    ),
    "two tokens more": of_llama(num_mtp_layers=2),
    "silu, one norm": of_llama(
        norm_placement="shared", is_parallel=True, norm="layernorm_no_bias", activation="silu"
    ),
}
MODELS = BUILT_IN | OTHERS


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_falls(name: str) -> None:
    model = MODELS[name]
    transformer = made(model)
    trained = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    tokens_BT, labels_BT = batch(model)
    losses = []
    for _ in range(4):
        loss = transformer(tokens_BT, labels_BT)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for key, weight in transformer.named_parameters():
            assert not weight.requires_grad or weight.grad is not None, key
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_those_of_the_tree_and_of_the_count(name: str) -> None:
    model = OTHERS[name]
    assert not parts(model, LACKING)
    assert_parameters(model)
    weights = made(model).parameters()
    assert sum(weight.numel() for weight in weights) == model.num_params


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_step_is_derived(name: str) -> None:
    assert estimate(spread(MODELS[name], "none")).allocated_bytes > 4 * MODELS[name].num_params


@pytest.mark.parametrize("name", ["caps", "gemma-3-1b", "llama-4-scout", "states or experts"])
def test_a_token_does_not_depend_on_later_ones(name: str) -> None:
    model = MODELS[name]
    transformer = made(model)
    tokens_BT, _ = batch(model)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20:] = (changed_BT[:, 20:] + 1) % model.vocab_size
    before, after = transformer(tokens_BT), transformer(changed_BT)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_a_loss_in_chunks_is_that_of_adapted_logits() -> None:
    model = replace(OTHERS["caps"], logit_multiplier=3.0)
    tokens_BT, labels_BT = batch(model)
    losses = [made(model, loss_chunks=count)(tokens_BT, labels_BT) for count in (1, 4)]
    torch.testing.assert_close(*losses)


def test_later_tokens_are_predicted_from_all_before_them() -> None:
    """A module sees the next token, and its label is the one after it."""
    model = replace(OTHERS["two tokens more"], num_mtp_layers=1)
    transformer = made(model)
    tokens_BT, labels_BT = batch(model)
    with torch.no_grad():
        for weight in transformer.mtp.parameters():
            weight.mul_(20)
        loss = transformer(tokens_BT, labels_BT)
        plain = loss_of_next_tokens(transformer, tokens_BT, labels_BT)
        assert transformer.embedding is not None
        assert transformer.output is not None
        h_BTC = hidden(transformer, tokens_BT)
        following_BT = torch.cat((tokens_BT[:, 1:], tokens_BT[:, :1] * 0), dim=1)
        module: Any = transformer.mtp["0"]
        joined = torch.cat(
            (
                module.hidden_norm(h_BTC),
                module.embedding_norm(transformer.embedding(following_BT)),
            ),
            dim=-1,
        )
        tables = transformer.rotary_tables("1")
        last_BTC = module.norm(Block.forward(module, module.projection(joined), *tables))
        logits_BTV = transformer.output.head(last_BTC)
        later = cross_entropy(logits_BTV[:, :-2].flatten(0, 1), tokens_BT[:, 2:].flatten())
    torch.testing.assert_close(loss, plain + 0.3 * later)


def hidden(transformer: Transformer, tokens_BT: Tensor) -> Tensor:
    assert transformer.embedding is not None
    x_BTC: Tensor = transformer.embedding(tokens_BT)
    for index, block in transformer.blocks.items():
        x_BTC = block(x_BTC, *transformer.rotary_tables(index))
    return x_BTC


def loss_of_next_tokens(
    transformer: Transformer, tokens_BT: Tensor, labels_BT: Tensor
) -> Tensor:
    logits_BTV = transformer(tokens_BT)
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100)


# Masks


def test_what_a_query_sees() -> None:
    at_T = torch.arange(6)

    def rows(scores: Scores) -> list[str]:
        seen_TT = is_visible(scores, at_T[:, None], at_T)
        return ["".join(".x"[int(each)] for each in row) for row in seen_TT]

    window = ["x.....", "xx....", "xxx...", ".xxx..", "..xxx.", "...xxx"]
    assert rows(Scores(window=3)) == window
    chunk = ["x.....", "xx....", "xxx...", "xxxx..", "....x.", "....xx"]
    assert rows(Scores(chunk=4)) == chunk


SCORES = {
    "window": Scores(window=5),
    "chunk": Scores(chunk=12, scale=0.3),
    "cap": Scores(softcap=0.5),
    "sinks": Scores(window=5, has_sinks=True),
    "sinks and cap": Scores(softcap=0.5, has_sinks=True, scale=1.0),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention_equals_products(name: str) -> None:
    """Forward: on a CPU it has no backward pass."""
    torch.manual_seed(0)
    scores = SCORES[name]
    q, k, v = (torch.randn(2, heads, 32, 16) for heads in (4, 2, 2))
    sinks = torch.randn(4) if scores.has_sinks else None
    expected = by_products(q, k, v, scores, sinks)
    torch.testing.assert_close(by_flex(q, k, v, scores, sinks), expected)


# Scans


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 99))


@given(SHAPES)
@settings(max_examples=25, deadline=None)
def test_a_scan_in_chunks_is_its_recurrence(shape: tuple[int, int, int]) -> None:
    tokens, length, seed = shape
    q, k, v, decay = drawn(
        seed, (1, tokens, 2, 3), (1, tokens, 2, 3), (1, tokens, 2, 4), (1, tokens, 2)
    )
    decay = -decay.abs()
    state = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    rows = []
    for t in range(tokens):
        state = state * decay[:, t].exp()[..., None, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((q[:, t, :, None] @ state).squeeze(2))
    expected = torch.stack(rows, dim=1)
    got = decayed_scan(q, k, v, decay, length)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@given(SHAPES)
@settings(max_examples=25, deadline=None)
def test_the_delta_rule_in_chunks_is_its_recurrence(shape: tuple[int, int, int]) -> None:
    tokens, length, seed = shape
    q, k, v, decay, beta = drawn(
        seed,
        *((1, tokens, 2, 3), (1, tokens, 2, 3), (1, tokens, 2, 4)),
        *((1, tokens, 2), (1, tokens, 2)),
    )
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = -decay.abs(), beta.sigmoid()
    state = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    rows = []
    for t in range(tokens):
        state = state * decay[:, t].exp()[..., None, None]
        recalled = (k[:, t, :, None] @ state).squeeze(2)
        new = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        rows.append((q[:, t, :, None] @ state).squeeze(2))
    expected = torch.stack(rows, dim=1)
    got = delta_scan(q, k, v, decay, beta, length)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_reads_a_token_and_those_before_it() -> None:
    conv = CausalConv(2, 3, bias=True)
    assert conv.bias is not None
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[1.0, 10.0, 100.0], [0.0, 0.0, 1.0]]))
        conv.bias.copy_(torch.tensor([0.5, 0.0]))
    x_BTC = torch.tensor([[[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]])
    sums = torch.tensor([[[100.5, 5.0], [210.5, 6.0], [321.5, 7.0]]])
    torch.testing.assert_close(conv(x_BTC), torch.nn.functional.silu(sums))


def test_scaled_models_run() -> None:
    """Widths of all parts shrink together."""
    model = find_model("gpt-oss-20b").scaled(Fraction(1, 32))
    small = replace(model, num_layers=2, seq_len=16, vocab_size=64)
    assert made(small)(*batch(small)).isfinite()
