"""The backward pass in two parts, with which torch's zero-bubble pipelines fill their bubbles.

torch 2.13, torch/distributed/pipelining/_backward.py: stage_backward_input runs the autograd
graph as far as the stage's input and keeps the gradient of each node that has a weight;
stage_backward_weight starts at those nodes, in the order of the module's parameters. The node
of a norm runs in both, for its input and for its weight. The model's first stage has no input
with a gradient, so its whole backward pass is in the second part (stage.py:
backward_weight_one_chunk).
"""

from collections.abc import Iterator
from dataclasses import replace

from stepmark.cases.split_backward import split_refusals
from stepmark.cases.training import DataParallel
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Norm, Phase
from stepmark.step.workload import ComputeOp, Kernel, Operation
from stepmark.workloads.architecture import AnyJob, Ops, Unit
from stepmark.workloads.job import Job
from stepmark.workloads.rules.pytorch.settings import PyTorch


def check_split(job: AnyJob, settings: PyTorch) -> None:
    """Raise ConfigError for what the two parts would compute in another way, or twice."""
    schedule = settings.pp_schedule
    if not isinstance(job, Job) or job.parallel.pp == 1 or not schedule.splits_backward:
        return  # a model of one's own has no pipeline
    if settings.lora_rank is not None:
        raise ConfigError("lora_rank", settings.lora_rank, f"left out with {schedule}")
    is_sharded = settings.data_parallel is DataParallel.FSDP
    for field, value, allowed in split_refusals(
        schedule,
        job.model,
        recompute=settings.recompute,
        compiles=settings.compile,
        is_narrow=job.products is not None,
        reshard=settings.resharding(job.parallel.pp) if is_sharded else "no",
    ):
        raise ConfigError(field, value, allowed)


def input_part(piece: Ops) -> Ops:
    """Return what of a piece leads to the gradient of the unit's input."""
    return tuple(op for op in piece if op.phase is not Phase.WGRAD)


def weight_part(unit: Unit) -> Ops:
    """Return what computes the gradients of a unit's weights, in their order."""
    by_part: dict[str, list[Operation]] = {param.part: [] for param in unit.params}
    for piece in unit.bwd:
        for op in piece:
            by_part.setdefault(op.module, []).extend(_of_weight(op))
    return tuple(op for ops in by_part.values() for op in ops)


def _of_weight(op: Operation) -> Iterator[Operation]:
    if op.phase is Phase.WGRAD:
        yield op
    elif isinstance(op, ComputeOp) and isinstance(op.op, Norm):
        # It reads the norm's input and the gradient of its result.
        num_bytes = 2 * op.op.tokens * op.op.hidden * op.op.dtype.itemsize
        kernel = Kernel(name="norm_weight_backward", flops=0, bytes_moved=num_bytes)
        yield replace(op, op=kernel, phase=Phase.WGRAD)
