"""Options of `stepmark runs` and `report`."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.ground.option_groups import OUT, RUN_NAME, Files, RunsFolder
from stepmark.ground.options import REQUIRED, flag, group, text_of


@group
class RunName(RunsFolder):
    """Runs."""

    run: str = flag(RUN_NAME, default="latest", argument=True, metavar="ID", names="run")


@dataclass(frozen=True, kw_only=True)
class ListOptions(Files, RunsFolder):
    """stepmark runs list."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Files, RunName):
    """stepmark runs show."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RunsFolder):
    """Export."""

    run: str = flag(RUN_NAME, default=REQUIRED, argument=True, metavar="ID", names="run")
    path: str = flag(
        "file, or folder of a tracker", default=REQUIRED, argument=True, metavar="PATH"
    )
    to: Annotated[str, text_of("csv", "json", "parquet", "tensorboard", "wandb", "mlflow")] = (
        flag("kind of the file or tracker", default=REQUIRED, metavar="KIND")
    )


@dataclass(frozen=True, kw_only=True)
class SqlOptions(Files, RunsFolder):
    """Query."""

    query: str = flag(
        "over views records and runs", default=REQUIRED, argument=True, metavar="QUERY"
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions(RunsFolder):
    """Page."""

    run: str = flag(RUN_NAME, default="latest", argument=True, metavar="ID", names="run")
    other: str | None = flag(
        "a second run: the ledgers of both side by side",
        argument=True,
        metavar="ID2",
        names="run",
    )
    out: str | None = flag(
        "file to write, - = stdout; DIR/ = a file in it "
        "[RUN/report.html, of two RUN/report-ID2.html]",
        *OUT,
        metavar="FILE|DIR/",
    )
