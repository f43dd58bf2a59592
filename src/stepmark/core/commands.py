"""The shell command that measures a case alone: what rows, records and plans show."""

from stepmark.core.record import AnyCase


def command_of(case: AnyCase) -> str:
    """Return the command, quoted for a shell."""
    return case.command()
