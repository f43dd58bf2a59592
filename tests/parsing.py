"""Command lines read as a verb reads them, and run as the program runs them."""

import contextlib
import io
from collections.abc import Sequence
from typing import TypeVar

from stepmark.cli.commands import Command
from stepmark.cli.main import program
from stepmark.ground.options import build

T = TypeVar("T")


def parse(cls: type[T], words: Sequence[str]) -> T:
    """The options that a command line gives. Raises StepmarkError."""
    return build(cls, Command(cls, "", "").parse("stepmark", [*words]))


def run(*words: str) -> tuple[int, str]:
    """The exit code of a command line and what it prints. Raises StepmarkError."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = program().run("stepmark", [*words])
    return code, out.getvalue()
