"""A training job: a model, its ranks and its batches. All rules start from it."""

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import FACTS, Collective, RedOp, num_parts
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import ProductPrecision
from stepmark.step.layout import FUSED, Inputs, ShardLayout
from stepmark.step.tree import TreeBuilder
from stepmark.step.workload import COMPUTE, CommOp, Group

TRAINED = (DType.FP32, DType.BF16, DType.FP16)  # the rules know all messages of these types

# Collectives of the backward pass by those of the forward pass.
DUAL = {
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
}


def setting(
    default: Any,
    meaning: str,
    *,
    common: bool = False,
    only: Mapping[str, Container[object]] = MappingProxyType({}),
) -> Any:
    """Return a field of a framework's settings with its help.

    common: the first page of help lists it, and not only --help-all. only: values of other
    settings, by name, with which it has an effect.
    """
    return field(default=default, metadata={"help": meaning, "common": common, "only": only})


def plain_settings(settings: Any) -> dict[str, str | int | float | bool | None]:
    """Return the fields of a rule's settings as plain values."""
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in asdict(settings).items()
    }


def refuse_first(*refusals: tuple[object, str, object, str]) -> None:
    """Raise ConfigError for the first (condition, field, value, rule) that holds."""
    for holds, field_name, value, allowed in refusals:
        if holds:
            raise ConfigError(field_name, value, allowed)


def check_at_least(settings: Any, least: int, *names: str) -> None:
    """Raise ConfigError for a setting of these names that is less; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(name, value, f"{least} or more")


def check_trained(name: str, dtype: DType) -> None:
    """Raise ConfigError for a type that no rule trains in."""
    if dtype not in TRAINED:
        raise ConfigError(name, dtype, "fp32, bf16 or fp16")


def check_single(parallel: ParallelConfig, axes: tuple[str, ...], allowed: str) -> None:
    """Raise ConfigError, with what is allowed, for an axis of more than one rank."""
    for axis in axes:
        if getattr(parallel, axis) > 1:
            raise ConfigError(axis.replace("_", "-"), getattr(parallel, axis), allowed)


def near_multiples(value: int, divisor: int) -> str:
    """Return the multiples below and above a value as words, e.g. "6 or 8"."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ranks and batches of a job, whatever its model. gbs: sequences per optimizer step.

    Raises ConfigError where batches do not divide; it names values that would fit.
    """

    parallel: ParallelConfig = ParallelConfig()
    mbs: int = 1
    gbs: int | None = None  # None: one micro-batch per data rank
    dtype: DType = DType.BF16  # of weights and activations
    products: ProductPrecision | None = None  # of linear layers, where it is another

    def __post_init__(self) -> None:
        check_at_least(self, 1, "mbs", "gbs")
        if self.products is not None and self.dtype is not DType.BF16:
            raise ConfigError("dtype", self.dtype, f"bf16 with {self.products.dtype} products")
        at_once = self.mbs * self.parallel.data_ranks
        if self.gbs is not None and self.gbs % at_once:
            raise ConfigError(
                "gbs",
                self.gbs,
                f"a multiple of micro-batch x data ranks ({self.mbs} x"
                f" {self.parallel.data_ranks} = {at_once}), e.g."
                f" {near_multiples(self.gbs, at_once)}",
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per data rank and optimizer step."""
        return self.global_batch // (self.mbs * self.parallel.data_ranks)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.gbs or self.mbs * self.parallel.data_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Spread):
    """A model spread over ranks; its sequences have model.seq_len tokens.

    Raises ConfigError where they do not divide.
    """

    model: ModelConfig
    imbalance: float = 1.0  # rows of the fullest rank's experts / the mean of all ranks'

    def __post_init__(self) -> None:
        Spread.__post_init__(self)
        self._check_imbalance()
        if self.model.seq_len % (2 * self.parallel.cp if self.parallel.cp > 1 else 1):
            raise ConfigError(
                "seq-len", self.model.seq_len, f"a multiple of 2 x cp ({2 * self.parallel.cp})"
            )
        # Megatron-LM alone takes more ranks than KV heads, and divides sequences with windows;
        # torch's rules check again.
        self.parallel.check(self.model, shares_kv_heads=True, has_windows=True)

    def _check_imbalance(self) -> None:
        """Raise ConfigError for more rows than tokens have for the experts of a rank."""
        moe = self.model.moe
        if moe is None:
            most, why = 1.0, "for a model without experts"
        else:
            ep = self.parallel.ep
            # All tokens of ep ranks use as many of its experts as they can.
            most = ep * min(moe.top_k, moe.num_experts // ep) / moe.top_k
            why = f"with ep {ep}, where a token uses {moe.top_k} of {moe.num_experts} experts"
        if not 1 <= self.imbalance <= most:
            allowed = f"from 1 to {most:g} {why}" if most > 1 else f"1 {why}"
            raise ConfigError("imbalance", self.imbalance, allowed)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def config(self) -> ModelConfig | None:
        """The decoder."""
        return self.model

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, before tensor parallelism divides them."""
        return self.mbs * self.model.seq_len // self.parallel.cp

    def tree(self, framework: str, **changes: Any) -> TreeBuilder:
        """Return the builder of one rank's units, for a framework of FUSED."""
        inputs = Inputs(
            mbs=self.mbs,
            seq_len=self.model.seq_len,
            dtype=self.dtype,
            products=self.products,
            imbalance=self.imbalance,
        )
        layout = ShardLayout(axes=self.parallel, fused=FUSED[framework])
        return TreeBuilder(model=self.model, layout=replace(layout, **changes), inputs=inputs)


# From the fastest mesh dimension to the slowest: Megatron-LM's default order (tp-cp-ep-dp-pp,
# megatron/core/parallel_state.py) and torchtitan's meshes agree where both have the axis
# (torchtitan, distributed/parallel_dims.py: pp, dp_replicate, dp_shard, cp, tp).
AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


def mesh_groups(
    parallel: ParallelConfig, axes_by_group: dict[str, tuple[str, ...]]
) -> dict[str, Group]:
    """Return groups by name, each over some axes: {"dp_cp": ("cp", "dp_shard")}."""
    stride = 1
    dims = {}
    for axis in AXES:
        size = getattr(parallel, axis)
        dims[axis] = (size, stride)
        stride *= size
    return {
        name: Group(digits=tuple(dims[axis] for axis in AXES if axis in axes))
        for name, axes in axes_by_group.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comms:
    """Communication of named groups. A group of one rank communicates nothing."""

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
        """Return the operation, or none. elements: of the gathered or not yet scattered buffer.

        A reduction sums by default. Raises ConfigError where ranks do not divide the buffer.
        """
        size = self.groups[group].size
        if size == 1:
            return ()
        kind = None if collective in (SEND, RECV) else Collective(collective)
        parts = num_parts(kind, size) if kind else 1
        if elements % parts:
            raise ConfigError(module, f"{elements} elements", f"a multiple of {parts} ranks")
        op = CommOp(
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
            redop=redop or (RedOp.SUM if kind and FACTS[kind].reduces else RedOp.NONE),
            peer=peer,
            fused=fused,
        )
        return (op,)


def with_seq_len(model: ModelConfig, seq_len: int) -> ModelConfig:
    """Return the model with another sequence length; a learned position table grows with it."""
    positions = max(model.max_positions, seq_len) if model.max_positions else 0
    return replace(model, seq_len=seq_len, max_positions=positions)
