"""Adapters of Megatron-Bridge's LoRA beside linear layers that are divided over tp.

Both products of an adapter are outside of sequence parallelism. Beside a column-parallel layer
the first one's rank is divided and its result gathered; beside a row-parallel layer its result
is summed, that of the second one gathered, and each rank keeps its tokens. The gradient of the
second one's input is summed over tp in all cases.

The input of a column-parallel layer has been gathered for the layer itself, and the gradients
of both are added up before they are scattered: TransformerEngine returns the gathered output of
the norm.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987, src/megatron/bridge/peft/lora.py (LoRA),
lora_layers.py (LoRALinear), utils.py (ParallelLinearAdapter,
get_adapter_attributes_from_linear); megatron-core 0.16.1, tensor_parallel/layers.py
(ColumnParallelLinear, RowParallelLinear, LinearWithFrozenWeight). Only read.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.module import Module
from stepmark.step.workload import Operation
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.steps import Step, of_leaf

_FIRST = ".lora_a"
_SECOND = ".lora_b"


def adapted(role: str) -> str:
    """Return the role of the layer that an adapter's product is beside, or the role itself."""
    return role.removesuffix(_FIRST).removesuffix(_SECOND)


def adapters(
    plan: Plan, parts: Mapping[str, Module], role: str, *, is_column: bool
) -> Iterator[Step]:
    """Yield the two products beside a layer of this role, if it has an adapter."""
    if role + _FIRST not in parts:
        return
    first = parts[role + _FIRST]
    second = parts[role + _SECOND]
    if plan.size("tp") == 1:
        yield of_leaf(first)
        yield of_leaf(second)
        return
    rank = plan.settings.lora_rank or 0
    if is_column:
        yield _first_of_column(plan, first, plan.tokens * rank)
    else:
        yield _first_of_row(plan, first, plan.tokens * rank)
    yield _second(plan, second, plan.tokens * rank, is_column=is_column)


def _first_of_column(plan: Plan, leaf: Module, elements: int) -> Step:
    """Gather the result. Without sequence parallelism the gradient of the input is summed."""
    gathered = plan.inside(Collective.ALL_GATHER, elements, "tp", Phase.FWD, leaf.role)
    if plan.sequence_parallel:
        return Step(module=leaf.role, fwd=(*leaf.fwd, *gathered), bwd=leaf.bwd)
    width = plan.tokens * plan.model.hidden_size
    return _summing(plan, leaf, (*leaf.fwd, *gathered), (), width)


def _first_of_row(plan: Plan, leaf: Module, elements: int) -> Step:
    summed = plan.inside(Collective.ALL_REDUCE, elements, "tp", Phase.FWD, leaf.role)
    return Step(module=leaf.role, fwd=(*leaf.fwd, *summed), bwd=leaf.bwd)


def _second(plan: Plan, leaf: Module, elements: int, *, is_column: bool) -> Step:
    """Return the second product. elements: of its input, whose gradient is summed."""
    if is_column:
        return _summing(plan, leaf, leaf.fwd, (), elements)
    product, *added = leaf.fwd
    rows = plan.tokens * plan.model.hidden_size
    send = partial(plan.inside, Collective.ALL_GATHER, rows, "tp", module=leaf.role)
    grads = send(phase=Phase.DGRAD) if plan.sequence_parallel else ()
    return _summing(plan, leaf, (product, *send(phase=Phase.FWD), *added), grads, elements)


def _summing(
    plan: Plan,
    leaf: Module,
    fwd: tuple[Operation, ...],
    grads: tuple[Operation, ...],
    elements: int,
) -> Step:
    """Sum the gradient of the input over tp during the weight gradient.

    grads: the collective of the output's gradient, which follows its scaling.
    """
    name = f"{leaf.role}.reduce"
    reduce = plan.inside(
        Collective.ALL_REDUCE, elements, "tp", Phase.DGRAD, leaf.role, stream="tp", name=name
    )
    scaling = [op for op in leaf.bwd if op.phase is Phase.BWD]
    inputs = [op for op in leaf.bwd if op.phase is Phase.DGRAD]
    weights = [op for op in leaf.bwd if op.phase is Phase.WGRAD]
    return Step(
        module=leaf.role,
        fwd=fwd,
        bwd=(*scaling, *grads, *inputs, *reduce, *weights),
        pending=name,
    )
