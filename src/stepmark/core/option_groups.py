"""Groups of options that several verbs share."""

from stepmark.core.errors import ConfigError
from stepmark.core.options import flag, group


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
