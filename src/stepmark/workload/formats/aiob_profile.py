"""A workload's times of computation as AIOB's profile, which AICB and SimAI take.

Of each part of the model the mean of its forward operators over all layers and stages. aiob.py
reads such a file, and --compute-from takes it.
"""

from collections import defaultdict
from collections.abc import Iterator

from stepmark.core.errors import ConfigError
from stepmark.core.ops import Phase
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.durations import is_wait, section_of
from stepmark.workload.formats import aiob


def write(workload: Workload) -> Iterator[str]:
    """Raises ConfigError where no operator that AIOB has a part for has a time."""
    found = _parts(workload)
    if not found:
        allowed = "times of computation, which the profile is of"
        raise ConfigError("compute-from", "missing", allowed)
    yield from aiob.write(aiob.Profile(parts=found, iterations=1))


def lost(workload: Workload) -> list[str]:
    """What stands in no part."""
    left_out = dict.fromkeys(
        item.module
        for stage in range(len(workload.stages))
        for item in workload.tally(stage)
        if isinstance(item, ComputeOp) and not is_wait(item) and not section_of(item.module)
    )
    found = ["all but the time of the forward pass: shapes, types, communication, order"]
    return found + [f"left out: {module}: AIOB has no part for it" for module in left_out]


def _parts(workload: Workload) -> dict[str, aiob.Part]:
    """By section, in the order of first use: the mean over calls."""
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for stage in range(len(workload.stages)):
        for item, times in workload.tally(stage).items():
            if not isinstance(item, ComputeOp) or item.phase is not Phase.FWD:
                continue
            section = section_of(item.module)
            if section and item.time_s is not None and not item.recompute:
                spent[section] += times * item.time_s
                calls[section] += times
    means = {name: total / calls[name] for name, total in spent.items()}
    return {name: aiob.Part(max_s=mean, min_s=mean, avg_s=mean) for name, mean in means.items()}
