"""The options of verbs that measure nothing of their own, and groups that verbs share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.core.errors import ConfigError
from stepmark.core.options import REQUIRED, Duration, between, flag

_RUN = "run id or its beginning, a path, or latest"


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files."""

    json: str | None = flag("rows as JSON; - = stdout, DIR/ = a file in it", metavar="PATH")
    csv: str | None = flag("rows as CSV; - = stdout, DIR/ = a file in it", metavar="PATH")

    @property
    def to_stdout(self) -> bool:
        """Whether stdout is one of the files, so that nothing else may be printed there."""
        return "-" in (self.json, self.csv)

    def check_stdout(self) -> None:
        """Refuse two outputs on stdout. Raises ConfigError."""
        if self.json == self.csv == "-":
            raise ConfigError("csv", "-", "a path: stdout is already taken by --json")


@dataclass(frozen=True, kw_only=True)
class RunsFolder:
    """Runs."""

    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class RunName(RunsFolder):
    """Runs."""

    run: str = flag(_RUN, default="latest", argument=True, metavar="ID")


@dataclass(frozen=True, kw_only=True)
class ListOptions(Files, RunsFolder):
    """stepmark runs list."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Files, RunName):
    """stepmark runs show."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RunsFolder):
    """Export."""

    run: str = flag(_RUN, default=REQUIRED, argument=True, metavar="ID")
    path: str = flag(
        "file, or folder of a tracker", default=REQUIRED, argument=True, metavar="PATH"
    )
    to: str = flag(
        "csv json parquet tensorboard wandb mlflow", default=REQUIRED, metavar="KIND"
    )


@dataclass(frozen=True, kw_only=True)
class SqlOptions(Files, RunsFolder):
    """Query."""

    query: str = flag(
        "over views records and runs", default=REQUIRED, argument=True, metavar="QUERY"
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions(RunName):
    """Page."""

    out: Path | None = flag("file to write [RUN/report.html]")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Files):
    """stepmark doctor."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Files, RunsFolder):
    """Check."""

    baseline: str = flag("run id or path of the reference", default=REQUIRED)
    budget: Duration = flag("time in all", default=600.0)
    launches: Annotated[int, between(2, 100)] = flag("times each case is measured", default=5)
    floor: Annotated[float, between(0.0, 1.0)] = flag(
        "slowdown that is still accepted", default=0.03
    )
