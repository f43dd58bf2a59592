"""FLOPs of training: laws between conventions, and figures published elsewhere."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases import flops
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Recompute
from stepmark.model.layers import DENSE, EXPERTS
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model, load_models
from stepmark.model.ops import Attention, Gemm, Phase

MODELS = sorted(load_models())


def at(name: str, seq_len: int) -> ModelConfig:
    return replace(find_model(name), seq_len=seq_len)


def proxy(num_layers: int) -> ModelConfig:
    return replace(at("llama-3.1-70b", 4096), num_layers=num_layers)


# FLOPs per token and ratios as llm-train-bench and the projects behind the other two
# conventions have them: model, palm-all, torchtitan / palm-all, causal / palm-all.
PUBLISHED = [
    (at("gpt2-125m", 1024), 0.860e9, 0.994, 0.929),
    (at("gpt2-1.5b", 1024), 10.290e9, 0.999, 0.953),
    (at("llama-3.1-8b", 4096), 54.624e9, 0.942, 0.883),
    (at("llama-3.1-70b", 4096), 455.5e9, 0.986, 0.951),
    (proxy(1), 18.145e9, 0.653, 0.642),
    (proxy(4), 34.754e9, 0.819, 0.795),
]


@pytest.mark.parametrize(("model", "palm", "titan_share", "causal_share"), PUBLISHED)
def test_published_figures(
    model: ModelConfig, palm: float, titan_share: float, causal_share: float
) -> None:
    found = flops.per_token(TrainCase(model=model))
    assert found.palm_all == pytest.approx(palm, rel=6e-4)
    assert found.palm_all is not None
    assert found.torchtitan / found.palm_all == pytest.approx(titan_share, abs=6e-4)
    # Those figures have 6 FLOPs for each bias and norm weight, too; we count products only.
    vectors = model.num_params - model.num_embedding_params - model.num_active_matmul_params
    with_vectors = found.causal + 6 * vectors
    assert with_vectors / found.palm_all == pytest.approx(causal_share, abs=6e-4)
    assert found.causal == pytest.approx(with_vectors, rel=1e-3)


def test_8b_at_8192_as_torchtitan_and_megatron_bridge_count_it() -> None:
    found = flops.per_token(TrainCase(model=at("llama-3.1-8b", 8192)))
    assert found.torchtitan == pytest.approx(57.9e9, rel=1e-3)
    assert found.causal == pytest.approx(51.5e9, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_conventions_count_more_and_more(name: str) -> None:
    """Executed <= whole square without lookups <= everything stored."""
    found = flops.per_token(TrainCase(model=find_model(name)))
    assert found.causal < found.torchtitan
    if find_model(name).moe:
        assert found.palm_all is None
    else:
        assert found.palm_all is not None
        assert found.torchtitan <= found.palm_all
    assert found.hfu == found.causal


@pytest.mark.parametrize("name", MODELS)
@given(seq_len=st.integers(1, 4096))
def test_scores_are_those_of_the_operator(name: str, seq_len: int) -> None:
    """Backward twice the forward."""
    model = find_model(name)
    seq_len = min(seq_len, model.max_positions or seq_len)
    model = replace(model, seq_len=seq_len)
    op = Attention(
        batch=1,
        seq_q=seq_len,
        seq_kv=seq_len,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim_qk=model.d_qk,
        head_dim_v=model.d_v,
        window=model.mla.indexer.top_k if model.mla and model.mla.indexer else 0,
    )
    fwd, bwd = op.flops, replace(op, phase=Phase.BWD).flops
    assert flops.attention(model, DENSE) * seq_len == pytest.approx(fwd)
    assert 2 * flops.attention(model, DENSE) * seq_len == pytest.approx(bwd)


@pytest.mark.parametrize("name", MODELS)
def test_products_of_a_block_are_all_its_weights(name: str) -> None:
    model = find_model(name)
    for moe in (DENSE, EXPERTS)[: 1 + bool(model.moe)]:
        products = [one.num_active for one in model.linears(moe)]
        assert sum(products) == model.layer_matmul_params(moe, active=True)
        assert all(products) or not model.ffn_hidden_size


def test_a_dense_forward_is_the_sum_of_its_gemms() -> None:
    """Widths of llama-3.1-8b by hand; 1,024 tokens."""
    model, m = at("llama-3.1-8b", 1024), 1024
    widths = [(6144, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    layer = sum(Gemm(m=m, n=n, k=k).flops for n, k in widths)
    head = Gemm(m=m, n=128256, k=4096).flops
    scores = 32 * flops.scores(model) * m
    assert flops.forward(model) * m == 32 * layer + head + scores


def case(name: str, recompute: Recompute, blocks: tuple[int, int] = (1, 1)) -> TrainCase:
    return TrainCase(model=find_model(name), recompute=recompute, recompute_blocks=blocks)


@pytest.mark.parametrize("name", MODELS)
def test_full_recompute_runs_all_but_the_head_and_the_last_products_twice(name: str) -> None:
    """Of experts the last product, too, unless an MLP of shared ones follows.

    Where a norm or a gate follows the last product, it runs twice as well.
    """
    model = find_model(name)
    last = 0
    is_normed = model.norm_placement in ("post", "both")
    for layer, count in model.layer_counts.items():
        moe = model.moe if layer.has_experts else None
        if not is_normed and (moe is None or (moe.num_shared_experts and not moe.shared_gate)):
            last += count * model.linears(layer)[-1].num_active
    full = flops.recomputed(case(name, Recompute.FULL))
    assert full == pytest.approx(flops.forward(model) - 2 * model.head_params - 2 * last)
    all_blocks = flops.recomputed(case(name, Recompute.BLOCKS, (3, 3)))
    assert all_blocks == pytest.approx(full)
    some = flops.recomputed(case(name, Recompute.BLOCKS, (1, 4)))
    ops = flops.recomputed(case(name, Recompute.OPS))
    assert 0 < some <= full
    assert 0 < ops < full
    assert flops.recomputed(case(name, Recompute.NONE)) == 0


def test_one_block_in_four_and_every_second_product() -> None:
    full = flops.recomputed(case("llama-3.1-8b", Recompute.FULL))
    quarter = flops.recomputed(case("llama-3.1-8b", Recompute.BLOCKS, (1, 4)))
    assert quarter == pytest.approx(full / 4)
    # qkv, gate and down are kept; out and up run again.
    again = 2 * 32 * (4096 * 4096 + 4096 * 14336)
    assert flops.recomputed(case("llama-3.1-8b", Recompute.OPS)) == again
    # qkv and up are kept, nothing needs the result of down; out runs again.
    assert flops.recomputed(case("gpt2-125m", Recompute.OPS)) == 2 * 12 * 768 * 768


def test_executed_flops_of_a_step_by_hand() -> None:
    """65,536 tokens of llama-3.1-8b: 3,373.2 TFLOP of the model, 4,182.4 executed."""
    full = case("llama-3.1-8b", Recompute.FULL)
    each = flops.per_token(replace(full, model=at("llama-3.1-8b", 8192)))
    layer = 4096 * 6144 + 4096 * 4096 + 2 * 4096 * 14336
    scores = 4 * 4096 * 4096  # half of 8192 keys: q k and p v
    assert each.hfu - each.causal == 32 * (2 * layer + scores)
    assert each.causal * 65536 == pytest.approx(3373.2e12, rel=1e-4)
    assert each.hfu * 65536 == pytest.approx(4182.4e12, rel=1e-4)


def test_moe_blocks_are_recomputed_by_their_own_kind() -> None:
    """The first three layers of deepseek-v3 are dense."""
    model = find_model("deepseek-v3")
    first = flops.recomputed(case("deepseek-v3", Recompute.BLOCKS, (1, model.num_layers)))
    down = model.linears()[-1].num_active
    assert first == 2 * (model.layer_matmul_params() - down) + flops.scores(model)


def test_frozen_weights_have_no_product_of_their_gradient() -> None:
    """4 N a token of products, and attention's three times forward."""
    model = at("llama-2-70b", 8192)
    frozen = flops.of_model(model, 0.0, is_frozen=True).causal
    scores = 3 * model.num_layers * flops.scores(model)
    assert frozen == pytest.approx(4 * model.num_active_matmul_params + scores)
