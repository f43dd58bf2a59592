"""The shell command that measures a case alone: what rows, records and plans show."""

import importlib
import shlex

from stepmark.core.case import OpCase
from stepmark.core.options import argv
from stepmark.core.record import AnyCase

# By kind of case: the module whose options_of gives its options. Ranks read only their own.
_MODULES = {"op": "stepmark.core.op_options"}


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    if not isinstance(case, OpCase):
        return case.command()
    options_of = importlib.import_module(_MODULES[case.kind]).options_of
    return shlex.join(["stepmark", case.kind, *argv(options_of(case))])
