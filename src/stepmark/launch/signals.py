"""Ctrl-C and SIGTERM as a list, for a parent that must end others before itself."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def catching() -> Iterator[list[int]]:
    """SIGINT and SIGTERM as they come, in place of what they did before. Main thread only."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
