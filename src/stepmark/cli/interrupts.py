"""Ctrl-C while large modules load. Some of them swallow the exception, so it is remembered."""

import signal
from types import FrameType

_seen: list[int] = []


def watch() -> None:
    """Remember SIGINT from now on; it still raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, _remember)


def raise_if_seen() -> None:
    """Call before work starts that must not run after a Ctrl-C."""
    if _seen:
        raise KeyboardInterrupt


def _remember(number: int, _frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt
