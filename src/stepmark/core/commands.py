"""The shell command that measures a case alone: what rows, records and plans show."""

import shlex

from stepmark.core import train_options
from stepmark.core.options import argv
from stepmark.core.record import AnyCase
from stepmark.core.train_case import TrainCase


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    if isinstance(case, TrainCase):
        return shlex.join(["stepmark", "train", *argv(train_options.options_of(case))])
    return case.command()
