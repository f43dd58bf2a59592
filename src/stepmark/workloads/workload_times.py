"""Times of computation for a workload: from a run, a profile, a roofline, or fixed.

It is imported only when times are added, because most workloads have none.
"""

import sys
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.stats import summarize
from stepmark.model.ops import Op
from stepmark.step.workload import ComputeOp, Workload
from stepmark.store import view
from stepmark.store.reader import find_run
from stepmark.workloads.durations import (
    FIELD,
    Fixed,
    Measured,
    Named,
    Own,
    Profile,
    Source,
    fill,
    parse_source,
)
from stepmark.workloads.formats import aiob
from stepmark.workloads.workload_files import AICB_FILLER

RUNS = Path("runs")
_FILLER = Fixed(time_s=1e-9)  # AICB_FILLER


def timed(workload: Workload, source: str) -> Workload:
    """Add times of computation from the comma-separated sources, in this order.

    Raises ConfigError naming the operations that are left without a time.
    """
    return fill(workload, *sources_of(source))


def sources_of(text: str) -> list[Source]:
    """Open the sources of --compute-from. Raises ConfigError."""
    parsed = [parse_source(word) for word in text.split(",")]
    return [_opened(item.text) if isinstance(item, Named) else item for item in parsed]


def resolved(text: str) -> str:
    """Return the sources with runs as paths, so that a new run changes nothing.

    Raises ConfigError.
    """
    words = []
    for word in text.split(","):
        source = parse_source(word)
        if isinstance(source, Named) and not Path(source.text).is_file():
            words.append(str(_run_path(source.text)))
        else:
            words.append(word)
    return ",".join(words)


def with_filler(workload: Workload) -> Workload:
    """Give AICB's filler to what has no time."""
    return fill(workload, Own(), _FILLER)


def timed_as_aicb(workload: Workload, profile: str) -> Workload:
    """Add times of an AIOB profile; other operations take AICB's filler and are printed."""
    result = fill(workload, _opened(profile, "comp-filepath"), _FILLER)
    filled = {
        item.module: None
        for block in result.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and item.time_s == _FILLER.time_s
    }
    if filled:
        name = Path(profile).name
        remark = f"{AICB_FILLER} each, AICB's filler, for what {name} does not time"
        sys.stderr.write(f"# {remark}: {', '.join(filled)}\n")
    return result


def _opened(text: str, field: str = FIELD) -> Measured | Profile:
    """Open a profile of AIOB, or a run of stepmark. Raises ConfigError with the field."""
    path = Path(text)
    if path.is_file():
        # AICB uses the mean over iterations, too.
        sections = {name: part.avg_s for name, part in aiob.read(path).parts.items()}
        return Profile(sections=sections, name=f"AIOB profile {path.name}")
    return from_run(RUNS, str(_run_path(text, field)))[0]


def _run_path(text: str, field: str = FIELD) -> Path:
    try:
        return find_run(RUNS, text)
    except ConfigError as error:
        allowed = f"a file with an AIOB profile, or a run: {error.allowed}"
        raise ConfigError(field, text, allowed) from None


def from_run(runs: Path, name: str) -> tuple[Measured, dict[Op, list[float]]]:
    """Return the medians of a run's operators, and the samples that they are of."""
    run, samples = view.operator_samples(runs, name)
    times = {op: summarize(seconds).median for op, seconds in samples.items()}
    devices = ", ".join(dict.fromkeys(d.name for d in run.info.environment.devices))
    place = f" on {devices}" if devices else ""
    return Measured(times=times, name=f"run {run.path.name}{place}"), samples
