"""Dense, batched and grouped matrix products."""

import itertools
from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops.fields import (
    MULTIPLIED,
    STORED,
    Operator,
    Phase,
    choice,
    count,
    validate,
)


class Layout(StrEnum):
    """Memory layout of A [m,k] and B [k,n]: n = row major as written, t = transposed.

    nt is a forward linear layer (weight stored [n,k]), nn its dgrad, tn its wgrad.
    """

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"


class Scaling(StrEnum):
    """Granularity of fp8 scale factors, which are fp32.

    blockwise: per 128 elements of a row of A and per 128 x 128 of B (DeepSeek-V3 report,
    section 3.3.2). In a wgrad, where B is no weight, they are per 128 elements, too; these 3 %
    of an operand are not counted.
    """

    NONE = "none"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"


class Cast(StrEnum):
    """Timed part of a narrow product: the product, the casts from bf16, or both."""

    NONE = "none"
    ONLY = "only"
    INCLUDED = "included"


BLOCK = 128  # of blockwise scale factors


def scaled_bytes(dtype: DType, scaling: Scaling, rows: int, width: int) -> int:
    """Return the bytes of activations [rows, width] in one layout, with their scale factors.

    That is what a message sends of them, whatever the padding of the factors in memory.
    dtype: any, narrow or not; scaling: of fp8. Factors are fp32 per row, or per 128 elements of
    one (DeepEP sends these, csrc/kernels/internode_ll.cu, num_scales); of block formats those
    of DType.num_bytes. The one factor of a tensor is not counted.
    """
    num_bytes = dtype.num_bytes(rows * width) - dtype.num_bytes(0)
    if not dtype.is_fp8:
        return num_bytes
    of_row = {Scaling.ROWWISE: 1, Scaling.BLOCKWISE: -(-width // BLOCK)}.get(scaling, 0)
    return num_bytes + rows * of_row * DType.FP32.itemsize


# Element types of experts' products.
GROUPED = (*STORED[:3], DType.FP8_E4M3, DType.FP8_E5M2, DType.MXFP8, DType.NVFP4)


def row_multiple(dtype: DType) -> int:
    """Return what the rows of a product's operands are a multiple of.

    torch._scaled_mm takes fp8 rows of whole 16 bytes, TransformerEngine 16 numbers of NVFP4 and
    32 of MXFP8, whose blocks run along both dimensions (pytorch/quantization.py,
    get_align_size_for_quantization; pytorch/tensor/mxfp8_tensor.py, is_quantizable).
    """
    if dtype is DType.MXFP8:
        return 32
    return 16 if dtype.is_narrow else 1


def _check_rows(op: "Gemm | GroupedGemm") -> None:
    multiple = row_multiple(op.dtype)
    name, size = ("n", op.n) if op.n % multiple else ("k", op.k)
    if size % multiple:
        kind = "fp8" if op.dtype.is_fp8 else op.dtype
        raise ConfigError(name, size, f"a multiple of {multiple} for {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm(Operator):
    """y_MN = a_MK @ b_KN on one rank, after sharding."""

    m: int = count("rows of the result; tokens in a forward pass")
    n: int = count("columns of the result; output features in a forward pass")
    k: int = count("contracted dimension")
    dtype: DType = choice("element type", default=DType.BF16)
    layout: Layout = choice("memory layout of A and B", default=Layout.NT)
    out_dtype: DType | None = choice(
        "of the result [bf16 for fp8 and narrower, else A's]", default=None
    )
    scaling: Scaling = choice("fp8 scale factors", default=Scaling.NONE)
    cast: Cast = choice("fp8: time the product, the casts, or both", default=Cast.NONE)

    def __post_init__(self) -> None:
        validate(self)
        if self.dtype.is_fp8 and self.scaling is Scaling.NONE:
            object.__setattr__(self, "scaling", Scaling.TENSORWISE)
        if not self.dtype.is_fp8 and self.scaling is not Scaling.NONE:
            raise ConfigError("scaling", self.scaling, "only with fp8 dtypes")
        if not self.dtype.is_narrow and self.cast is not Cast.NONE:
            raise ConfigError("cast", self.cast, "only with fp8 dtypes and narrower ones")
        _check_rows(self)

    @property
    def result_dtype(self) -> DType:
        if self.out_dtype is not None:
            return self.out_dtype
        return DType.BF16 if self.dtype.is_narrow else self.dtype

    @property
    def shape_text(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """Return 2 m n k (a multiply and an add); a cast alone has none."""
        return 0 if self.cast is Cast.ONLY else 2 * self.m * self.n * self.k

    @property
    def _operand_bytes(self) -> int:
        """Return the bytes of A and B, with the scale factors of blocks."""
        num_bytes = self.dtype.num_bytes(self.m * self.k) + self.dtype.num_bytes(
            self.k * self.n
        )
        if self.scaling is not Scaling.BLOCKWISE:
            return num_bytes  # factors per tensor or row are too few to count
        factors = -(-self.k // BLOCK) * (self.m + -(-self.n // BLOCK))
        return num_bytes + DType.FP32.itemsize * factors

    @property
    def bytes_moved(self) -> int:
        operands = self.m * self.k + self.k * self.n
        product = self._operand_bytes + self.m * self.n * self.result_dtype.itemsize
        casts = operands * DType.BF16.itemsize + self._operand_bytes
        match self.cast:
            case Cast.NONE:
                return product
            case Cast.ONLY:
                return casts
            case Cast.INCLUDED:
                return product + casts

    @property
    def memory_bytes(self) -> int:
        operands = self.m * self.k + self.k * self.n
        source = DType.BF16.itemsize if self.cast is not Cast.NONE else 0
        result = self.m * self.n * self.result_dtype.itemsize
        return operands * source + self._operand_bytes + result


@dataclass(frozen=True, slots=True, kw_only=True)
class Bmm(Operator):
    """y_BMN = a_BMK @ b_BKN: `batch` products of the same shape in one call."""

    batch: int = count("number of products")
    m: int = count("rows of each result")
    n: int = count("columns of each result")
    k: int = count("contracted dimension")
    dtype: DType = choice("element type", default=DType.BF16, allowed=MULTIPLIED)
    layout: Layout = choice("memory layout of A and B", default=Layout.NT)

    @property
    def shape_text(self) -> str:
        return f"{self.batch} of {self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return self.batch * elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemm(Operator):
    """One product per expert in one call; experts may have different numbers of tokens.

    fwd: y_Tn = x_Tk @ w_Gkn; dgrad: dx_Tk = dy_Tn @ w_Gkn.T; wgrad: dw_Gkn = x.T @ dy, where T
    runs over all tokens of the rank, G over its experts. Results of narrow types are bf16;
    fp8 scale factors are not counted (blockwise ones add 3 % to an operand).
    """

    num_groups: int = count("experts on this rank", high=2**16)
    tokens: int = count("rows over all experts: tokens x top_k")
    n: int = count("output features of the forward product")
    k: int = count("input features of the forward product")
    skew: float = count(
        "Zipf exponent of tokens per expert; 0 = balanced", low=0, high=4, default=0.0
    )
    dtype: DType = choice("element type", default=DType.BF16, allowed=GROUPED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd", "dgrad", "wgrad"))

    def __post_init__(self) -> None:
        validate(self)
        _check_rows(self)

    def group_sizes(self) -> tuple[int, ...]:
        """Return the tokens of each expert: shares 1/rank^skew, rounded to sum to `tokens`."""
        weights = [1 / (rank + 1) ** self.skew for rank in range(self.num_groups)]
        # Parts and total are summed in the same order, so the last boundary is exact.
        sums = list(itertools.accumulate(weights))
        boundaries = [0, *(round(self.tokens * part / sums[-1]) for part in sums)]
        return tuple(end - begin for begin, end in itertools.pairwise(boundaries))

    @property
    def shape_text(self) -> str:
        skew = f" skew {self.skew:g}" if self.skew else ""
        return f"{self.num_groups} groups, {self.tokens}x{self.n}x{self.k}{skew}"

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        active = sum(size > 0 for size in self.group_sizes())
        return self._num_bytes(self.num_groups if self.phase is Phase.WGRAD else active)

    @property
    def memory_bytes(self) -> int:
        return self._num_bytes(self.num_groups)

    def _num_bytes(self, num_weights: int) -> int:
        """Return the bytes of both operands and the result; the weights of some experts."""
        result_dtype = DType.BF16 if self.dtype.is_narrow else self.dtype
        sizes = {
            Phase.FWD: self.tokens * self.n,
            Phase.DGRAD: self.tokens * self.k,
            Phase.WGRAD: num_weights * self.n * self.k,
        }
        result = sizes[self.phase]
        operands = [size for phase, size in sizes.items() if phase is not self.phase]
        return sum(map(self.dtype.num_bytes, operands)) + result_dtype.num_bytes(result)


MatmulOp = Gemm | GroupedGemm | Bmm
FAMILIES: dict[str, type[MatmulOp]] = {"gemm": Gemm, "grouped-gemm": GroupedGemm, "bmm": Bmm}
