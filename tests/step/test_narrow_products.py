"""Products of linear layers and experts in fp8, mxfp8 and nvfp4, and the casts around them."""

from dataclasses import replace

import pytest

from stepmark.ground.dtypes import DType
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, GroupedGemm, Layout, Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import ProductPrecision, Recipe, by_recipe
from stepmark.step.layout import Inputs, ShardLayout, grouped_products, linear_products
from stepmark.step.module import Module
from stepmark.step.tree import build
from stepmark.step.workload import Kernel

ROWS, OUT, WIDTH = 256, 512, 128
INPUTS = Inputs(mbs=1, seq_len=ROWS)
# Bytes per element that a cast reads and writes: 2 of bf16 per reading, and both layouts of the
# result. TransformerEngine: one reading where the factors of a tensor are known or are those of
# its blocks; two where the largest magnitude of the whole tensor comes first.
TRAFFIC = {
    Recipe.DELAYED: 2 + 2 * 1,
    Recipe.TENSORWISE: 2 * 2 + 2 * 1,
    Recipe.ROWWISE: 2 * 2 + 2 * 1,
    Recipe.BLOCKWISE: 2 + 2 * 1,
    Recipe.MXFP8: 2 + 2 * (1 + 1 / 32),
    Recipe.NVFP4: 3 * 2 + 2 * (1 / 2 + 1 / 16),
}
# Of NVFP4's weights one reading less: no Hadamard transform (quantizer.cpp, quantize_impl).
WEIGHT_TRAFFIC = TRAFFIC | {Recipe.NVFP4: 2 * 2 + 2 * (1 / 2 + 1 / 16)}


def narrow(products: ProductPrecision | None) -> Inputs:
    return replace(INPUTS, products=products)


@pytest.mark.parametrize("recipe", Recipe)
def test_casts_of_a_layer(recipe: Recipe) -> None:
    """Input and weight are cast forward, the output's gradient backward, once for two uses."""
    products = replace(by_recipe(recipe), casts_apart=False)
    ops = list(linear_products(narrow(products), ROWS, OUT, WIDTH))
    names = [(phase, isinstance(op, Kernel)) for phase, op in ops]
    assert names == [
        *((Phase.FWD, True), (Phase.FWD, False)),
        *((Phase.DGRAD, True), (Phase.DGRAD, False)),
        (Phase.WGRAD, False),
    ]
    forward, backward = (op.bytes_moved for _, op in ops if isinstance(op, Kernel))
    expected = TRAFFIC[recipe]
    weights = WEIGHT_TRAFFIC[recipe] * WIDTH * OUT
    assert forward == pytest.approx(expected * WIDTH * ROWS + weights, abs=20)
    assert backward == pytest.approx(expected * ROWS * OUT, abs=10)
    once = by_recipe(recipe, casts_weights=False)
    (cast, *_) = (op for _, op in linear_products(narrow(once), ROWS, OUT, WIDTH))
    assert cast.bytes_moved == pytest.approx(expected * WIDTH * ROWS, abs=10)


def test_mxfp8_of_torchao_casts_each_operand_of_each_product() -> None:
    """Bytes by product: two of bf16 are read and one with its factor is written."""
    ops = list(linear_products(narrow(by_recipe(Recipe.MXFP8)), ROWS, OUT, WIDTH))
    casts = {phase: op.bytes_moved for phase, op in ops if isinstance(op, Kernel)}
    x, weight, dy = ROWS * WIDTH, OUT * WIDTH, ROWS * OUT
    numels = {Phase.FWD: x + weight, Phase.DGRAD: dy + weight, Phase.WGRAD: dy + x}
    assert casts == {phase: numel * (2 + 1 + 1 / 32) for phase, numel in numels.items()}


