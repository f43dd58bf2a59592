"""What is trained, over which ranks, in which batches: what all rules start from."""

from dataclasses import dataclass, field, replace
from typing import Any

from stepmark.core.collectives import FACTS, Collective, Parts, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.model import ModelConfig
from stepmark.core.ops import Phase
from stepmark.core.parallel import ParallelConfig
from stepmark.core.workload import COMPUTE, CommOp, Group
from stepmark.workload.layout import FUSED, Inputs, ShardLayout
from stepmark.workload.tree import TreeMaker

TRAINED = (DType.FP32, DType.BF16, DType.FP16)  # types that rules know all messages of


# What runs backward where this runs forward.
DUAL = {
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
}


def setting(default: Any, meaning: str) -> Any:
    """A field of a framework's settings with its help."""
    return field(default=default, metadata={"help": meaning})


def not_below(settings: Any, least: int, *names: str) -> None:
    """Raises ConfigError where a setting of these names is given and less."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(name, value, f"{least} or more")


def check_trained(name: str, dtype: DType) -> None:
    """Raises ConfigError for a type that no rule trains in."""
    if dtype not in TRAINED:
        raise ConfigError(name, dtype, "fp32, bf16 or fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ranks and batches of whatever is trained. gbs: sequences per optimizer step.

    Raises ConfigError where batches do not divide; it names what would fit.
    """

    parallel: ParallelConfig = ParallelConfig()
    mbs: int = 1
    gbs: int | None = None  # None: one micro-batch per data rank
    dtype: DType = DType.BF16  # of weights and activations

    def __post_init__(self) -> None:
        for name in ("mbs", "gbs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "1 or more")
        at_once = self.mbs * self.parallel.data_ranks
        if self.gbs is not None and self.gbs % at_once:
            below = self.gbs // at_once * at_once
            near = " or ".join(str(one) for one in (below, below + at_once) if one)
            raise ConfigError(
                "global-batch",
                self.gbs,
                f"a multiple of micro-batch x data ranks"
                f" ({self.mbs} x {self.parallel.data_ranks} = {at_once}), e.g. {near}",
            )

    @property
    def num_microbatches(self) -> int:
        """Per data rank and optimizer step."""
        if self.gbs is None:
            return 1
        return self.gbs // (self.mbs * self.parallel.data_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Spread):
    """A model spread over ranks; its sequences have model.seq_len tokens.

    Raises ConfigError where they do not divide.
    """

    model: ModelConfig

    def __post_init__(self) -> None:
        Spread.__post_init__(self)
        if self.model.seq_len % (2 * self.parallel.cp if self.parallel.cp > 1 else 1):
            raise ConfigError(
                "seq-len", self.model.seq_len, f"a multiple of 2 x cp ({2 * self.parallel.cp})"
            )
        self.parallel.check(self.model)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def config(self) -> ModelConfig | None:
        """The decoder that is trained."""
        return self.model

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank, before tensor parallelism divides them."""
        return self.mbs * self.model.seq_len // self.parallel.cp

    def tree(self, framework: str, **changes: Any) -> TreeMaker:
        """Maker of the units of one rank, as a framework of FUSED has them."""
        inputs = Inputs(mbs=self.mbs, seq_len=self.model.seq_len, dtype=self.dtype)
        layout = ShardLayout(axes=self.parallel, fused=FUSED[framework])
        return TreeMaker(model=self.model, layout=replace(layout, **changes), inputs=inputs)


# From the fastest digit of a rank's number to the slowest: Megatron-LM's default order
# (tp-cp-ep-dp-pp, megatron/core/parallel_state.py) and torchtitan's meshes agree where both
# have the axis (torchtitan, distributed/parallel_dims.py: pp, dp_replicate, dp_shard, cp, tp).
AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


def mesh_groups(
    parallel: ParallelConfig, wanted: dict[str, tuple[str, ...]]
) -> dict[str, Group]:
    """Groups by name, each over some axes: {"dp_cp": ("cp", "dp_shard")}."""
    stride, digits = 1, {}
    for axis in AXES:
        size = getattr(parallel, axis)
        digits[axis] = (size, stride)
        stride *= size
    return {
        name: Group(digits=tuple(digits[axis] for axis in AXES if axis in axes))
        for name, axes in wanted.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comms:
    """Makes communication of named groups; of a group of one rank there is none."""

    groups: dict[str, Group]
    dtype: DType = DType.BF16

    def __call__(
        self,
        collective: Collective | str,
        elements: int,
        group: str,
        phase: Phase,
        module: str,
        dtype: DType | None = None,
        *,
        layer: int | None = None,
        microbatch: int | None = None,
        stream: str = COMPUTE,
        name: str = "",
        after: tuple[str, ...] = (),
        redop: RedOp | None = None,
        peer: int | None = None,
        fused: bool = False,
    ) -> tuple[CommOp, ...]:
        """elements: of the whole buffer, gathered or before it is scattered.

        Raises ConfigError where the ranks do not divide it. A reduction sums unless told.
        """
        size = self.groups[group].size
        if size == 1:
            return ()
        parts, reduces = 1, False
        if collective not in (SEND, RECV):
            facts = FACTS[Collective(collective)]
            parts = size if facts.parts is Parts.PER_RANK else 1
            reduces = facts.reduces
        if elements % parts:
            raise ConfigError(module, f"{elements} elements", f"a multiple of {parts} ranks")
        made = CommOp(
            collective=str(collective),
            dtype=dtype or self.dtype,
            count=elements // parts,
            group=group,
            phase=phase,
            module=module,
            layer=layer,
            microbatch=microbatch,
            stream=stream,
            name=name,
            after=after,
            redop=redop or (RedOp.SUM if reduces else RedOp.NONE),
            peer=peer,
            fused=fused,
        )
        return (made,)


def with_seq_len(model: ModelConfig, seq_len: int) -> ModelConfig:
    """The model trained at another length; a learned position table grows with it."""
    positions = max(model.max_positions, seq_len) if model.max_positions else 0
    return replace(model, seq_len=seq_len, max_positions=positions)
