"""Techniques of a PyTorch training step that the rules share, and activation checkpointing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepmark.cases.recompute import rerun_products
from stepmark.cases.training import DataParallel, GradSync, Recompute
from stepmark.model.ops import Activation, Attention, CrossEntropy, Gemm, GroupedGemm, Norm
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.scan_modules import is_gate, is_scan
from stepmark.step.workload import Block, ComputeOp, Operation
from stepmark.workloads.architecture import Unit
from stepmark.workloads.rules.pytorch.fsdp_recorder import Sharding
from stepmark.workloads.rules.pytorch.settings import PyTorch

if TYPE_CHECKING:
    from stepmark.workloads.rules.pytorch.chunk import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """Settings of a step, and what follows from them and from the job.

    schedule: of a pipeline, 1F1B without one. root_has_ends: embedding and output belong to the
    root module. names_ends: the ends of passes have a name, for operations that overlap with
    computation. tp_pieces: of products that run while they are communicated. backward: DDP's
    backward pass of a chunk. setup: its messages before the first step.
    """

    settings: PyTorch
    schedule: PipelineSchedule
    root_has_ends: bool
    tp_pieces: int
    sharding: Sharding | None = None
    names_ends: bool = False
    backward: "Callable[[Chunk], Block] | None" = None
    setup: "Callable[[Chunk], Block] | None" = None

    @property
    def has_masters(self) -> bool:
        return self.settings.weights is not self.settings.model_weights

    @property
    def syncs_last(self) -> bool:
        """Whether gradients are reduced with the last micro-batch only."""
        is_reduced = self.settings.data_parallel is not DataParallel.NONE
        return is_reduced and self.settings.grad_sync is GradSync.LAST

    def is_checkpointed(self, layer: int) -> bool:
        """Return whether a layer is checkpointed: some of every so many, or all."""
        settings = self.settings
        if settings.recompute is Recompute.BLOCKS:
            return layer % settings.recompute_every < settings.recompute_some
        return settings.recompute is not Recompute.NONE


def recomputed(unit: Unit, recompute: Recompute) -> tuple[tuple[Operation, ...], ...]:
    """Return the recomputed operations: up to the last tensor that the backward pass needs.

    Which products are among them says cases/recompute.py. Per operator
    (training/parallelize.py) attention and communication are kept, too.
    """
    stop = _last_needed(unit)
    again = set(_products_again(unit, recompute))
    place = -1
    pieces: list[tuple[Operation, ...]] = []
    for piece in unit.fwd:
        ops: list[Operation] = []
        for op in piece:
            place += 1
            is_kept = recompute is Recompute.OPS and (
                not isinstance(op, ComputeOp) or isinstance(op.op, Attention)
            )
            if place in again if _is_product(op) else place < stop and not is_kept:
                ops.append(replace(op, recompute=True))
        pieces.append(tuple(ops))
    return tuple(pieces)


def _products_again(unit: Unit, recompute: Recompute) -> list[int]:
    """Return the places of the products that are recomputed."""
    places = _product_places(unit)
    if not places:
        return []
    again = rerun_products(len(places), recompute, saves_last=_saves_last(unit))
    return [places[number] for number in again]


def _product_places(unit: Unit) -> list[int]:
    ops = (op for piece in unit.fwd for op in piece)
    return [place for place, op in enumerate(ops) if _is_product(op)]


def _saves_last(unit: Unit) -> bool:
    """Return whether the result of the last product is needed in the backward pass."""
    return _last_needed(unit) > _product_places(unit)[-1]


# The backward pass of these needs their input and a result, such as a norm's statistics.
_SAVE_RESULTS = (Norm, Attention, CrossEntropy)


def _last_needed(unit: Unit) -> int:
    """Count the forward operations up to the last tensor that the backward pass needs.

    A linear layer, an activation, a scan and a gate save their input. Rows of experts are
    weighted and sent back after their last product.
    """
    ops = [op for piece in unit.fwd for op in piece]
    if not any(map(_is_product, ops)):
        return len(ops)
    stop = 0
    for place, op in enumerate(ops):
        if not isinstance(op, ComputeOp):
            continue
        if isinstance(op.op, Gemm | Activation) or is_scan(op) or is_gate(op):
            stop = place
        elif isinstance(op.op, _SAVE_RESULTS):
            stop = place + 1
        elif isinstance(op.op, GroupedGemm):
            stop = 1 + max(at for at, other in enumerate(ops) if other.module == op.module)
    return stop


def before_recompute(unit: Unit) -> int:
    """Count backward operations before those of the last product, which need no activations.

    A block is recomputed when autograd unpacks the first saved tensor.
    """
    places = _product_places(unit)
    if not places or _saves_last(unit):
        return 0
    ops = [op for piece in unit.fwd for op in piece]
    module = ops[places[-1]].module
    backward = [
        index
        for index, op in enumerate(unit.bwd[0])
        if op.module == module and isinstance(op, ComputeOp)
    ]
    return min(backward, default=0)


def _is_product(op: Operation) -> bool:
    return isinstance(op, ComputeOp) and isinstance(op.op, Gemm | GroupedGemm)
