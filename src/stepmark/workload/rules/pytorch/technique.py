"""How a step of a PyTorch trainer runs, whatever is sharded or reduced in it; its settings.

And what activation checkpointing runs again in the backward pass of a block.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Attention, Gemm, GroupedGemm
from stepmark.core.training import Recompute
from stepmark.core.workload import Block, ComputeOp, Operation
from stepmark.workload.architecture import Unit
from stepmark.workload.job import check_trained, not_below
from stepmark.workload.rules.pytorch.fsdp_order import Sharding
from stepmark.workload.rules.pytorch.schedules import Schedule
from stepmark.workload.rules.pytorch.units import TpPlan

if TYPE_CHECKING:
    from stepmark.workload.rules.pytorch.chunk import Chunk

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """How a step runs, whatever the rule. weights: dtype of what the optimizer updates.

    together: embedding and output are the root's own. table_again: the embedding's table is
    gathered for its backward pass, too. marked: the ends of passes have a name, for what runs
    beside the computation. pp_microbatches: of one pass; 0: all of a step. pp_stages: of a
    rank, where they are interleaved. buckets: makes DDP's backward pass of a chunk; setup:
    what it sends before the first step.
    """

    weights: DType = DType.FP32
    model_weights: DType = DType.FP32
    sharding: Sharding | None = None
    plan: TpPlan = TpPlan.TORCHTITAN
    marked: bool = False
    table_again: bool = True
    together: bool = True
    blocks_per_group: int = 1
    recompute: Recompute = Recompute.NONE
    recompute_blocks: tuple[int, int] = (1, 1)
    holds: bool = False  # gradients are reduced with the last micro-batch only
    clips: bool = True
    schedule: Schedule = Schedule.ONE_F_ONE_B
    pp_microbatches: int = 0
    pp_stages: int = 2
    buckets: "Callable[[Chunk], Callable[[], Block]] | None" = None
    setup: "Callable[[Chunk], Block] | None" = None

    def is_checkpointed(self, layer: int) -> bool:
        """recompute_blocks: so many of so many, where recompute says blocks."""
        if self.recompute is Recompute.BLOCKS:
            some, every = self.recompute_blocks
            return layer % every < some
        return self.recompute is not Recompute.NONE


def technique(settings: Any, **more: Any) -> Technique:
    """What the settings that several rules have come to; more: of one rule."""
    fields = dict[str, Any]()
    if hasattr(settings, "param_dtype") and hasattr(settings, "masters"):
        kept = settings.param_dtype
        fields = {"model_weights": kept, "weights": DType.FP32 if settings.masters else kept}
    if hasattr(settings, "tp_plan"):
        fields["plan"] = settings.tp_plan
    if hasattr(settings, "pp_schedule"):
        fields |= {
            "schedule": settings.pp_schedule,
            "pp_microbatches": settings.pp_microbatches,
            "pp_stages": settings.pp_stages,
        }
    return Technique(
        clips=settings.clip,
        recompute=settings.recompute,
        recompute_blocks=(settings.recompute_some, settings.recompute_every),
        **fields,
        **more,
    )


def checked(settings: Any) -> None:
    """Raises ConfigError for types, recompute_* and pp_* that mean nothing."""
    for name in ("param_dtype", "reduce_dtype", "shard_dtype"):
        if hasattr(settings, name):
            check_trained(name, getattr(settings, name))
    not_below(settings, 1, "recompute_some", "recompute_every")
    if settings.recompute_some > settings.recompute_every:
        raise ConfigError(
            "recompute_some",
            settings.recompute_some,
            f"at most recompute_every ({settings.recompute_every})",
        )
    if hasattr(settings, "pp_stages"):
        not_below(settings, 1, "pp_stages")
        not_below(settings, 0, "pp_microbatches")


def plain_settings(settings: Any) -> dict[str, Setting]:
    """Fields of a rule's settings as plain values."""
    found = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}
    return {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in found.items()
    }


def again(unit: Unit, recompute: Recompute) -> tuple[tuple[Operation, ...], ...]:
    """What checkpointing runs again: up to the last input that its backward pass needs.

    torch.utils.checkpoint stops early there: before the last product, whose own input is
    known by then, and what follows it. Per operator (bench/training/parallelize.py)
    attention, communication and every second product are kept.
    """
    stop, place = _last_needed(unit), 0
    products = 0
    pieces: list[tuple[Operation, ...]] = []
    for piece in unit.fwd:
        found: list[Operation] = []
        for one in piece:
            place += 1
            if _is_product(one):
                products += 1
            is_kept = not isinstance(one, ComputeOp) or isinstance(one.op, Attention)
            if _is_product(one):
                is_kept = products % 2 == 1
            if place <= stop and not (recompute is Recompute.OPS and is_kept):
                found.append(replace(one, recompute=True))
        pieces.append(tuple(found))
    return tuple(pieces)


def _last_needed(unit: Unit) -> int:
    """Forward operations up to the last product; with it where it is of experts.

    Rows of experts are weighted and sent back after their last product.
    """
    ops = [one for piece in unit.fwd for one in piece]
    products = [(at, one) for at, one in enumerate(ops) if _is_product(one)]
    if not products:
        return len(ops)
    last, product = products[-1]
    if _is_plain(product):
        return last
    return 1 + max(at for at, one in enumerate(ops) if one.module == product.module)


def ahead(unit: Unit) -> int:
    """Backward operations before those of the last product, which need nothing kept.

    Blocks are computed again when the first kept tensor is asked for.
    """
    products = [one for piece in unit.fwd for one in piece if _is_product(one)]
    if not products or not _is_plain(products[-1]):
        return 0
    module = products[-1].module
    places = [
        at
        for at, one in enumerate(unit.bwd[0])
        if one.module == module and isinstance(one, ComputeOp)
    ]
    return min(places, default=0)


def _is_product(one: Operation) -> bool:
    return isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm)


def _is_plain(one: Operation) -> bool:
    return isinstance(one, ComputeOp) and isinstance(one.op, Gemm)
