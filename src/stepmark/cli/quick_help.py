"""Groups of commands whose --help does not wait for pydantic.

An unset --help is None, which typer (0.29) takes through a pydantic adapter, though a bool it
takes as it is. Loading pydantic is a third of the time that --help may take.
"""

from typing import Any

import typer.core


class Group(typer.core.TyperGroup):
    """As typer's; --help is False unless given."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
