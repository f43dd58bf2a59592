"""Flags, declared once. A command's flags are the fields of the operator it measures, then the
groups below; a handler gets them as one mapping."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from stepmark.core.errors import ConfigError
from stepmark.core.ops import Op

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


MODEL = (
    Flag(name="model", kind=str, help="model name(s), config.json or model_configs.json"),
    Flag(
        name="mbs",
        kind=str,
        default="1",
        names=("--mbs", "--bsz"),
        help="micro-batch: 1, 1,2 or 1-8",
    ),
    Flag(name="tp", kind=int, default=1, help="tensor-parallel degree"),
    Flag(name="ep", kind=int, default=1, help="expert-parallel degree"),
    Flag(name="dp_shard", kind=int, default=1, help="FSDP shards"),
    Flag(name="seq_len", kind=int, help="sequence length instead of the model's"),
)
SELECT = (
    Flag(name="scale", kind=str, help="1/64: scaled-down shapes; tiny: a tiny model"),
    Flag(name="backend", kind=str, help="backend(s), comma-separated; default all that run"),
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
MEASURE = (
    DEVICE,
    Flag(name="nproc", kind=str, default="1", help="devices measured at once: a number or all"),
    Flag(
        name="clock",
        kind=str,
        default="auto",
        help="auto, event-rotate, event-flush, event-hot, graph-rotate",
    ),
    Flag(name="rate", kind=str, default="sustained", help="sustained or burst"),
    BUDGET,
    Flag(name="timeout", kind=str, help="a case that takes longer has failed [600s]"),
    *OUTPUT,
    Flag(name="style", kind=str, help="primus or param: that tool's columns"),
)


def of_operator(kind: type[Op]) -> tuple[Flag, ...]:
    """A flag for every field. Text, so that 128,256 sweeps and a+b packs a list."""
    flags = []
    for field in dataclasses.fields(kind):
        text = field.metadata["help"]
        if allowed := field.metadata.get("allowed"):
            text += f": {', '.join(allowed)}"
        if isinstance(field.default, bool):
            name = field.name.replace("_", "-")
            flags.append(
                Flag(name=field.name, kind=bool, names=(f"--{name}/--no-{name}",), help=text)
            )
        elif field.name == "phase":
            flags.append(Flag(name="phase", kind=str, names=("--pass",), help=text))
        else:
            flags.append(Flag(name=field.name, kind=str, help=text))
    return tuple(flags)


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
