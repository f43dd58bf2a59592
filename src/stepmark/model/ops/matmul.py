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
    """Granularity of fp8 scale factors."""

    NONE = "none"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"


class Cast(StrEnum):
    """Timed part of an fp8 product: the product, the casts from bf16, or both."""

    NONE = "none"
    ONLY = "only"
    INCLUDED = "included"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm(Operator):
    """y_MN = a_MK @ b_KN on one rank, after sharding."""

    m: int = count("rows of the result; tokens in a forward pass")
    n: int = count("columns of the result; output features in a forward pass")
    k: int = count("contracted dimension")
    dtype: DType = choice("element type", default=DType.BF16)
    layout: Layout = choice("memory layout of A and B", default=Layout.NT)
    out_dtype: DType | None = choice(
        "type of the result [bf16 for fp8 inputs, else that of A]", default=None
    )
    scaling: Scaling = choice("fp8 scale factors", default=Scaling.NONE)
    cast: Cast = choice("fp8: time the product, the casts, or both", default=Cast.NONE)

    def __post_init__(self) -> None:
        validate(self)
        if self.dtype.is_fp8 and self.scaling is Scaling.NONE:
            object.__setattr__(self, "scaling", Scaling.TENSORWISE)
        if not self.dtype.is_fp8 and (self.scaling, self.cast) != (Scaling.NONE, Cast.NONE):
            raise ConfigError(
                "scaling, cast", f"{self.scaling}, {self.cast}", "only with fp8 dtypes"
            )
        name, size = ("n", self.n) if self.n % 16 else ("k", self.k)
        if self.dtype.is_fp8 and size % 16:
            raise ConfigError(name, size, "a multiple of 16 for fp8")

    @property
    def result_dtype(self) -> DType:
        if self.out_dtype is not None:
            return self.out_dtype
        return DType.BF16 if self.dtype.is_fp8 else self.dtype

    @property
    def shape_text(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        """Return 2 m n k (a multiply and an add); a cast alone has none."""
        return 0 if self.cast is Cast.ONLY else 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        operands = self.m * self.k + self.k * self.n
        product = operands * self.dtype.itemsize + self.m * self.n * self.result_dtype.itemsize
        casts = operands * (DType.BF16.itemsize + self.dtype.itemsize)
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
        return operands * (self.dtype.itemsize + source) + result


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
    runs over all tokens of the rank, G over its experts.
    """

    num_groups: int = count("experts on this rank", high=2**16)
    tokens: int = count("rows over all experts: tokens x top_k")
    n: int = count("output features of the forward product")
    k: int = count("input features of the forward product")
    skew: float = count(
        "Zipf exponent of tokens per expert; 0 = balanced", low=0, high=4, default=0.0
    )
    dtype: DType = choice("element type", default=DType.BF16, allowed=STORED[:3])
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd", "dgrad", "wgrad"))

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
        weights = (self.num_groups if self.phase is Phase.WGRAD else active) * self.n * self.k
        return (self.tokens * (self.n + self.k) + weights) * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        elements = self.tokens * (self.n + self.k) + self.num_groups * self.n * self.k
        return elements * self.dtype.itemsize


MatmulOp = Gemm | GroupedGemm | Bmm
FAMILIES: dict[str, type[MatmulOp]] = {"gemm": Gemm, "grouped-gemm": GroupedGemm, "bmm": Bmm}
