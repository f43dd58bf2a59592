"""Time in which the host issues an operation, by what a step issues and how long it took.

DDP's reducer is C++ that runs between operations of Python, and small widths fill few of its
buckets: what it issues counts as part of these operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from stepmark.cases.record import Measured
from stepmark.ground.stats import slowest_per_sample
from stepmark.predictions.costs import pass_of
from stepmark.step.workload import CommOp, ComputeOp, Operation
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.rules.pytorch.ddp import is_of_reducer

_PASSES = {"fwd": "fwd_s", "bwd": "bwd_s", "optim": "optim_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A pass of a step that the host bounds: its time, and the number of what it issues."""

    name: str
    time_s: float
    num_computes: int
    num_collectives: int

    @property
    def per_operation_s(self) -> float:
        return self.time_s / (self.num_computes + self.num_collectives)


def is_issued(op: Operation) -> bool:
    """Return whether the host issues an operation by itself."""
    is_wait = isinstance(op, ComputeOp) and op.is_wait
    return not is_wait and not is_of_reducer(op)


def passes_s(record: Measured) -> dict[str, float]:
    """Return the median times of the unprofiled passes, of those that were measured."""
    samples = {name: getattr(record.training, field) for name, field in _PASSES.items()}
    return {name: median(slowest_per_sample(own)) for name, own in samples.items() if own}


def pass_times(record: Measured) -> Iterator[PassTime]:
    """Yield the passes of a measured step that have operations."""
    computes = dict.fromkeys(_PASSES, 0)
    collectives = dict.fromkeys(_PASSES, 0)
    for op in filter(is_issued, of_case(record.train).expand()):
        counts = collectives if isinstance(op, CommOp) else computes
        counts[pass_of(op.phase)] += 1
    for name, time_s in passes_s(record).items():
        if computes[name] + collectives[name]:
            yield PassTime(
                name=name,
                time_s=time_s,
                num_computes=computes[name],
                num_collectives=collectives[name],
            )
