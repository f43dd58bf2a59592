"""What shapes a tree of modules: how a model is spread, one micro-batch of it, and names."""

from collections.abc import Iterator
from dataclasses import dataclass

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.model import ModelConfig
from stepmark.core.ops import Cast, Gemm, Layout, Phase, Scaling
from stepmark.core.parallel import ParallelConfig

# What a framework runs as one product: q, k and v; gate and up of an MLP, and of its experts.
FUSED = {
    "train": frozenset({"qkv"}),
    "fsdp": frozenset({"qkv"}),
    "megatron": frozenset({"qkv", "gate_up", "experts"}),
    "huggingface": frozenset({"experts"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How a model is spread. etp: tensor parallelism of experts, 0: as tp.

    fused: products of the framework, as in FUSED. stage: of pp, the first ones having the
    layers left over. whole_loss: logits are gathered before the loss, as `train` does.
    """

    axes: ParallelConfig = ParallelConfig()
    etp: int = 0
    sequence_parallel: bool = True
    fused: frozenset[str] = FUSED["train"]
    stage: int = 0
    whole_loss: bool = False

    @property
    def expert_tp(self) -> int:
        return self.etp or self.axes.tp

    @property
    def row_parts(self) -> int:
        """Into how many parts the rows of norms and residuals are divided over tp."""
        return self.axes.tp if self.sequence_parallel else 1

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError where this model cannot be divided so."""
        self.axes.check(model)
        if (moe := model.moe) is None:
            return
        tp, etp = self.axes.tp, self.expert_tp
        if moe.ffn_hidden_size % etp:
            raise ConfigError(
                "etp", etp, f"a divisor of the experts' width {moe.ffn_hidden_size}"
            )
        if max(tp, etp) % min(tp, etp):
            raise ConfigError("etp", etp, f"a multiple or divisor of tp ({tp})")


def layout_of(framework: str, axes: ParallelConfig, *, etp: int | None = None) -> ShardLayout:
    """How `op --as` spreads a model. Raise ConfigError for an unknown framework."""
    known = ("train", "megatron", "fsdp")
    if framework not in known:
        raise ConfigError("as", framework, f"one of {', '.join(known)}")
    if etp is not None and etp < 1:
        raise ConfigError("etp", etp, "1 or more")
    gathers = framework == "train"
    return ShardLayout(axes=axes, etp=etp or 0, fused=FUSED[framework], whole_loss=gathers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One micro-batch of a rank's model: how many tokens, in which types.

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
        """Type of all but products: fp8 is for these alone, TF32 is a mode of theirs."""
        if self.dtype.is_fp8:
            return DType.BF16
        return DType.FP32 if self.dtype is DType.TF32 else self.dtype


def linear_products(
    inputs: Inputs, rows: int, out: int, width: int
) -> Iterator[tuple[Phase, Gemm]]:
    """A linear layer's three products."""
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
                # Pre-cast fp8 operands lie as the unit wants them, whatever the pass.
                layout=Layout.NT if fp8 and cast is Cast.NONE else layout,
                scaling=inputs.scaling if fp8 else Scaling.NONE,
                cast=cast,
            ),
        )


def role_of(name: str) -> str:
    """What workload files call the work of a block's module."""
    for prefix, role in _ROLES.items():
        if name.startswith(prefix):
            return role + name.removeprefix(prefix)
    return name


_ROLES = {
    "ffn.held.": "mlp.experts_",
    "ffn.shared.": "mlp.shared_",
    "ffn.": "mlp.",
    "attention.q.": "attention.q_",
}
