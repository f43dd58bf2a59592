"""The shell command that measures a case alone, which rows, records and plans show."""

import shlex
from typing import Any

from stepmark.core.options import argv, load
from stepmark.core.record import AnyCase

# By kind of case: options_of(case), imported when a command is shown.
_OPTIONS = {
    "op": "stepmark.core.op_options:options_of",
    "comm": "stepmark.core.comm_options:options_of",
    "train": "stepmark.core.train_options:options_of",
    "replay": "stepmark.core.replay_options:options_of",
}


def options_of(case: AnyCase) -> Any:
    """Return the options, of the class of its verb, that measure this case alone."""
    return load(_OPTIONS[case.kind])(case)


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    return shlex.join(["stepmark", case.kind, *argv(options_of(case))])
