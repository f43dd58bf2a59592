"""The shell command that measures a case alone: what rows, records and plans show."""

import importlib
import shlex

from stepmark.core.case import OpCase
from stepmark.core.options import argv
from stepmark.core.record import AnyCase

# By kind of case: a module that has options_of(case), imported when a command is shown.
_OPTIONS = {"comm": "stepmark.core.comm_options", "train": "stepmark.core.train_options"}


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    if isinstance(case, OpCase):
        return case.command()
    options = importlib.import_module(_OPTIONS[case.kind]).options_of(case)
    return shlex.join(["stepmark", case.kind, *argv(options)])
