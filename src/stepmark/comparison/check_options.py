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
    current: str | None = flag(
        "judge this run, measured before; commas join its launches",
        names="run",
    )
    budget: Duration | None = flag("time in all [10m]")
    launches: Annotated[int, between(2, 100)] | None = flag("times each case is measured [5]")
    floor: Annotated[float, between(0.0, 1.0)] = flag(
        "slowdown that is still accepted", default=0.03
    )

    @property
    def budget_s(self) -> float:
        return self.budget or 600.0

    @property
    def num_launches(self) -> int:
        return self.launches or 5
