"""Times of computation for a workload: from a run, a profile, a roofline, or fixed.

It is imported only when times are added, because most workloads have none.
"""

import sys
from pathlib import Path

from stepmark.app import view
from stepmark.app.workload_files import AICB_FILLER
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.durations import Fixed, Measured, Named, Profile, fill, parse_source
from stepmark.workload.formats import aiob


def timed(workload: Workload, source: str) -> Workload:
    """Add times of computation from the comma-separated sources, in this order.

    Raises ConfigError naming the operations that are left without a time.
    """
    parsed = [parse_source(word) for word in source.split(",")]
    sources = [_opened(item.text) if isinstance(item, Named) else item for item in parsed]
    return fill(workload, *sources)


def timed_as_aicb(workload: Workload, profile: str) -> Workload:
    """Add times of an AIOB profile; other operations take AICB's filler and are printed."""
    filler = parse_source(AICB_FILLER)
    assert isinstance(filler, Fixed)
    result = fill(workload, _opened(profile), filler)
    filled = {
        item.module: None
        for block in result.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and item.time_s == filler.time_s
    }
    if filled:
        name = Path(profile).name
        remark = f"{AICB_FILLER} each, AICB's filler, for what {name} does not time"
        sys.stderr.write(f"# {remark}: {', '.join(filled)}\n")
    return result


def _opened(text: str) -> Measured | Profile:
    """Open a profile of AIOB, or a run of stepmark."""
    path = Path(text)
    if path.is_file():
        # AICB uses the mean over iterations, too.
        sections = {name: part.avg_s for name, part in aiob.read(path).parts.items()}
        return Profile(sections=sections, name=f"AIOB profile {path.name}")
    name, times = view.operator_medians(Path("runs"), text)
    return Measured(times=times, name=f"run {name}")