@pytest.mark.parametrize("recipe", Recipe)
def test_products_are_those_of_bf16_in_another_type(recipe: Recipe) -> None:
    products = by_recipe(recipe)
    plain = list(linear_products(INPUTS, ROWS, OUT, WIDTH))
    low = [
        (phase, op)
        for phase, op in linear_products(narrow(products), ROWS, OUT, WIDTH)
        if isinstance(op, Gemm)
    ]
    for (phase, a), (other, b) in zip(low, plain, strict=True):
        assert isinstance(b, Gemm)
        assert phase is other
        assert (a.m, a.n, a.k, a.flops) == (b.m, b.n, b.k, b.flops)
        assert (a.dtype, a.scaling, a.layout) == (products.dtype, products.scaling, Layout.NT)
    grouped = GroupedGemm(num_groups=4, tokens=ROWS, n=OUT, k=WIDTH)
    experts = list(grouped_products(narrow(products), grouped))
    dtypes = [op.dtype for _, op in experts if isinstance(op, GroupedGemm)]
    assert dtypes == [products.dtype] * 3
    assert sum(isinstance(op, Kernel) for _, op in experts) == 2 + products.casts_apart
    kept = replace(products, has_experts=False)
    kinds = [op.dtype for _, op in grouped_products(narrow(kept), grouped)]  # type: ignore[union-attr]
    assert kinds == [DType.BF16] * 3


def test_hybrid_fp8_has_gradients_in_e5m2_and_block_formats_have_not() -> None:
    for recipe, gradient in ((Recipe.DELAYED, DType.FP8_E5M2), (Recipe.MXFP8, DType.MXFP8)):
        products = by_recipe(recipe, is_hybrid=True)
        gemms = {
            phase: op.dtype
            for phase, op in linear_products(narrow(products), ROWS, OUT, WIDTH)
            if isinstance(op, Gemm)
        }
        assert gemms == {
            Phase.FWD: products.dtype,
            Phase.DGRAD: gradient,
            Phase.WGRAD: gradient,
        }


@pytest.mark.parametrize(("recipe", "width"), [(Recipe.MXFP8, 16), (Recipe.NVFP4, 8)])
def test_a_layer_of_other_widths_stays_in_bf16_without_casts(
    recipe: Recipe, width: int
) -> None:
    ops = [op for _, op in linear_products(narrow(by_recipe(recipe)), ROWS, OUT, width)]
    assert [getattr(op, "dtype", None) for op in ops] == [DType.BF16] * 3


def leaves(products: ProductPrecision, tp: int) -> dict[str, Module]:
    model = replace(find_model("llama-3.1-8b"), num_layers=1)
    layout = ShardLayout(axes=ParallelConfig(tp=tp))
    inputs = Inputs(mbs=1, seq_len=1024, products=products)
    return {leaf.role: leaf for _, _, leaf in build(model, layout, inputs).leaves()}


def cast_bytes(leaf: Module, phase: Phase) -> int:
    return sum(
        op.op.bytes_moved or 0
        for op in leaf.work
        if isinstance(op.op, Kernel) and op.phase is phase
    )


@pytest.mark.parametrize("recipe", [Recipe.MXFP8, Recipe.BLOCKWISE])
def test_a_cast_before_a_gather_is_of_this_ranks_rows(recipe: Recipe) -> None:
    """Sequence parallelism gathers the input of qkv, and the gradient of attention.out."""
    whole = leaves(by_recipe(recipe, casts_weights=False), 4)
    shards = leaves(by_recipe(recipe, casts_weights=False, casts_shards=True), 4)
    for role, gathered, other in (
        ("attention.qkv", Phase.FWD, Phase.DGRAD),
        ("attention.out", Phase.DGRAD, Phase.FWD),
    ):
        assert cast_bytes(whole[role], gathered) == 4 * cast_bytes(shards[role], gathered) > 0
        assert cast_bytes(whole[role], other) == cast_bytes(shards[role], other) > 0


def test_factors_per_tensor_are_gathered_in_one_layout_and_transposed() -> None:
    shards = leaves(by_recipe(Recipe.DELAYED, casts_weights=False, casts_shards=True), 4)
    rows, width = 1024, 4096
    expected = (2 + 1) * rows * width // 4 + 2 * rows * width
    assert cast_bytes(shards["attention.qkv"], Phase.FWD) == expected


def test_the_head_is_narrow_where_it_is_asked_for() -> None:
    for has_head in (False, True):
        head = leaves(by_recipe(Recipe.TENSORWISE, has_head=has_head), 1)["head"]
        gemms = {op.op.dtype for op in head.work if isinstance(op.op, Gemm)}
        assert gemms == {DType.FP8_E4M3 if has_head else DType.BF16}
