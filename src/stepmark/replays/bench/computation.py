"""Calls that stand for the computation of a replay."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch

from stepmark.cases.replay_case import Compute
from stepmark.model.ops import FAMILY_OF, Op
from stepmark.model.ops.backends import Capabilities
from stepmark.operators.bench import IMPLS
from stepmark.replays.replay_compute import ReplayCompute, backend_of, parts_of, replay_compute
from stepmark.step.rank_program import Step
from stepmark.step.workload import ComputeOp

Action = Callable[[], Any]
_KERNELS = 50  # back to back, of which the time of a spinning kernel is known
_CYCLES = (2_000, 200_000)
_HEAD_START = 4_000_000  # cycles, some 2 ms, in which the host enqueues them


class Computation:
    """What each computation of a program runs. Operators of one shape share their operands."""

    def __init__(
        self,
        steps: Iterable[Step],
        compute: Compute,
        device: torch.device,
        capabilities: Capabilities,
    ) -> None:
        self._compute = compute
        self._capabilities = capabilities
        self._operators: dict[Op, Action] = {
            op: _impl(op, capabilities).make(op, device).run
            for op in operators_of(steps, compute, capabilities)
        }
        self._cycles: tuple[float, float] | None = None
        self.event_s = 0.0  # that two events around an operation add to its time
        if device.type == "cuda" and compute is not Compute.NONE:
            self._cycles, self.event_s = _calibrated(device)

    def busy_s(self, step: Step) -> float | None:
        """Return for how long a step is busy where no operator runs; None: it is not."""
        replacement = self._replacement(step)
        return replacement if isinstance(replacement, float) and replacement > 0 else None

    def action(self, step: Step) -> Action | None:
        """Return what runs for a step; None for nothing."""
        replacement = self._replacement(step)
        if replacement is None:
            return None
        if isinstance(replacement, float):
            return self.busy(replacement) if replacement > 0 else None
        op, times = parts_of(replacement)
        action = self._operators[op]
        return action if times == 1 else partial(_repeat, action, times)

    def busy(self, seconds: float) -> Action:
        """Return what keeps the device (on a CPU the rank) busy."""
        if self._cycles is None:
            return partial(time.sleep, seconds)
        fixed_s, per_cycle_s = self._cycles
        return partial(torch.cuda._sleep, max(1, round((seconds - fixed_s) / per_cycle_s)))

    def _replacement(self, step: Step) -> ReplayCompute:
        if not isinstance(step.op, ComputeOp):
            return None
        return replay_compute(step.op, self._compute, self._capabilities)


def operators_of(
    steps: Iterable[Step], compute: Compute, capabilities: Capabilities
) -> dict[Op, None]:
    """Return the distinct operators that run, of large ones a part."""
    ops = dict.fromkeys(step.op for step in steps if isinstance(step.op, ComputeOp))
    replacements = (replay_compute(op, compute, capabilities) for op in ops)
    whole = (op for op in replacements if op is not None and not isinstance(op, float))
    return dict.fromkeys(parts_of(op)[0] for op in whole)


def _repeat(action: Action, times: int) -> None:
    for _ in range(times):
        action()


def needed_bytes(steps: Iterable[Step], compute: Compute, capabilities: Capabilities) -> int:
    """Return the memory of the operators' operands and results."""
    return sum(
        op.memory_bytes + _impl(op, capabilities).extra_bytes(op)
        for op in operators_of(steps, compute, capabilities)
    )


def _impl(op: Op, capabilities: Capabilities) -> Any:
    return IMPLS[FAMILY_OF[type(op)]][backend_of(op, capabilities)]


def _calibrated(device: torch.device) -> tuple[tuple[float, float], float]:
    """Return the seconds of a spinning kernel without cycles and per cycle; what events add.

    Kernels are back to back, so that the pause between two of them counts.
    """
    torch.cuda._sleep(_CYCLES[1])  # the first call loads the kernel
    short_s, long_s = (_kernels_s(device, cycles, is_timed=False) for cycles in _CYCLES)
    per_cycle_s = (long_s - short_s) / (_CYCLES[1] - _CYCLES[0])
    fixed_s = max(0.0, short_s - per_cycle_s * _CYCLES[0])
    event_s = max(0.0, _kernels_s(device, _CYCLES[0], is_timed=True) - short_s)
    return (fixed_s, per_cycle_s), event_s


def _kernels_s(device: torch.device, cycles: int, *, is_timed: bool) -> float:
    """Return the seconds of one of many kernels in a row; is_timed: each between two events."""
    count = _KERNELS if is_timed else 1
    pairs = [
        tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)
    ]
    torch.cuda._sleep(_HEAD_START)
    for begin, end in pairs:
        begin.record()
        for _ in range(_KERNELS // count):
            torch.cuda._sleep(cycles)
        end.record()
    torch.cuda.synchronize(device)
    times = [begin.elapsed_time(end) for begin, end in pairs]
    return float(median(times)) * 1e-3 * count / _KERNELS
