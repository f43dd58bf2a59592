"""PARAM's compute benchmarks other than GEMM: linear stacks and embedding bags."""

from dataclasses import dataclass
from itertools import pairwise

from stepmark.ground.dtypes import DType
from stepmark.model.ops.fields import MULTIPLIED, STORED, Operator, Phase, choice, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Operator):
    """PARAM's linear stack: layers + 1 linears, in -> hidden -> ... -> out, ReLU between."""

    layers: int = count("hidden layers; the stack has one more linear layer", high=10_000)
    input: int = count("input features")
    hidden: int = count("hidden features")
    output: int = count("output features")
    batch: int = count("rows")
    optimizer: str = choice(
        "update in a step", default="sgd", allowed=("none", "sgd", "adagrad", "adam")
    )
    dtype: DType = choice("element type", default=DType.FP32, allowed=MULTIPLIED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd", "bwd", "step"))

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.input, *[self.hidden] * self.layers, self.output)

    @property
    def num_weights(self) -> int:
        return sum(rows * columns for rows, columns in pairwise(self.widths))

    @property
    def shape_text(self) -> str:
        widths = f"{self.input}-{self.hidden}-{self.output}"
        return f"b{self.batch} {self.layers} layers {widths} {self.optimizer}"

    @property
    def flops(self) -> int:
        """Return the FLOPs; bwd excludes the gradient of the input data, which is not computed.

        PARAM includes it: its 6 x weights x batch is slightly more than what runs.
        """
        fwd = 2 * self.batch * self.num_weights
        bwd = 2 * fwd - 2 * self.batch * self.widths[0] * self.widths[1]
        match self.phase:
            case Phase.FWD:
                return fwd
            case Phase.BWD:
                return bwd
            case _:
                return fwd + bwd

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of weights and activations; a step adds the optimizer's planes."""
        activations = self.batch * sum(self.widths)
        weights = self.num_weights
        planes = {"none": 0, "sgd": 3, "adagrad": 5, "adam": 7}[self.optimizer]
        match self.phase:
            case Phase.FWD:
                elements = weights + 2 * activations
            case Phase.BWD:
                elements = 2 * weights + 3 * activations
            case _:
                elements = (3 + planes) * weights + 5 * activations
        return elements * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        states = {"none": 2, "sgd": 2, "adagrad": 3, "adam": 4}[self.optimizer]
        return (
            states * self.num_weights + 4 * self.batch * sum(self.widths)
        ) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBag(Operator):
    """Sum of `pooling` rows of a table [rows, dim] for each of `batch` bags."""

    rows: int = count("rows of the table")
    dim: int = count("width of a row")
    pooling: int = count("rows summed per bag")
    batch: int = count("bags")
    alpha: float = count(
        "Zipf exponent of the indices; 0 = uniform", low=0, high=8, default=0.0
    )
    dtype: DType = choice("element type", default=DType.FP32, allowed=STORED)
    phase: Phase = choice("pass", default=Phase.FWD, allowed=("fwd", "bwd"))

    @property
    def shape_text(self) -> str:
        zipf = f" zipf {self.alpha:g}" if self.alpha else ""
        return f"b{self.batch} pool {self.pooling} of {self.rows}x{self.dim}{zipf}"

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of gathered rows, int64 indices, offsets and result.

        Repeated rows count each time. With Zipf indices many rows come from cache, so the rate
        can exceed the memory bandwidth; with uniform indices over a table far larger than the
        cache it cannot.
        """
        gathered = self.batch * self.pooling * self.dim * self.dtype.itemsize
        indices = self.batch * (self.pooling + 1) * 8
        return gathered + indices + self.batch * self.dim * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        # A sparse gradient holds one row per index.
        gradient = self.batch * self.pooling * self.dim if self.phase is Phase.BWD else 0
        return (self.rows * self.dim + gradient) * self.dtype.itemsize + self.bytes_moved


RecommenderOp = Mlp | EmbeddingBag
FAMILIES: dict[str, type[RecommenderOp]] = {"mlp": Mlp, "embedding-bag": EmbeddingBag}
