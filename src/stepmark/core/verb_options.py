"""The options of verbs that measure nothing of their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.core.option_groups import Files
from stepmark.core.options import REQUIRED, Duration, Share, between, flag, group, words_of

_RUN = "run id or its beginning, a path, or latest"


@group
class RunsFolder:
    """Runs."""

    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")


@group
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


@group
class Settings:
    """Settings to compare."""

    env: tuple[str, ...] = flag(
        r"NAME=A,B: values of a variable; none (NAME=,B): unset; \, is a comma", default=()
    )
    flags: tuple[str, ...] = flag(
        "NAME=A,B: values of the command's flag --NAME", "--set", default=()
    )
    no_default: bool = flag(
        "without the setting in which nothing is set", "--no-default", default=False
    )
    baseline: str | None = flag("setting to compare with [default, or the first]")


@group
class Rounds:
    """Rounds."""

    repeats: Annotated[int, between(1, 1000)] | None = flag(
        "rounds: each measures every setting once [5]"
    )
    order: Annotated[str, words_of("interleaved", "fixed")] | None = flag(
        "interleaved (a new order each round) or fixed [interleaved]"
    )
    seed: int | None = flag("of the orders [random; it is kept]")
    timeout: Duration | None = flag("a setting that takes longer is left out [10m]")
    budget: Duration | None = flag("no further round that would end after this")
    out: Path = flag("folder of sweeps", default=Path("sweeps"))
    resume: str | None = flag("go on with this sweep: what is missing, more rounds")
    force: bool = flag(
        "more than 64 settings; overwrite the tuner file", "--force", default=False
    )
    dry_run: bool = flag("list the commands, run none", "--dry-run", default=False)


@group
class Recommendation:
    """Recommendation."""

    min_gain: Share = flag("smaller gains are not recommended", default=0.01)
    emit_tuner: Path | None = flag("comm: write this file for NCCL's tuner plugin")
    tuner_plugin: str | None = flag("plugin to verify the tuner file with [NCCL_TUNER_PLUGIN]")
    html: str | None = flag("a page with the curves and ratios", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Settings, Rounds, Recommendation, Files):
    """stepmark sweep."""

    words: tuple[str, ...] = flag(
        "-- and a command that measures: -- comm all_reduce -b 1K -e 1G",
        default=(),
        argument=True,
        metavar="COMMAND",
    )
