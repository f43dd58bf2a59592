"""The command line: verbs, and how an error ends a process."""

import errno
import importlib
import io
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

import typer

from stepmark import __version__
from stepmark.cli.flags import Command, Group
from stepmark.core.errors import ConfigError, StepmarkError
from stepmark.launch import outer_launcher, signals


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives and what `stepmark --help` says of it."""

    module: str
    name: str
    help: str


VERBS = {
    "run": Verb("run", "run", "The main job: operators, collectives, summary and HTML report."),
    "doctor": Verb("doctor", "command", "Show devices, peaks, health and what would run."),
    "check": Verb("check", "command", "Measure a reference run's cases again; is any slower?"),
    "compare": Verb("compare", "command", "Runs, nccl-tests files, CSVs: ratios and verdicts."),
    "report": Verb("report", "command", "Write report.html of a run."),
    "comm": Verb("comm", "command", "Measure collectives: nccl-tests' flags, no MPI."),
    "train": Verb("train", "command", "Measure training steps: single, DDP, FSDP, TP, PP."),
    "resume": Verb("resume", "command", "Measure what is left of a run that was cut short."),
    "op": Verb("op", "app", "Measure operators: one family, or all of a model's layer."),
    "workload": Verb("workload", "app", "What a step does: generate, show, convert, capture."),
    "runs": Verb("runs", "app", "List, show, export and query earlier runs."),
    "sweep": Verb("sweep", "command", "The same command under several settings, compared."),
    "logs": Verb(
        "logs", "command", "Read NCCL logs, flight-recorder dumps, tables of results."
    ),
}


def app(arguments: list[str]) -> typer.Typer:
    """The program with all verbs by name, and the flags of the one that is asked for.

    Every other verb's module stays unread: together they take longer than the answer may.
    """
    made = typer.Typer(
        name="stepmark",
        cls=Group,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help="How fast should this model train, how fast does it, and where does the time go?",
    )
    made.callback()(_options)
    asked = next((word for word in arguments if not word.startswith("-")), "")
    for name, verb in VERBS.items():
        if name != asked:
            made.command(name, help=verb.help)(_unread)
            continue
        found = getattr(importlib.import_module(f"stepmark.cli.{verb.module}"), verb.name)
        if name == "op":
            found = found(arguments)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name)
        else:
            made.command(name, cls=getattr(found, "command_class", Command))(found)
    return made


def _unread() -> None:
    raise AssertionError("a verb that is asked for is read")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stepmark {__version__}")
        raise typer.Exit(0)


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run a verb; bad input is one line on stderr and exit code 2, never a traceback."""
    signals.watch()
    checked_stdout()
    sys.exit(status(sys.argv[1:]))


class _Stdout(io.FileIO):
    """Standard output whose failure (a full disk, a closed descriptor) is one sentence."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # status() ends quietly
            raise
        except OSError as error:
            # The rest has nowhere to go, and the interpreter flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise ConfigError(
                "output", "stdout", f"one that can be written ({reason})"
            ) from None


def checked_stdout() -> None:
    """Let every verb report once, in one sentence, that its output cannot be written."""
    found: TextIO | None = sys.stdout
    if found is None:  # closed by the caller; no other file may get its number
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=found.encoding if found else None,
        errors=found.errors if found else None,
        line_buffering=bool(found and found.line_buffering),
    )


def status(arguments: list[str]) -> int:
    """The exit code of a command line."""
    try:
        code = _code(arguments)
        sys.stdout.flush()
    except StepmarkError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except (BrokenPipeError, SystemExit) as stop:
        # typer turns a broken pipe into SystemExit(1), which would be a failed check.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        # The reader of our output went away; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except typer.BadParameter.__mro__[2] as error:  # type: ignore[misc]
        # typer's own usage errors; their class is not public under a stable name.
        return _usage(error)
    return code


def _code(arguments: list[str]) -> int:
    try:
        result: Any = app(arguments)(arguments, standalone_mode=False)
    except typer.Exit as stop:
        code = int(stop.exit_code)
        swallowed = isinstance(stop.__context__, KeyboardInterrupt)
        return _complain("interrupted", code) if swallowed else code
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context is not None else ""
    return _complain(error.format_message().replace("\n", " ") + where, 2)


def _complain(text: str, code: int) -> int:
    if outer_launcher.is_first():  # what every rank refuses is said once
        sys.stderr.write(f"stepmark: {text}\n")
    return code
