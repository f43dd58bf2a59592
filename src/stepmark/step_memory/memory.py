"""Device memory of a training step: estimated, corrected by measured cases, and judged.

The estimate replays the step's tensors through torch's allocator, so that blocks that are
larger than their tensors and segments that stay reserved count. It leaves out the CUDA context,
kernels and NCCL's buffers, for which a verdict allows. Experts over ranks are estimated with
balanced routing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Fp8, Recompute
from stepmark.ground.units import GIB
from stepmark.step.tree import stage_of_case
from stepmark.step_memory.rank_memory import RankMemory
from stepmark.step_memory.step_memory import StepMemory

_TOO_MANY = 2**24  # sequences
_PURPOSES = ("weights", "gradients", "optimizer", "gathered", "activations", "working", "head")
# Errors of allocated and reserved bytes, as shares of the estimate: a little more than the
# largest ones on one to four H200s with torch 2.11, 0.005 and 0.089
# (tests/step_memory/test_memory_measured.py).
_ERRORS = 0.01, 0.09
# Routing decides how many rows the fullest rank of experts gets, and sizes differ in each step.
_ERRORS_OF_EXPERTS = 0.11, 0.55
# Of all others; of tensor parallelism on two H200s reserved bytes were 0.13 above the estimate,
# and of two layers with FSDP on four H100s both 0.2 and 0.28.
_ERRORS_NOT_MEASURED = 0.1, 0.2
# Context, kernels and NCCL's buffers, which torch does not allocate: an assumption.
_LEAST_OUTSIDE = GIB // 4
_MOST_OUTSIDE = GIB
_MOST_OUTSIDE_OF_RANKS = 3 * GIB

Verdict = Literal["fits", "close", "does not fit"]
FITS: Verdict = "fits"
CLOSE: Verdict = "close"
NO_FIT: Verdict = "does not fit"


def estimate(case: TrainCase) -> RankMemory:
    """Return the memory of the fullest rank."""
    return max(stage_estimates(case), key=lambda memory: memory.allocated_bytes)


@lru_cache(maxsize=64)  # options that fit are looked for among few cases
def stage_estimates(case: TrainCase) -> tuple[RankMemory, ...]:
    """Return that of a rank of the first stage, the last, and the one with most layers."""
    estimates = []
    pp = case.parallel.pp
    by_stage = [len(layers) for layers in case.stage_layers]
    sizes = [sum(by_stage[stage] for stage in case.stages_of(rank)) for rank in range(pp)]
    for stage in sorted({0, sizes.index(max(sizes)), pp - 1}):
        step = StepMemory(case, stage, stage_of_case(case, stage))
        step.steps(1)
        heap = step.heap
        heap.reset_peaks()  # as training/loop.py does after the first sample
        step.steps(1)
        memory = RankMemory(
            stage=stage,
            **{f"{purpose}_bytes": heap.at_peak[purpose] for purpose in _PURPOSES},
            rounding_bytes=heap.peak_allocated - heap.at_peak.total(),
            reserved_bytes=heap.peak_reserved,
            resting_bytes=heap.allocated,
        )
        estimates.append(memory)
    return tuple(estimates)


def calibrated(
    case: TrainCase, measured: Sequence[tuple[TrainCase, int, int]] = ()
) -> tuple[int, int]:
    """Return allocated and reserved bytes, corrected by those of measured cases.

    measured: the same training with fewer layers, with its allocated and reserved bytes. What
    the estimate misses of the deepest one is added; a slope through two depths would multiply
    noise by the number of layers. Where nothing was measured, it is the estimate.
    """
    memory = estimate(case)
    if not measured:
        return memory.allocated_bytes, memory.reserved_bytes
    known, allocated, reserved = max(measured, key=lambda item: item[0].model.num_layers)
    base = estimate(known)
    allocated += memory.allocated_bytes - base.allocated_bytes
    reserved += memory.reserved_bytes - base.reserved_bytes
    return allocated, max(allocated, reserved)


def verdict(case: TrainCase, allocated: int, reserved: int, device_bytes: int) -> Verdict:
    """Return whether predicted bytes fit on a device, "close" within the measured errors.

    Segments that are reserved and not allocated can be given back, so a step surely runs out of
    memory only by what it allocates; it surely fits only if what it reserves does.
    """
    allocated_error, reserved_error = _errors(case)
    outside = _MOST_OUTSIDE if case.num_ranks == 1 else _MOST_OUTSIDE_OF_RANKS
    if reserved * (1 + reserved_error) + outside <= device_bytes:
        return FITS
    if allocated * (1 - allocated_error) + _LEAST_OUTSIDE > device_bytes:
        return NO_FIT
    return CLOSE


def _errors(case: TrainCase) -> tuple[float, float]:
    if case.parallel.ep > 1:
        return _ERRORS_OF_EXPERTS
    is_measured = (
        case.parallel.tp == case.parallel.pp == case.loss_chunks == 1
        and case.recompute is not Recompute.OPS
        and case.fp8 in (Fp8.NONE, Fp8.TENSORWISE)
        and not (case.cuda_graph or case.compiles_graphs)
    )
    return _ERRORS if is_measured else _ERRORS_NOT_MEASURED


def largest_mbs(case: TrainCase, device_bytes: int) -> int:
    """Return the largest micro-batch that fits by verdict; 0 if not even one sequence does."""
    parts = case.num_microbatches

    def fits(mbs: int) -> bool:
        # A pipeline's microbatches are rounded up, so that several mbs are one case.
        other = replace(case, mbs=-(-mbs // parts) * parts)
        return verdict(other, *calibrated(other), device_bytes) == FITS

    low = 0
    high = 1
    while high < _TOO_MANY and fits(high):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
