"""Flags, declared once; a handler gets them as one mapping."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from stepmark.core.errors import ConfigError

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option, or a positional argument. `kind` is a type that typer reads."""

    name: str
    kind: Any
    help: str
    default: Any = None
    names: tuple[str, ...] = ()
    argument: bool = False
    metavar: str | None = None  # of the value, where `kind` does not tell what it is

    def parameter(self) -> inspect.Parameter:
        names = self.names or ("--" + self.name.replace("_", "-"),)
        declared = (
            typer.Argument(help=self.help)
            if self.argument
            else typer.Option(*names, help=self.help, metavar=self.metavar)
        )
        hint: Any = (
            self.kind if self.kind is bool and self.default is not None else (self.kind | None)
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[hint, declared],
        )


OUTPUT = (
    Flag(name="out", kind=str, help="folder for run directories [runs]"),
    Flag(
        name="resume", kind=str, help="go on with this run: skip measured cases, retry failed"
    ),
    Flag(
        name="force",
        kind=bool,
        default=False,
        names=("--force",),
        help="resume although the environment differs",
    ),
    Flag(name="json", kind=str, help="rows as JSON; - = stdout"),
    Flag(
        name="csv",
        kind=str,
        help="rows as CSV; - = stdout; a folder: a file per model or collective",
    ),
    Flag(
        name="dry_run",
        kind=bool,
        default=False,
        names=("--dry-run",),
        help="list the cases, run none",
    ),
)
DEVICE = Flag(name="device", kind=str, help="cuda or cpu; default cuda where there is one")
BUDGET = Flag(name="budget", kind=str, help="time for all cases together, e.g. 60s")


def as_command(
    handler: Callable[[dict[str, Any]], None], doc: str, *groups: tuple[Flag, ...]
) -> Any:
    """A function that typer reads flags from and that hands them to `handler` as a dict."""
    flags: dict[str, Flag] = {}
    for group in groups:
        for flag in group:
            flags.setdefault(flag.name, flag)

    def command(**values: Any) -> None:
        handler(values)

    parameters = [flag.parameter() for flag in flags.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = doc
    return command


def as_arguments(words: Iterable[str], values: Values, *groups: tuple[Flag, ...]) -> list[str]:
    """The command line that gives these values: words first, then flags."""
    found = list(words)
    for flag in (flag for group in groups for flag in group if not flag.argument):
        value = values.get(flag.name)
        if value is None or (value is False and flag.default is False):
            continue
        on, _, off = (flag.names or ("--" + flag.name.replace("_", "-"),))[0].partition("/")
        if isinstance(value, bool):
            found.append(on if value else off)
            continue
        # Exactly: ranks plan from these words what their parent planned from the values.
        shown = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
        found += [on, shown]
    return found


def whole_numbers(text: str, field: str) -> list[int]:
    """'1,2' or '1-8'. Raises ConfigError."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 40:
            raise ConfigError(field, text, "whole numbers such as 1, 1,2 or 1-8")
        last = int(high) if dash else int(low)
        if not 1 <= int(low) <= last <= 2**20 or last - int(low) > 4096:
            raise ConfigError(field, text, "a rising range from 1")
        numbers += range(int(low), last + 1)
    return numbers


def words(text: str | None) -> list[str]:
    """A comma-separated list; nothing for None."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []
