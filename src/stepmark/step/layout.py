"""Inputs of a tree of modules: what a framework makes of a model, and one micro-batch of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Cast, Copy, Gemm, GroupedGemm, Layout, Op, Phase
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit
from stepmark.model.product_precision import ProductPrecision
from stepmark.step.lora import Lora
from stepmark.step.module import Module, between
from stepmark.step.workload import ComputeOp, Kernel

# Products that a framework fuses: q, k and v; gate and up of an MLP, and of its experts.
FUSED = {
    "train": frozenset({"qkv"}),
    "fsdp": frozenset({"qkv"}),
    "megatron": frozenset({"qkv", "gate_up", "experts"}),
    "huggingface": frozenset({"experts"}),
}
VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How a model is sharded. etp: tensor parallelism of experts, 0: as tp.

    fused: products of the framework, as in FUSED. stage: rank of pp, with this many chunks of
    layers, which the schedule places. whole_loss: logits are gathered before the loss
    (TpPlan.WHOLE). lora: adapters are trained, and nothing else.
    """

    axes: ParallelConfig = ParallelConfig()
    etp: int = 0
    sequence_parallel: bool = True
    fused: frozenset[str] = FUSED["train"]
    stage: int = 0
    chunks: int = 1
    schedule: PipelineSchedule = PipelineSchedule.INTERLEAVED
    split: StageSplit = StageSplit.EVEN
    whole_loss: bool = False
    lora: Lora | None = None

    @property
    def expert_tp(self) -> int:
        return self.etp or self.axes.tp

    @property
    def row_parts(self) -> int:
        """Number of parts into which tp divides the rows of norms and residuals."""
        return self.axes.tp if self.sequence_parallel else 1

    @property
    def num_stages(self) -> int:
        return self.axes.pp * self.chunks

    @property
    def stages(self) -> list[int]:
        """Return the stages of this rank of pp, the first one first."""
        return self.schedule.stages(self.stage, self.axes.pp, self.chunks)

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError for a model that cannot be divided so."""
        self.axes.check(model)
        tp = self.axes.tp
        if self.lora and self.lora.rank % tp:
            raise ConfigError("lora_rank", self.lora.rank, f"a multiple of tp ({tp})")
        if (moe := model.moe) is None:
            return
        if tp > 1 and not self.sequence_parallel:
            rule = "yes for a model with experts and tp > 1"
            raise ConfigError("sequence-parallel", "no", rule)
        etp = self.expert_tp
        if moe.ffn_hidden_size % etp:
            raise ConfigError(
                "etp", etp, f"a divisor of the experts' width {moe.ffn_hidden_size}"
            )
        if max(tp, etp) % min(tp, etp):
            raise ConfigError("etp", etp, f"a multiple or divisor of tp ({tp})")


def model_as(
    framework: str, model: ModelConfig, tp: int, multiple: int = VOCAB_MULTIPLE
) -> ModelConfig:
    """Return the model as a framework of FUSED trains it.

    Megatron-LM pads the vocabulary to a multiple of `multiple` x tp
    (vocab_size_with_padding, megatron/training/tokenizer).
    """
    extra = -model.vocab_size % (multiple * tp)
    if framework != "megatron" or not extra:
        return model
    vocab_size = model.vocab_size + extra
    return replace(
        model, vocab_size=vocab_size, published_params=None, published_active_params=None
    )


def layout_of(
    framework: str,
    axes: ParallelConfig,
    *,
    etp: int | None = None,
    sequence_parallel: bool = True,
) -> ShardLayout:
    """Return how `op --as` shards a model, as `workload generate` does with the same options.

    sequence_parallel: the others have it always. Raises ConfigError.
    """
    frameworks = ("train", "megatron", "fsdp")
    if framework not in frameworks:
        raise not_one_of("as", framework, frameworks)
    if etp is not None and etp < 1:
        raise ConfigError("etp", etp, "1 or more")
    if not sequence_parallel and framework != "megatron":
        raise ConfigError("no-sequence-parallel", "given", "only with --as megatron")
    return ShardLayout(
        axes=axes,
        etp=etp or 0,
        fused=FUSED[framework],
        sequence_parallel=sequence_parallel,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One micro-batch of a rank's model: its tokens and types.

    dtype: of weights and activations. products: of linear layers, where it is another.
    skew: of tokens over experts. expert_rows: of a rank whose experts have a capacity; 0: all
    rows. imbalance: rows of this rank's experts over the mean of all ranks.
    """

    mbs: int
    seq_len: int  # of whole sequences, before context parallelism divides them
    dtype: DType = DType.BF16
    products: ProductPrecision | None = None
    skew: float = 0.0
    expert_rows: int = 0
    imbalance: float = 1.0

    def fullest(self, size: int) -> int:
        """Return the size on the rank with the most rows of experts. size: the mean."""
        return math.ceil(size * self.imbalance)

    @property
    def plain_dtype(self) -> DType:
        """Type of everything but products: TF32 is for products only."""
        return DType.FP32 if self.dtype is DType.TF32 else self.dtype


