"""Techniques of a PyTorch training step that the rules share, and activation checkpointing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepmark.cases.recompute import rerun_products
from stepmark.cases.training import OptimizerKind, Recompute
from stepmark.ground.dtypes import DType
from stepmark.model.ops import Activation, Attention, CrossEntropy, Gemm, GroupedGemm, Norm
from stepmark.model.parallel import PipelineSchedule, StageSplit, TpPlan
from stepmark.step.kernel_choice import KernelChoice
from stepmark.step.lora import Lora
from stepmark.step.scan_modules import is_gate, is_scan
from stepmark.step.workload import Block, ComputeOp, Operation
from stepmark.workloads.architecture import Unit
from stepmark.workloads.rules.pytorch.fsdp_recorder import Sharding

if TYPE_CHECKING:
    from stepmark.workloads.rules.pytorch.chunk import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """Techniques of a step. weights: dtype of the parameters that the optimizer updates.

    root_has_ends: embedding and output belong to the root module. regathers_table: the
    embedding's table is gathered for its backward pass, too. names_ends: the ends of passes
    have a name, for operations that overlap with computation. pp_microbatches: of one pass; 0:
    all of a step. pp_stages: of a rank, where they are interleaved. tp_pieces: of products that
    run while they are communicated. backward: DDP's backward pass of a chunk. setup: its
    messages before the first step.
    """

    weights: DType = DType.FP32
    model_weights: DType = DType.FP32
    sharding: Sharding | None = None
    plan: TpPlan = TpPlan.TORCHTITAN
    names_ends: bool = False
    regathers_table: bool = True
    root_has_ends: bool = True
    blocks_per_group: int = 1
    recompute: Recompute = Recompute.NONE
    recompute_blocks: tuple[int, int] = (1, 1)
    syncs_last: bool = False  # gradients are reduced with the last micro-batch only
    clips: bool = True
    fuse_qkv: bool = True
    tp_pieces: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    pp_microbatches: int = 0
    pp_stages: int = 2
    pp_split: StageSplit = StageSplit.EVEN
    backward: "Callable[[Chunk], Block] | None" = None
    setup: "Callable[[Chunk], Block] | None" = None
    lora: Lora | None = None
    loss_chunks: int = 1
    kernels: KernelChoice = KernelChoice()
    fuses_optimizer: bool = True
    optimizer: OptimizerKind = OptimizerKind.ADAMW

    @property
    def has_masters(self) -> bool:
        return self.weights is not self.model_weights

    def is_checkpointed(self, layer: int) -> bool:
        """Return whether a layer is checkpointed. recompute_blocks: (2, 3) is two of three."""
        if self.recompute is Recompute.BLOCKS:
            some, every = self.recompute_blocks
            return layer % every < some
        return self.recompute is not Recompute.NONE


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
