"""Options of `stepmark watch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.ground.option_groups import OUT, Files, Ranks
from stepmark.ground.options import between, flag, group


@group
class WatchedSteps:
    """Steps."""

    warmup: Annotated[int, between(1, 2**31)] = flag(
        "optimizer steps before the first that is timed", default=10
    )
    steps: Annotated[int, between(1, 1000)] = flag("steps to profile", default=3)
    ranks: Ranks | None = flag("ranks to profile, e.g. 0,1 [the first 8]")
    no_shapes: bool = flag("profile without the shapes of operands", default=False, rare=True)
    nccl_subsys: str = flag(
        "parts of NCCL that log; COLL writes a line per call, all job long",
        default="INIT,ENV,NET,GRAPH,COLL",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(WatchedSteps, Files):
    """stepmark watch."""

    out: Path = flag("folder of runs", *OUT, default=Path("runs"), metavar="DIR")
    words: tuple[str, ...] = flag(
        "-- and the job's command: -- torchrun --nproc-per-node 8 train.py",
        default=(),
        argument=True,
        metavar="COMMAND",
    )
