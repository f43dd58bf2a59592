"""Command lines read as a verb reads them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import typer

from stepmark.cli.flags import verb
from stepmark.core.options import build

T = TypeVar("T")


def parse(cls: type[T], words: Sequence[str]) -> T:
    """The options that a command line gives. Raises ConfigError, or typer's usage error."""
    found: list[T] = []
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    def keep(**given: Any) -> None:
        found.append(build(cls, given))

    like = verb(cls, "", "")
    keep.__signature__ = like.__signature__  # type: ignore[attr-defined]
    keep.__annotations__ = like.__annotations__
    app.command()(keep)
    app(list(words), standalone_mode=False)
    return found[0]
