"""The command line: the verbs, and the exit code and message of each error."""

import errno
import io
import os
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

import typer

from stepmark import __version__
from stepmark.cli.flags import group, verb
from stepmark.cli.verbs import TOPICS, VERBS
from stepmark.ground import outer_launcher, signals
from stepmark.ground.errors import ConfigError, StepmarkError, nearest
from stepmark.ground.options import load

COMPLETE = "_STEPMARK_COMPLETE"  # set by the scripts of shells, see completion.py
_SIGNAL_S = 0.5  # in which a launcher signals all ranks


_DOC = "How fast should this model train, how fast does it, and where does the time go?"
_FIRST_SCREEN = f"""\
stepmark {__version__}: {_DOC[0].lower()}{_DOC[1:]}

Start with:
  stepmark run                              predict a training step, measure it, explain it
  stepmark doctor                           what this machine is, and what would run on it
  stepmark comm all_reduce                  a collective by message size, as nccl-tests does
  stepmark op gemm --model llama-3.1-8b     the matrix products of a model, one by one
  stepmark predict llama-3.1-70b --nproc 1024 --tp 8 --device h200
                                            step time and memory without any GPU

Read more:
  stepmark --help                           all verbs, by topic
  stepmark VERB --help                      the options of a verb, with examples
  stepmark completion bash                  completion for bash, zsh or fish
"""


def command(name: str, arguments: list[str]) -> Any:
    """Return the command of a verb, or its group of commands."""
    entry = VERBS[name]
    if entry.options:
        return verb(load(entry.options), entry.handler, entry.doc, *entry.examples)
    handler = load(entry.handler)
    return handler if isinstance(handler, typer.Typer) else handler(arguments)


def app() -> Any:
    """Return the program with all its verbs."""
    verbs = {name: (entry.help, partial(command, name)) for name, entry in VERBS.items()}
    program = group(_DOC, verbs, TOPICS)
    program.callback()(_options)
    return program


def _version(is_given: bool) -> None:
    if is_given:
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
    if sys.argv[1:2] == ["doctor"]:  # each host by itself
        os.environ.pop(outer_launcher.HOSTS, None)
    code = _job_status() if outer_launcher.is_agent() else status(sys.argv[1:])
    if outer_launcher.is_rank():
        if code in (130, 143):  # other ranks must get the signal before they miss this one
            time.sleep(_SIGNAL_S)
        # The launcher would see a failed rank where a thread of torch aborts the teardown.
        with suppress(OSError, ConfigError):  # already complained about
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _job_status() -> int:
    """Run the command line as the leading agent of a job, or serve its leader."""
    try:
        job = load("stepmark.measuring.job:current")()
        if not job.leads:
            code: int = load("stepmark.measuring.agent:serve")(job)
            return code
        leader = load("stepmark.measuring.leader:leader")()
    except StepmarkError as error:
        return _complain(str(error), error.exit_code)
    code = 1
    try:
        code = status(sys.argv[1:])
    finally:
        if leader is not None:
            leader.end(code)
    return code


class _Stdout(io.FileIO):
    """Standard output whose failure (a full disk, a closed descriptor) is a ConfigError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # status() handles it
            raise
        except OSError as error:
            # The interpreter flushes at exit: what is left is discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise ConfigError(
                "output", "stdout", f"one that can be written ({reason})"
            ) from None


def checked_stdout() -> None:
    """Make a failure to write standard output a ConfigError."""
    stream: TextIO | None = sys.stdout
    if stream is None:  # closed by the caller; no other file may get its number
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
    encoding = stream.encoding if stream else None
    is_utf8 = (encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=encoding,
        # A terminal without a character shows ?, and the table stays in line.
        errors=stream.errors if stream and is_utf8 else "replace",
        line_buffering=bool(stream and stream.line_buffering),
    )


def status(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
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
        # The reader of our output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except typer.BadParameter.__mro__[2] as error:  # type: ignore[misc]
        # typer's own usage errors; their class is not public under a stable name.
        return _usage(error)
    return code


def _code(arguments: list[str]) -> int:
    try:
        if COMPLETE in os.environ:
            code: int = load("stepmark.cli.completion:answer")()
            return code
        if not arguments:
            sys.stdout.write(_FIRST_SCREEN)
            return 0
        result: Any = app()(arguments, prog_name="stepmark", standalone_mode=False)
    except typer.Exit as stop:
        code = int(stop.exit_code)
        swallowed = isinstance(stop.__context__, KeyboardInterrupt)
        return _complain("interrupted", code) if swallowed else code
    return result if isinstance(result, int) else 0


def _usage(error: Any) -> int:
    """Complain about an option that does not exist, or that lacks its value or has too much."""
    option, context = error.option_name, error.ctx
    if not hasattr(error, "possibilities"):  # the option exists
        values = "without" if "does not take" in error.message else "with"
        return _complain(str(ConfigError(option, "given", f"given {values} a value")), 2)
    parameters = context.command.params
    words = [word for each in parameters for word in (*each.opts, *each.secondary_opts)]
    near = nearest(option, words)
    rule = f"did you mean {near[0]}?" if near else "one of the options of this command"
    page = "--help-all" if "--help-all" in words else "--help"
    text = f"{ConfigError(option, 'given', rule)} See {context.command_path} {page}."
    return _complain(text, 2)


def _complain(text: str, code: int) -> int:
    if outer_launcher.is_first():  # every rank raises the same error
        sys.stderr.write(f"stepmark: {text}\n")
    return code
