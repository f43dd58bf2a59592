"""Ctrl-C and SIGTERM: recorded while modules load, or as a list for a parent of ranks."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
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
def _handled(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]
) -> Iterator[None]:
    """Handle signals so inside; only the main thread gets any, so in others do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def catching(
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[list[int]]:
    """Yield a list of the SIGINT and SIGTERM that arrive; in other threads none do."""
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    with _handled(note, numbers):
        yield signals


class Terminated(BaseException):
    """Raised for SIGTERM. Like KeyboardInterrupt, no ordinary handler may catch it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated for SIGTERM; in other threads than the main one do nothing."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    with _handled(stop, [signal.SIGTERM]):
        yield
