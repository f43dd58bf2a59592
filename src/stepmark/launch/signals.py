"""Ctrl-C and SIGTERM: remembered while modules load, or as a list for a parent of ranks."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_seen: list[int] = []


def watch() -> None:
    """Remember SIGINT from now on; it still raises KeyboardInterrupt.

    Some large modules swallow the exception while they load.
    """
    signal.signal(signal.SIGINT, _remember)


def raise_if_seen() -> None:
    """Raise KeyboardInterrupt before work that must not start after a Ctrl-C."""
    if _seen:
        raise KeyboardInterrupt


def _remember(number: int, _frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def catching() -> Iterator[list[int]]:
    """Yield SIGINT and SIGTERM as they come; nothing else is done with them.

    Main thread only.
    """
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, no ordinary handler may swallow it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated for SIGTERM; in other threads than the main one do nothing."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
