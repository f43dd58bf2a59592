"""Units of a training step on one rank: their parameters, and what their modules keep.

Parameters are tensors as torch has them; activations are those that modules' `keeps` count.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Fp8, Precision
from stepmark.step.module import Module, Param
from stepmark.step_memory.allocator import Block
from stepmark.workloads.rules.pytorch.fsdp_order import ParamGroup
from stepmark.workloads.rules.pytorch.units import SUMMED

FP32 = 4
_STORED_ITEMSIZE = {
    Precision.AMP: FP32,
    Precision.MASTER: 2,
    Precision.BF16: 2,
    Precision.FP32: FP32,
}


class Formats:
    """How a case stores and computes, with bytes of an element."""

    def __init__(self, case: TrainCase) -> None:
        self.is_fsdp = case.data_parallel is DataParallel.FSDP
        self.is_ddp = case.data_parallel is DataParallel.DDP
        self.is_compiled = case.compile.has_blocks
        self.is_head_compiled = case.compile.has_head
        self.casts = case.precision is Precision.AMP and not self.is_fsdp  # autocast
        self.itemsize = FP32 if case.precision is Precision.FP32 else 2  # of an activation
        self.stored_itemsize = _STORED_ITEMSIZE[case.precision]
        self.grad_itemsize = FP32 if self.casts else self.itemsize

    def compiles(self, unit: str) -> bool:
        """Return whether torch.compile compiles a unit of this name."""
        return self.is_head_compiled if unit == "output" else self.is_compiled


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter on this rank: elements of all shards, padded, and of the first one.

    is_across: shards are no rows of it, so that torch copies it once more.
    fresh: a gradient that is yet to be added to the one that waits for its reduction.
    """

    param: Param
    numel: int
    padded: int
    stored: int
    is_across: bool
    is_fp8: bool  # as an operand of its product
    is_gathered_fp8: bool
    gathered_itemsize: int
    copy_itemsize: int  # of a copy for its product; 0: none
    grad: Block | None = None
    fresh: Block | None = None
    copy: Block | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A module with none inside: bytes per token that it keeps, and of its input's gradient.

    is_summed: its output is summed over the ranks of tensor parallelism.
    """

    keeps: tuple[int, ...]
    input_grad: int
    output: int  # a product's, before tensor parallelism divides it
    is_summed: bool
    is_norm: bool
    is_residual: bool


@dataclass(slots=True)
class FsdpUnit:
    """A block, or one end of the model. Leaves are in forward order.

    begins, ends: FSDP's groups whose modules begin and end with it, in forward order.
    """

    name: str
    leaves: tuple[Leaf, ...]
    weights: list[list[Weight]]  # by leaf
    is_checkpointed: bool = False
    begins: list[ParamGroup[Weight]] = field(default_factory=list)
    ends: list[ParamGroup[Weight]] = field(default_factory=list)

    @property
    def all_weights(self) -> list[Weight]:
        return [weight for weights in self.weights for weight in weights]


class UnitBuilder:
    """Factory of the units of a pipeline stage."""

    def __init__(self, case: TrainCase) -> None:
        self._case, self._formats = case, Formats(case)

    def units(self, root: Module, stage: int) -> list[FsdpUnit]:
        case = self._case
        units = list[FsdpUnit]()
        by_stage = case.stage_layers
        layers = itertools.chain(*(by_stage[own] for own in case.stages_of(stage)))
        for module in root.inside:
            is_block = module.name.startswith("blocks")
            leaves = [leaf for leaf in module.walk() if not leaf.inside]
            shapes = tuple(self._leaves(leaves, self._formats.compiles(module.name)))
            for _ in range(module.times):
                unit = FsdpUnit(
                    "block" if is_block else module.name,
                    shapes,
                    [[self._weight(param) for param in leaf.params] for leaf in leaves],
                    is_block and case.is_checkpointed[next(layers)],
                )
                units.append(unit)
        first = units[0]
        last = units[-1]
        if case.model.tied_embeddings and (first.name, last.name) == ("embedding", "output"):
            table = first.weights[0][0]
            head = last.weights[1][0]
            table.is_fp8 = head.is_fp8
            table.copy_itemsize = head.copy_itemsize
            last.weights[1] = [table]
        return units

    def _leaves(self, modules: list[Module], is_compiled: bool) -> Iterator[Leaf]:
        model = self._case.model
        tp = self._case.parallel.tp
        size = self._formats.itemsize
        outputs = model.hidden_size
        follows_product = False
        for module in modules:
            keeps = module.keeps
            param = next(iter(module.params), None)
            is_eager = not is_compiled
            if self._case.parallel.ep > 1 and ".experts" in module.role:
                is_eager = True  # Dynamo leaves out what the exchange of rows calls
            eager = keeps.eager if is_eager else 0
            if self._case.parallel.ep > 1 and module.role == "mlp.experts_down" and model.moe:
                eager += model.moe.top_k * model.hidden_size  # index_copy keeps its source
            divided = keeps.divided
            if (
                self._case.parallel.cp > 1
            ):  # k is kept once gathered, outputs by chunk and joined
                if module.role == "attention.rope" and not model.mla:
                    divided -= model.num_kv_heads * model.d_qk
                elif module.role == "attention.out":
                    divided *= 2
            widths = [keeps.whole, divided // tp, eager // tp]
            tensors = [size * width for width in widths] + [FP32 * keeps.statistics // tp]
            if self._is_fp8(param) and is_compiled:
                # The product's input in FP8; attention's output is kept as such, too.
                fp8 = keeps.whole + keeps.divided // tp
                is_attention = module.name.endswith("attention.out")
                tensors = [fp8, *(tensors if is_attention else ())]
            width = model.hidden_size
            output = 0
            if param is not None and len(param.shape) > 1:
                copies = 1.0
                if model.moe and param.is_expert:
                    copies = model.moe.top_k * self._case.imbalance
                width = math.ceil(copies * param.shape[-1])
                output = math.ceil(copies * param.shape[-2])
                outputs = output // tp + (outputs if follows_product else 0)
                follows_product = True
            elif param is None:
                width = outputs
                follows_product = False
            yield Leaf(
                keeps=tuple(filter(None, tensors)),
                input_grad=size * width,
                output=size * output,
                is_summed=module.role in SUMMED,
                is_norm=param is not None and param.is_norm,
                is_residual=module.role.endswith("residual"),
            )

    def _is_fp8(self, param: Param | None) -> bool:
        """Return whether a product of this weight is in FP8."""
        case = self._case
        if case.fp8 is Fp8.NONE or param is None or len(param.shape) != 2:
            return False
        if param.part == "embedding" or "router" in param.part:
            return False
        return case.fp8_head or param.part != "head"

    def _weight(self, param: Param) -> Weight:
        case = self._case
        axes = self._case.parallel
        own = param
        if param.is_expert:
            own = replace(param, shape=(param.shape[0] // axes.ep, *param.shape[1:]))
        tp = 1 if param.is_partial else axes.tp
        ranks = axes.dp_shard * axes.cp // (axes.ep if param.is_expert else 1)
        ranks = ranks if self._formats.is_fsdp else 1
        padded = -(-own.padded(ranks) // (tp * ranks)) * ranks
        is_fp8 = self._is_fp8(param)
        is_gathered_fp8 = is_fp8 and case.fp8_all_gather
        copy_itemsize = 2 if self._formats.casts and param.part != "embedding" else 0
        if is_fp8 and self._formats.compiles("output" if param.part == "head" else "blocks"):
            # Casts are kept; of gathered ones those that torch 2.13's partitioner transposes.
            is_gated = case.model.is_gated
            transposed = ("mlp.down", "mlp.up") if is_gated else ("mlp.down",)
            copy_itemsize = int(not is_gathered_fp8 or param.part in transposed)
        elif is_fp8 and case.fp8 is Fp8.TENSORWISE:
            copy_itemsize = 0  # torchao 0.17 keeps the weight, which each pass casts anew
        return Weight(
            param=param,
            numel=own.numel // tp,
            padded=padded,
            stored=padded // ranks,
            is_across=bool(own.shard_dim(ranks)),
            is_gathered_fp8=is_gathered_fp8,
            gathered_itemsize=1 if is_gathered_fp8 else self._formats.itemsize,
            is_fp8=is_fp8,
            copy_itemsize=copy_itemsize,
        )
