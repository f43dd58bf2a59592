"""Options of `stepmark check`."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.ground.option_groups import Files, RunsFolder
from stepmark.ground.options import REQUIRED, Duration, between, flag


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Files, RunsFolder):
    """Check."""

    baseline: str = flag(
        "run id or path of the reference; commas join its launches",
        default=REQUIRED,
        names="run",
    )
    budget: Duration = flag("time in all", default=600.0)
    launches: Annotated[int, between(2, 100)] = flag("times each case is measured", default=5)
    floor: Annotated[float, between(0.0, 1.0)] = flag(
        "slowdown that is still accepted", default=0.03
    )
