"""Element types of linear layers' products; everything else of a step stays in bf16.

Router and embedding are never narrow, head and attention only where they are asked for.

Sources: torchao 0.18, float8/float8_linear.py and float8_scaling_utils.py (tensorwise,
rowwise); TransformerEngine 2.11, common/recipe/__init__.py (DelayedScaling,
Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling) and
pytorch/module/linear.py (_Linear: operands are cast once per pass, for both of their products).
"""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.dtypes import DType
from stepmark.model.ops.matmul import BLOCK, Cast, Scaling, row_multiple, scaled_bytes


class Recipe(StrEnum):
    """How the scale factors of a product's operands are found."""

    DELAYED = "delayed"  # fp8, per tensor, from the largest magnitudes of earlier steps
    TENSORWISE = "tensorwise"  # fp8, per tensor, from the tensor itself
    ROWWISE = "rowwise"  # fp8, per row along the contracted dimension
    BLOCKWISE = "blockwise"  # fp8, per 128 elements, weights per 128 x 128
    MXFP8 = "mxfp8"  # e4m3 and a power of two per 32 elements
    NVFP4 = "nvfp4"  # e2m1 and an e4m3 factor per 16 elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPrecision:
    """Element type and casts of products.

    grad_dtype: of gradients of outputs, if another. num_reads: times that a cast reads its bf16
    source; 0: the step has no casts. weight_reads: that of a weight, if it differs. cast:
    inside each product, as `op` times it. casts_weights: in each forward pass, else once per
    step, which the framework's rule adds. casts_shards: what tensor parallelism gathers is cast
    before. casts_apart: each product casts its operands in its own layout. attention: recipe of
    attention in fp8; None: it is in bf16.
    """

    dtype: DType
    grad_dtype: DType | None = None
    scaling: Scaling = Scaling.NONE
    cast: Cast = Cast.NONE
    num_reads: int = 0
    weight_reads: int = 0
    casts_weights: bool = True
    casts_shards: bool = False
    casts_apart: bool = False
    has_head: bool = False
    has_experts: bool = True
    attention: Recipe | None = None

    def fits(self, *sizes: int) -> bool:
        """Return whether a layer of these widths can be narrow; else it stays in bf16."""
        return all(size % row_multiple(self.dtype) == 0 for size in sizes)

    def cast_bytes(self, numel: int, gathered: int = 0, *, is_weight: bool = False) -> int:
        """Return the traffic of a tensor's cast; 0 without casts.

        Both layouts are written, along rows and along columns: Hopper's fp8 units need both,
        and scale factors of blocks differ. Of a tensor that is gathered afterwards only one is
        gathered where factors are per tensor: the other is transposed from `gathered` elements
        (pytorch/module/linear.py, input_quantizer.set_usage; tensor/storage/
        float8_tensor_storage.py, _create_transpose). Blackwell's units need no second layout
        of tensors with one factor: there the traffic is less.
        """
        if not self.num_reads:
            return 0
        num_reads = (self.weight_reads if is_weight else 0) or self.num_reads
        read = num_reads * DType.BF16.num_bytes(numel)
        written = self.dtype.num_bytes(numel)
        if gathered and self.scaling is Scaling.TENSORWISE:
            return read + written + 2 * self.dtype.num_bytes(gathered)
        return read + 2 * written

    def layout_bytes(self, numel: int) -> int:
        """Return the traffic of a tensor's cast in one layout, where each is cast apart."""
        return self.num_reads * DType.BF16.num_bytes(numel) + self.dtype.num_bytes(numel)

    def weight_bytes(self, numel: int) -> int:
        """Return the bytes of a cast weight in one layout, with the factors of blocks."""
        if self.scaling is Scaling.BLOCKWISE:  # of 128 x 128
            return numel + -(-numel // BLOCK**2) * DType.FP32.itemsize
        return self.dtype.num_bytes(numel)

    def gathered_bytes(self, numel: int) -> int:
        """Return the bytes of a cast tensor that is gathered, with the factors of blocks."""
        scaling = self.scaling if self.scaling is Scaling.BLOCKWISE else Scaling.NONE
        return scaled_bytes(self.dtype, scaling, 1, numel)


# Element type, scale factors, and how often a cast reads its source: twice where the largest
# magnitude of all of it is needed first, and rowwise once for each direction of rows. NVFP4: of
# activations and gradients thrice, as their columns are transformed (random Hadamard transform)
# in a cast of their own; of weights, with factors of 16 x 16 blocks, twice.
_RECIPES = {
    Recipe.DELAYED: (DType.FP8_E4M3, Scaling.TENSORWISE, 1),
    Recipe.TENSORWISE: (DType.FP8_E4M3, Scaling.TENSORWISE, 2),
    Recipe.ROWWISE: (DType.FP8_E4M3, Scaling.ROWWISE, 2),
    Recipe.BLOCKWISE: (DType.FP8_E4M3, Scaling.BLOCKWISE, 1),
    Recipe.MXFP8: (DType.MXFP8, Scaling.NONE, 1),
    Recipe.NVFP4: (DType.NVFP4, Scaling.NONE, 3),
}


def by_recipe(
    recipe: Recipe,
    *,
    is_hybrid: bool = False,
    casts_weights: bool = True,
    casts_shards: bool = False,
    has_head: bool = False,
    has_experts: bool = True,
    attention: Recipe | None = None,
) -> ProductPrecision:
    """Return the products of a recipe. is_hybrid: gradients in e5m2, of fp8 alone.

    Where weights are cast in each pass, MXFP8 is torchao's, which saves operands in bf16 and
    casts them for each product (0.18, moe_training/mxfp8_linear.py, mx_mm).
    """
    dtype, scaling, num_reads = _RECIPES[recipe]
    return ProductPrecision(
        dtype=dtype,
        grad_dtype=DType.FP8_E5M2 if is_hybrid and dtype.is_fp8 else None,
        scaling=scaling,
        num_reads=num_reads,
        weight_reads=2 if recipe is Recipe.NVFP4 else 0,
        casts_weights=casts_weights,
        casts_shards=casts_shards,
        casts_apart=recipe is Recipe.MXFP8 and casts_weights,
        has_head=has_head,
        has_experts=has_experts,
        attention=attention,
    )


def of_operators(
    dtype: DType, scaling: Scaling = Scaling.NONE, cast: Cast = Cast.NONE
) -> ProductPrecision | None:
    """Return the products that `op` times, one by one, in fp8 or a narrower type.

    None: they have the type of everything else. Those of experts stay in bf16, as in `train`.
    """
    if not dtype.is_narrow:
        return None
    return ProductPrecision(
        dtype=dtype,
        scaling=scaling if dtype.is_fp8 else Scaling.NONE,
        cast=cast,
        has_head=True,
        has_experts=False,
    )
