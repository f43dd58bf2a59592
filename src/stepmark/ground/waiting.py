"""Wait for something; say on stderr what the program waits for, so that no silence is long."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from stepmark.ground import outer_launcher

_PATIENCE_S = 2.0
_PAUSE_OF_FILE_S = 30
_FIRST_PAUSE_OF_FILE_S = 8  # after which progress tells how long it takes
_CLEAR = "\x1b[K"  # to the end of the line


def wait_until(is_done: Callable[[], object], limit_s: float, poll_s: float = 0.05) -> None:
    """Return once it is done, or after limit_s."""
    end_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(poll_s)


class Waiting:
    """A line that appears once the wait takes longer than 2 s.

    A terminal shows the seconds and in the end nothing; a file gets the line once, and again
    after 8 s, then every 30 s, with progress. Of the ranks of a launcher only the first writes
    it. A wait within another one has no line. progress: how much is done, in words.
    """

    _num_open: ClassVar = 0

    def __init__(self, what: str) -> None:
        self._what = what
        self.progress = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        if outer_launcher.is_first() and not Waiting._num_open:
            self._thread.start()
        Waiting._num_open += 1

    @classmethod
    def leave_to_parent(cls) -> None:
        """Write nothing from now on: another process waits for this one."""
        cls._num_open += 1

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._done.is_set():
            return
        self._done.set()
        Waiting._num_open -= 1
        if self._thread.ident is not None:
            self._thread.join()

    def _show(self) -> None:
        if self._done.wait(_PATIENCE_S):
            return
        is_file = not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"
        pause_s = _FIRST_PAUSE_OF_FILE_S if is_file else 1
        seconds = int(_PATIENCE_S)
        while True:
            what = f"{self._what}, {self.progress}" if self.progress else self._what
            if not is_file:
                _write(f"\r{what}: {seconds} s{_CLEAR}")
            elif self.progress or seconds == int(_PATIENCE_S):
                _write(f"# {what} ...\n")
            if self._done.wait(pause_s):
                break
            seconds += pause_s
            pause_s = _PAUSE_OF_FILE_S if is_file else 1
        if not is_file:
            _write(f"\r{_CLEAR}")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
