"""The shell command that measures a case alone, which rows, records and plans show."""

import shlex
from typing import Any

from stepmark.cases.kind import KINDS
from stepmark.cases.record import AnyCase
from stepmark.ground.options import argv, load
from stepmark.model.ops import Op


def options_of(case: AnyCase) -> Any:
    """Return the options, of the class of its verb, that measure this case alone."""
    return load(KINDS[case.kind].options_of)(case)


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    return _quoted(case.kind, options_of(case))


def command_of_op(op: Op) -> str:
    """Return the command that measures this operator on any device, quoted for a shell."""
    return _quoted("op", load(KINDS["op"].options_of)(op))


def _quoted(verb: str, options: Any) -> str:
    return shlex.join(["stepmark", verb, *argv(options)])
