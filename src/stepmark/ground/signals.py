"""Ctrl-C and SIGTERM: recorded while modules load, or as a list for a parent of ranks."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_interrupts: list[int] = []


def watch() -> None:
    """Record SIGINT from now on; it still raises KeyboardInterrupt.

    Some large modules swallow the exception while they load.
    """
    signal.signal(signal.SIGINT, _record)


def raise_if_seen() -> None:
    """Raise KeyboardInterrupt before work that must not start after a Ctrl-C."""
    if _interrupts:
        raise KeyboardInterrupt


def _record(number: int, _frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


@contextlib.contextmanager
def catching() -> Iterator[list[int]]:
    """Yield a list to which SIGINT and SIGTERM are appended.

    Only the main thread gets signals: in other threads the list stays empty.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Terminated(BaseException):
    """Raised for SIGTERM. Like KeyboardInterrupt, no ordinary handler may catch it."""


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
