"""Command lines read as a verb reads them."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import typer

from stepmark.cli.flags import verb
from stepmark.ground.options import build

T = TypeVar("T")


def parse(cls: type[T], words: Sequence[str]) -> T:
    """The options that a command line gives. Raises ConfigError, or typer's usage error."""
    options: T = _command(cls)(list(words), standalone_mode=False)  # type: ignore[arg-type]
    return options


@functools.cache
def _command(cls: type[Any]) -> Any:
    """Return the command of a verb with these options, which it returns. It takes 10 ms."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    def keep(**given: Any) -> Any:
        return build(cls, given)

    like = verb(cls, "", "")
    keep.__signature__ = like.__signature__  # type: ignore[attr-defined]
    keep.__annotations__ = like.__annotations__
    app.command()(keep)
    return typer.main.get_command(app)
