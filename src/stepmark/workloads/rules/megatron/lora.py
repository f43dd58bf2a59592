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


def adapters(plan: Plan, parts: Mapping[str, Module], role: str) -> Iterator[Step]:
    """Yield the two products beside a layer of this role, if it has an adapter."""
    if role + _FIRST not in parts:
        return
    first = parts[role + _FIRST]
    second = parts[role + _SECOND]
    if plan.size("tp") == 1:
        yield of_leaf(first)
        yield of_leaf(second)
        return
    elements = plan.tokens * (plan.settings.lora_rank or 0)  # between the two
    yield _first(plan, first, elements, is_row=parts[role].is_row)
    yield _second(plan, second, elements, is_row=parts[role].is_row)


def _first(plan: Plan, leaf: Module, elements: int, *, is_row: bool) -> Step:
    """Gather a column's result, or sum a row's.

    Without sequence parallelism the gradient of a column's input is summed.
    """
    kind = Collective.ALL_REDUCE if is_row else Collective.ALL_GATHER
    sent = plan.inside(kind, elements, "tp", Phase.FWD, leaf.role)
    if is_row or plan.sequence_parallel:
        return Step(module=leaf.role, fwd=(*leaf.fwd, *sent), bwd=leaf.bwd)
    rows = plan.tokens * plan.model.hidden_size
    return _summing(plan, leaf, (*leaf.fwd, *sent), (), rows)


def _second(plan: Plan, leaf: Module, elements: int, *, is_row: bool) -> Step:
    """Return the second product. elements: of its input, whose gradient is summed."""
    if not is_row:
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
