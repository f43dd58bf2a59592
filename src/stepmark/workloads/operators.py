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
from stepmark.step.workload import Kernel

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
    per_step = Counter[tuple[str, Phase, Op]]()
    for unit in shape.root.inside:
        in_unit = Counter[tuple[str, Phase, Op]]()
        for leaf in unit.walk():
            for item in leaf.work:
                if isinstance(item.op, FAMILIES[family]):
                    place = (_role(leaf.role), item.phase, item.op)
                    per_step[place] += unit.times
                    # The last norm has the shape of a layer's norms.
                    in_unit[place] += leaf.role != "head.norm"
        counts |= in_unit
    for place, count in counts.items():
        yield _label(shape, *place[:2], per_step[place], count), place[2]


def _role(role: str) -> str:
    last = role.rpartition(".")[2]
    return "attention" if last == "core" else last


def _label(shape: ModelShape, role: str, phase: Phase, per_step: int, count: int = 1) -> Label:
    return Label(
        model=shape.model.name,
        role=role,
        phase=phase,
        count=count,
        per_step=per_step,
        mbs=shape.inputs.mbs,
    )


def _losses(shape: ModelShape) -> Iterator[Placed]:
    """Yield the loss of all logits, and the one that is computed chunk by chunk."""
    placed = list(_leaves("cross-entropy", shape))
    yield from placed
    for label, op in placed:
        if isinstance(op, CrossEntropy) and op.tokens >= _CHUNKS:
            other = replace(label, role="loss_chunked", per_step=None)
            yield other, replace(op, chunks=_CHUNKS)


_ENDS = "optimizer_ends"  # of embedding and head


def _optimizer_of(shape: ModelShape, unit: Module) -> tuple[str, int]:
    """Return the role of the optimizer of a unit, and the parameters of this rank's shard."""
    axes = shape.layout.axes
    shards = axes.dp_shard * axes.cp
    # ep divides the ranks of dp_shard; the remaining factor shards each expert.
    expert_shards = max(1, shards * axes.tp // (axes.ep * shape.layout.expert_tp))
    params = unit.all_params
    if not unit.name.startswith("blocks"):
        role = _ENDS
        params = tuple(param for param in params if not param.is_norm)
        if unit.name == "output" and shape.model.tied_embeddings:
            params = ()
    else:
        is_moe = any(param.is_expert for param in params)
        role = "optimizer_moe_layer" if is_moe else "optimizer_layer"
    return role, sum(
        -(-param.numel // (expert_shards if param.is_expert else shards)) for param in params
    )


def _adamw(num_params: int) -> Optimizer:
    return Optimizer(num_params=num_params, kind="adamw", dtype=DType.FP32)


def _optimizers(shape: ModelShape) -> Iterator[Placed]:
    """Yield AdamW of this rank's shards: one layer of each kind, and embedding with head."""
    layers = Counter[tuple[str, int]]()
    ends = 0
    for unit in shape.root.inside:
        role, numel = _optimizer_of(shape, unit)
        if role == _ENDS:
            ends += numel
        else:
            layers[role, numel] += unit.times
    for (role, numel), times in (*layers.items(), ((_ENDS, ends), 1)):
        yield _label(shape, role, Phase.OPTIM, times), _adamw(numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Parts of a model that do the same work in a step. name: of the first; "" of the rest."""

    name: str
    times: int
    work: Counter[Op | Kernel]  # of one of them


def step_parts(shape: ModelShape) -> list[StepPart]:
    """Return the layers of a step on one rank by their work, then all that is in no layer.

    A step is a forward and a backward pass of one micro-batch, and AdamW of this rank's shards.
    """
    layers: dict[frozenset[tuple[Op | Kernel, int]], StepPart] = {}
    rest = Counter[Op | Kernel]()
    ends = 0
    for unit in shape.root.inside:
        work = Counter(item.op for leaf in unit.walk() for item in leaf.work)
        role, numel = _optimizer_of(shape, unit)
        if role == _ENDS:
            ends += numel
            rest.update({op: unit.times * count for op, count in work.items()})
            continue
        work[_adamw(numel)] += 1
        key = frozenset(work.items())
        first = layers.get(key, StepPart(name=unit.name, times=0, work=work))
        layers[key] = replace(first, times=first.times + unit.times)
    rest[_adamw(ends)] += 1
    return [*layers.values(), StepPart(name="", times=1, work=rest)]


# Families that a model shapes, in the order of `op all`.
BY_FAMILY: dict[str, Callable[[ModelShape], Iterator[Placed]]] = {
    **{
        family: partial(_leaves, family)
        for family in ("gemm", "grouped-gemm", "attention", "norm", "activation", "rope")
    },
    "cross-entropy": _losses,
    "optimizer": _optimizers,
}
