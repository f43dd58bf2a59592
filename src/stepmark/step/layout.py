"""Inputs of a tree of modules: what a framework makes of a model, and one micro-batch of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Cast, Copy, Gemm, Layout, Op, Phase, Scaling
from stepmark.model.parallel import ParallelConfig, StageSplit
from stepmark.step.lora import Lora
from stepmark.step.module import Module, between
from stepmark.step.workload import Kernel

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

    fused: products of the framework, as in FUSED. stage: of pp, with this many chunks of
    layers. whole_loss: logits are gathered before the loss (TpPlan.WHOLE). lora: adapters are
    trained, and nothing else.
    """

    axes: ParallelConfig = ParallelConfig()
    etp: int = 0
    sequence_parallel: bool = True
    fused: frozenset[str] = FUSED["train"]
    stage: int = 0
    chunks: int = 1
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

    skew: of tokens over experts. scaling, cast: of fp8 products. expert_rows: of a rank whose
    experts have a capacity; 0: all rows.
    """

    mbs: int
    seq_len: int  # of whole sequences, before context parallelism divides them
    dtype: DType = DType.BF16
    skew: float = 0.0
    expert_rows: int = 0
    scaling: Scaling = Scaling.NONE
    cast: Cast = Cast.NONE

    @property
    def plain_dtype(self) -> DType:
        """Type of everything but products: fp8 and TF32 are for products only."""
        if self.dtype.is_fp8:
            return DType.BF16
        return DType.FP32 if self.dtype is DType.TF32 else self.dtype


def linear_products(
    inputs: Inputs, rows: int, out: int, width: int
) -> Iterator[tuple[Phase, Gemm]]:
    """Yield a linear layer's three products."""
    sizes = {
        Phase.FWD: (rows, out, width, Layout.NT),
        Phase.DGRAD: (rows, width, out, Layout.NN),
        Phase.WGRAD: (out, width, rows, Layout.TN),
    }
    for phase, (m, n, k, layout) in sizes.items():
        # fp8 units take 16-wide rows; a layer that has none stays in bf16, as in torchao.
        fits = not inputs.dtype.is_fp8 or (n % 16 == 0 and k % 16 == 0)
        fp8 = inputs.dtype.is_fp8 and fits
        cast = inputs.cast if fp8 else Cast.NONE
        yield (
            phase,
            Gemm(
                m=m,
                n=n,
                k=k,
                dtype=inputs.dtype if fits else DType.BF16,
                # Pre-cast fp8 operands have the layout that the hardware needs in any pass.
                layout=Layout.NT if fp8 and cast is Cast.NONE else layout,
                scaling=inputs.scaling if fp8 else Scaling.NONE,
                cast=cast,
            ),
        )


def table_lookup(num_bytes: int) -> tuple[tuple[Phase, Op | Kernel], ...]:
    """Return the copy of a table's rows, and the addition of their gradients into the table."""
    added = Kernel(name="embedding_backward", flops=0, bytes_moved=3 * num_bytes)
    return (Phase.FWD, Copy(num_bytes=num_bytes)), (Phase.WGRAD, added)


def tensor_sum(role: str, num_bytes: int) -> Module:
    """Return the sum of two tensors of this size: two read, one written; backward the same."""
    op = Kernel(name="add", flops=0, bytes_moved=3 * num_bytes)
    return between(role, (Phase.FWD, op), (Phase.BWD, op))
