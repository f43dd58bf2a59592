"""Steps of a trace whose durations fall in two groups, of which no mean is a step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from stepmark.ground.units import ranks_text
from stepmark.tables.columns import digits
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces.kineto.links import steps
from stepmark.traces.kineto.windows import gpu_windows

# Steps of one job vary by less, whether their batches differ or a host is noisy.
_LEAST_RATIO = 3.0
_PAUSED = "-paused-"  # in the name of a calibration's profile, half of whose steps pause


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Durations in ns of the faster and of the slower steps, by number."""

    fast: Mapping[int, int]
    slow: Mapping[int, int]

    def __str__(self) -> str:
        fast, slow = map(_group_text, (self.fast, self.slow))
        return f"The steps fall in two groups: {fast}; {slow}. Means of both are no step."


def step_windows(trace: RankTrace) -> dict[int, int]:
    """Return how long each marked step takes, in ns: on the GPU if it has events, else on the
    host. Steps that launch nothing on a GPU with events are left out.
    """
    marked = steps(trace)
    if not marked.is_marked:
        return {}
    start, end = (
        gpu_windows(trace, marked) if trace.gpu.start.size else (marked.start, marked.end)
    )
    took = np.asarray(end - start).tolist()
    return {n: time_ns for n, time_ns in zip(marked.numbers, took, strict=True) if time_ns}


def step_groups(windows: Mapping[int, int]) -> StepGroups | None:
    """Return the two groups on both sides of the largest ratio of neighbouring durations.

    None where that ratio is one that steps of one kind have.
    """
    order = sorted(windows, key=lambda number: windows[number])
    ratios = [windows[b] / windows[a] for a, b in pairwise(order)]
    if max(ratios, default=0.0) < _LEAST_RATIO:
        return None
    num_fast = 1 + ratios.index(max(ratios))
    fast, slow = (
        {number: windows[number] for number in sorted(own)}
        for own in (order[:num_fast], order[num_fast:])
    )
    return StepGroups(fast=fast, slow=slow)


def is_paused(files: Iterable[Path | str]) -> bool:
    """Return whether all of these are profiles of a calibration with pauses."""
    return all(_PAUSED in Path(file).name for file in files)


def _group_text(group: Mapping[int, int]) -> str:
    numbers = ranks_text(group).split(" ", 1)[1]
    option = f"--steps {numbers.replace(' ', '')}"
    return f"{len(group)} of {digits(median(group.values()) / 1e6)} ms ({option})"
