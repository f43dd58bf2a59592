"""Groups of options that several verbs share."""

from dataclasses import dataclass

from stepmark.core.errors import ConfigError
from stepmark.core.options import Duration, flag, group


@group
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


@group
class RunFolder:
    """Run."""

    out: str | None = flag("folder for run directories [runs]", metavar="DIR")
    dry_run: bool = flag("list the cases, run none", "--dry-run", default=False)


@group
class Output(RunFolder, Files):
    """Run."""

    resume: str | None = flag("go on with this run: skip measured cases, retry failed")
    force: bool = flag("resume although the environment differs", "--force", default=False)


@group
class Device:
    """Device."""

    device: str | None = flag(
        "cuda or cpu, or for --dry-run the name of any device [cuda where there is one]"
    )


@group
class Budget:
    """Time limits."""

    budget: Duration | None = flag("time for all cases together, e.g. 60s")


@group
class TimeLimits(Budget):
    """Time limits."""

    timeout: Duration | None = flag(
        "a case that takes longer has failed [600s; comm 60s]", "--timeout", "-T"
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(Output, TimeLimits, Device):
    """Options of every verb that measures."""
