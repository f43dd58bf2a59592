"""The hang guard of a rank under an outer launcher: a thread of its own that ends it."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from stepmark.launch.pdeathsig import tie_to_parent

_POLL_S = 0.2
_RECORD_S = 10.0  # on_timeout writes one line; a dead file system must not keep us
_STDERR = 2  # not sys.stderr, which may be replaced or locked by the thread that hangs


class Watchdog:
    """As Heartbeat, but past a deadline: stacks to stderr, on_timeout(position), exit code 3.

    Works while the main thread is in C code that has released the GIL, as torch's waits have.
    """

    first = 0

    def __init__(
        self, on_timeout: Callable[[int | None], None], *, die_with_parent: bool = False
    ) -> None:
        self._on_timeout = on_timeout
        # One tuple, so that the thread never sees a position with another's deadline.
        self._task: tuple[int | None, float] | None = None
        self._closed = threading.Event()
        if die_with_parent:
            tie_to_parent(signal.SIGKILL)()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, position: int, limit_s: float) -> None:
        self._task = (position, time.monotonic() + limit_s)

    def idle(self, limit_s: float) -> None:
        self._task = (None, time.monotonic() + limit_s)

    def restart_at(self, position: int) -> bool:
        """False: nobody would start new ranks."""
        return False

    def close(self, exit_code: int) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            task = self._task
            if task is not None and time.monotonic() > task[1]:
                self._end(task[0])

    def _end(self, position: int | None) -> None:
        where = "between cases" if position is None else f"at position {position}"
        # Whatever goes wrong with the last words, the rank must end.
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"stepmark: a rank hangs {where}; its threads:\n".encode())
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        record = threading.Thread(target=self._on_timeout, args=(position,), daemon=True)
        record.start()
        record.join(_RECORD_S)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(3)
