"""Which micro-batch a device's memory holds: the estimate of the model's own modules."""

from stepmark.core.train_case import TrainCase
from stepmark.predict import memory
from stepmark.workload.tree import stage_of_case


def estimate(case: TrainCase) -> memory.TrainMemory:
    return memory.estimate(case, stage_of_case)


def largest_mbs(case: TrainCase, memory_bytes: int) -> int:
    """The largest micro-batch whose estimate fits; 0 if not even one sequence does."""
    return memory.largest_mbs(case, memory_bytes, stage_of_case)
