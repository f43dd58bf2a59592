"""The operators of a model on one rank, as `op --model` lists them: leaves of its tree."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from stepmark.cases.case import Label
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.ops import FAMILIES, CrossEntropy, Op, Optimizer, Phase
from stepmark.step.layout import Inputs, ShardLayout
from stepmark.step.module import Module
from stepmark.step.tree import build

Placed = tuple[Label, Op]
_CHUNKS = 8  # of the loss that computes logits chunk by chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model, its sharding, and one micro-batch of it."""

    model: ModelConfig
    layout: ShardLayout
    inputs: Inputs

    @property
    def root(self) -> Module:
        return build(self.model, self.layout, self.inputs)


def _leaves(family: str, shape: ModelShape) -> Iterator[Placed]:
    """Yield operators of one layer of each kind, head and loss, each with its count."""
    if family == "grouped-gemm" and shape.model.moe and shape.inputs.dtype is DType.FP64:
        raise ConfigError("dtype", shape.inputs.dtype, "bf16, fp16 or fp32 for grouped-gemm")
    counts = Counter[tuple[str, Phase, Op]]()
    for unit in shape.root.inside:
        counts |= Counter(
            (_role(leaf.role), item.phase, item.op)
            for leaf in unit.walk()
            for item in leaf.work
            # The last norm has the shape of a layer's norms.
            if isinstance(item.op, FAMILIES[family]) and leaf.role != "head.norm"
        )
    for (role, phase, op), count in counts.items():
        yield _label(shape, role, phase, count), op


def _role(role: str) -> str:
    last = role.rpartition(".")[2]
    return "attention" if last == "core" else last


def _label(shape: ModelShape, role: str, phase: Phase, count: int = 1) -> Label:
    mbs = shape.inputs.mbs
    return Label(model=shape.model.name, role=role, phase=phase, count=count, mbs=mbs)


def _losses(shape: ModelShape) -> Iterator[Placed]:
    """Yield the loss of all logits, and the one that is computed chunk by chunk."""
    placed = list(_leaves("cross-entropy", shape))
    yield from placed
    for label, op in placed:
        if isinstance(op, CrossEntropy) and op.tokens >= _CHUNKS:
            yield replace(label, role="loss_chunked"), replace(op, chunks=_CHUNKS)


def _optimizers(shape: ModelShape) -> Iterator[Placed]:
    """Yield AdamW of this rank's shards: one layer of each kind, and embedding with head."""
    axes = shape.layout.axes
    layout = shape.layout
    shards = axes.dp_shard * axes.cp
    # ep divides the ranks of dp_shard; the remaining factor shards each expert.
    expert_shards = max(1, shards * axes.tp // (axes.ep * layout.expert_tp))
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for unit in shape.root.inside:
        params = unit.all_params
        kind: tuple[int, ...] = ()
        if not unit.name.startswith("blocks"):
            role = "optimizer_ends"
            params = tuple(param for param in params if not param.is_norm)
            if unit.name == "output" and shape.model.tied_embeddings:
                params = ()
        else:
            is_moe = any(param.is_expert for param in params)
            role = "optimizer_moe_layer" if is_moe else "optimizer_layer"
            kind = tuple(param.numel for param in params)
        numel = sum(
            -(-param.numel // (expert_shards if param.is_expert else shards))
            for param in params
        )
        # Layers of one kind may come in several places.
        sizes[role, kind] = numel + (0 if kind else sizes.get((role, kind), 0))
    for role, kind in sorted(sizes, key=lambda key: key[0] == "optimizer_ends"):
        op = Optimizer(num_params=sizes[role, kind], kind="adamw", dtype=DType.FP32)
        yield _label(shape, role, Phase.OPTIM), op


# Families that a model shapes, in the order of `op all`.
BY_FAMILY: dict[str, Callable[[ModelShape], Iterator[Placed]]] = {
    **{
        family: partial(_leaves, family)
        for family in ("gemm", "grouped-gemm", "attention", "norm", "activation", "rope")
    },
    "cross-entropy": _losses,
    "optimizer": _optimizers,
}
