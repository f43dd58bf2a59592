"""The options of `stepmark replay`."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.cases.replay_case import Compute, Pace, ReplayCase
from stepmark.ground.option_groups import MeasureOptions
from stepmark.ground.options import REQUIRED, between, flag, group

Count = Annotated[int, between(1, 100_000)]


@group
class WorkloadFile:
    """Workload."""

    file: str = flag(
        "workload: native, AICB, SimAI, PARAM or Chakra; - = stdin",
        default=REQUIRED,
        argument=True,
        metavar="FILE",
    )
    group_sizes: str | None = flag(
        "sizes that an AICB file lacks: ep=16,...", rare=True, metavar="AXIS=N,..."
    )
    world_size: Count | None = flag("number of ranks that a SimAI file lacks", rare=True)
    nproc: str | None = flag("ranks [as many as the file has]", "--nproc", "-g", metavar="N")
    shrink: bool = flag("run on fewer ranks than the file has: smaller groups", default=False)


@group
class Execution:
    """Execution."""

    compute: Compute = flag(
        "where the workload computes: sleep for its time, or run operators",
        default=Compute.SLEEP,
    )
    comm_only: bool = flag("the same as --compute none", default=False, rare=True)
    compute_from: str | None = flag(
        "times of computation: fixed:1ms, roofline:h200, a run, an AIOB profile [the file's]",
        metavar="SOURCE",
    )
    pace: Pace = flag(
        "original: no operation before its start in the trace", default=Pace.FREE, rare=True
    )
    blocking: bool = flag("wait for each operation, as AICB does: no overlap", default=False)
    iters: Count = flag("iterations", default=10)
    warmup: Annotated[int, between(0, 100_000)] = flag(
        "iterations before them", default=1, rare=True
    )
    passes: Count = flag("iterations after them that time each operation", default=3, rare=True)
    check: bool = flag("verify what every message brings, before them", default=False)
    alone: bool = flag("also measure its collectives alone, to compare", default=False)
    curve: str | None = flag(
        "times of collectives alone: a run, output of nccl-tests", metavar="SOURCE"
    )


@group
class ReplayFiles:
    """Files."""

    timeline: str | None = flag("the last pass of all ranks for Perfetto", metavar="PATH")
    html: str | None = flag("the same as a page, with the tables", metavar="PATH")
    aicb_log: str | None = flag(
        "rank 0's operations in AICB's columns", metavar="PATH", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(ReplayFiles, MeasureOptions, Execution, WorkloadFile):
    """stepmark replay."""

    written = (*MeasureOptions.written, "timeline", "html", "aicb_log")


def options_of(case: ReplayCase) -> ReplayOptions:
    """Return the options that replay a case alone."""
    return ReplayOptions(
        file=case.file,
        nproc=str(case.num_ranks),
        shrink=bool(case.shrunk_from),
        compute=case.compute,
        compute_from=case.compute_from or None,
        blocking=case.blocking,
        pace=case.pace,
        device=case.device,
    )