QUANTIZE = "quantize"  # name of the kernels that cast operands of products


def cast_kernel(num_bytes: int) -> Kernel:
    """Return the kernels that cast a tensor to a narrow type, which memory bounds."""
    return Kernel(name=QUANTIZE, flops=0, bytes_moved=num_bytes)


def is_cast(op: ComputeOp) -> bool:
    """Return whether the operation is a cast of cast_kernel."""
    return isinstance(op.op, Kernel) and op.op.name == QUANTIZE


def linear_products(
    inputs: Inputs,
    rows: int,
    out: int,
    width: int,
    *,
    x_rows: int | None = None,
    dy_rows: int | None = None,
) -> Iterator[tuple[Phase, Gemm | Kernel]]:
    """Yield a linear layer's three products, with the casts of narrow operands.

    x_rows, dy_rows: of input and output gradient when they are cast, if tensor parallelism
    gathers them afterwards. Weights have the layout [out, width].
    """
    narrow = inputs.products
    # A layer whose widths the units do not take stays as it is, as in torchao.
    if narrow is not None and not narrow.fits(out, width):
        narrow = None
    sizes = {
        Phase.FWD: (rows, out, width, Layout.NT),
        Phase.DGRAD: (rows, width, out, Layout.NN),
        Phase.WGRAD: (out, width, rows, Layout.TN),
    }
    casts: dict[Phase, int] = {}
    if narrow is not None:
        casts = _casts(narrow, rows, out, width, x_rows=x_rows, dy_rows=dy_rows)
    for phase, (m, n, k, layout) in sizes.items():
        if num_bytes := casts.get(phase):
            yield phase, cast_kernel(num_bytes)
        gemm = Gemm(m=m, n=n, k=k, dtype=inputs.dtype, layout=layout)
        is_narrow = narrow is not None and narrow.fits(n, k)
        yield phase, _narrowed(gemm, narrow, phase) if narrow and is_narrow else gemm


def grouped_products(
    inputs: Inputs, product: GroupedGemm
) -> Iterator[tuple[Phase, GroupedGemm | Kernel]]:
    """Yield the three products of experts in one call, as linear_products."""
    narrow = inputs.products
    if narrow is not None and not (narrow.has_experts and narrow.fits(product.n, product.k)):
        narrow = None
    casts: dict[Phase, int] = {}
    if narrow is not None:
        # The experts' weights are one tensor: [experts x out, width].
        rows = product.tokens
        casts = _casts(narrow, rows, product.n, product.k, num_weights=product.num_groups)
    for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD):
        if num_bytes := casts.get(phase):
            yield phase, cast_kernel(num_bytes)
        yield (
            phase,
            replace(
                product,
                phase=phase,
                dtype=_dtype_of(narrow, phase) if narrow else product.dtype,
            ),
        )


def _casts(
    narrow: ProductPrecision,
    rows: int,
    out: int,
    width: int,
    *,
    x_rows: int | None = None,
    dy_rows: int | None = None,
    num_weights: int = 1,
) -> dict[Phase, int]:
    """Return the bytes that casts before a pass's product move, by the pass."""
    if narrow.casts_apart:
        x, dy, weights = map(
            narrow.layout_bytes, (rows * width, rows * out, num_weights * out * width)
        )
        return {Phase.FWD: x + weights, Phase.DGRAD: dy + weights, Phase.WGRAD: dy + x}
    x = narrow.cast_bytes((x_rows or rows) * width, rows * width if x_rows else 0)
    dy = narrow.cast_bytes((dy_rows or rows) * out, rows * out if dy_rows else 0)
    weights = 0
    if narrow.casts_weights:
        weights = narrow.cast_bytes(num_weights * out * width, is_weight=True)
    return {Phase.FWD: x + weights, Phase.DGRAD: dy}


def _dtype_of(narrow: ProductPrecision, phase: Phase) -> DType:
    """Return the type of a pass: products of gradients are named by the gradient's type."""
    return narrow.dtype if phase is Phase.FWD else narrow.grad_dtype or narrow.dtype


def _narrowed(gemm: Gemm, narrow: ProductPrecision, phase: Phase) -> Gemm:
    return replace(
        gemm,
        dtype=_dtype_of(narrow, phase),
        # Operands that are cast before have the layout that the hardware needs in any pass.
        layout=Layout.NT if narrow.cast is Cast.NONE else gemm.layout,
        scaling=narrow.scaling,
        cast=narrow.cast,
    )


def table_lookup(num_bytes: int) -> tuple[tuple[Phase, Op | Kernel], ...]:
    """Return the copy of a table's rows, and the addition of their gradients into the table."""
    added = Kernel(name="embedding_backward", flops=0, bytes_moved=3 * num_bytes)
    return (Phase.FWD, Copy(num_bytes=num_bytes)), (Phase.WGRAD, added)


def tensor_sum(role: str, num_bytes: int) -> Module:
    """Return the sum of two tensors of this size: two read, one written; backward the same."""
    op = Kernel(name="add", flops=0, bytes_moved=3 * num_bytes)
    return between(role, (Phase.FWD, op), (Phase.BWD, op))
