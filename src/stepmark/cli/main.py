"""The command line: the verbs, and the exit code and message of each error."""

import os
import sys
import time
from contextlib import suppress
from functools import partial

from stepmark import __version__
from stepmark.cli.commands import Answered, Command, Group
from stepmark.cli.verbs import TOPICS, VERBS
from stepmark.ground import outer_launcher, signals, streams
from stepmark.ground.errors import ConfigError, StepmarkError, sentence_of
from stepmark.ground.options import load
from stepmark.ground.redaction import redact

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


def command(name: str, words: list[str]) -> Command | Group:
    """Return the command of a verb, or its group of commands."""
    entry = VERBS[name]
    command: Command | Group
    if entry.options:
        options = load(entry.options)
        command = load(entry.command)(options, entry.handler, entry.doc, *entry.examples)
    else:
        handler = load(entry.handler)
        command = handler if isinstance(handler, Group) else handler(words)
    return command


def program() -> Group:
    """Return the program with all its verbs."""
    verbs = {name: (entry.help, partial(command, name)) for name, entry in VERBS.items()}
    return Group(_DOC, verbs, TOPICS, version=f"stepmark {__version__}")


def main() -> None:
    """Run a verb; bad input is one line on stderr and exit code 2, never a traceback."""
    signals.watch()
    streams.check()
    is_check = sys.argv[1:2] == ["doctor"]  # of each host by itself
    has_agents = outer_launcher.is_agent() and not is_check
    code = _job_status() if has_agents else status(sys.argv[1:])
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


def status(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = _code(arguments)
        sys.stdout.flush()
    except StepmarkError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except Exception as error:  # libraries report a lack of memory, threads, ... in many types
        text = sentence_of(error)
        if not text:
            raise
        sys.stderr.write(f"stepmark: {text}\n")  # ranks may lack different things
        return 2
    return code


def _code(words: list[str]) -> int:
    if COMPLETE in os.environ:
        code: int = load("stepmark.cli.completion:answer")(words)
        return code
    if not words:
        sys.stdout.write(_FIRST_SCREEN)
        return 0
    with suppress(Answered):
        return program().run("stepmark", words)
    return 0


def _complain(text: str, code: int) -> int:
    if outer_launcher.is_first():  # every rank raises the same error
        sys.stderr.write(f"stepmark: {redact(text)}\n")
    return code
