"""The command line that measures a case, as its row shows it."""

import importlib
import shlex

from stepmark.core.comm_case import CommCase
from stepmark.core.options import argv
from stepmark.core.record import AnyCase

# By kind of case: a module that has options_of(case). Imported when a command is shown.
_OPTIONS = {"comm": "stepmark.core.comm_options"}


def command_of(case: AnyCase) -> str:
    """Return the shell command that measures this case."""
    if case.kind not in _OPTIONS:
        assert not isinstance(case, CommCase)
        return case.command()
    options = importlib.import_module(_OPTIONS[case.kind]).options_of(case)
    return shlex.join(["stepmark", case.kind, *argv(options)])
