"""Times of computation for a workload: from a run, a profile, a roofline, or fixed.

Few workloads are given any, so this is imported where one is.
"""

import sys
from pathlib import Path

from stepmark.app import view
from stepmark.app.workload_files import AICB_FILLER
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.durations import Fixed, Measured, Named, Profile, fill, parse_source
from stepmark.workload.formats import aiob


def timed(workload: Workload, source: str) -> Workload:
    """With times of computation from --compute-from: several, comma-separated, in this order.

    Raises ConfigError, naming them, where operations are left without a time.
    """
    found = [parse_source(word) for word in source.split(",")]
    opened = [_opened(one.text) if isinstance(one, Named) else one for one in found]
    return fill(workload, *opened)


def timed_as_aicb(workload: Workload, profile: str) -> Workload:
    """With times of an AIOB profile. What it does not time takes AICB's filler, named."""
    filler = parse_source(AICB_FILLER)
    assert isinstance(filler, Fixed)
    found = fill(workload, _opened(profile), filler)
    filled = {
        item.module: None
        for block in found.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and item.time_s == filler.time_s
    }
    if filled:
        remark = (
            f"{AICB_FILLER} each, AICB's filler, for what {Path(profile).name} does not time"
        )
        sys.stderr.write(f"# {remark}: {', '.join(filled)}\n")
    return found


def _opened(text: str) -> Measured | Profile:
    """A profile of AIOB, or a run of stepmark."""
    path = Path(text)
    if path.is_file():
        # AICB takes the mean over iterations, too.
        sections = {name: part.avg_s for name, part in aiob.read(path).parts.items()}
        return Profile(sections=sections, name=f"AIOB profile {path.name}")
    return _of_run(text)


def _of_run(text: str) -> Measured:
    name, times = view.operator_medians(Path("runs"), text)
    return Measured(times=times, name=f"run {name}")
