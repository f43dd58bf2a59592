"""Report the progress of a capture, and end one that takes too long."""

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from stepmark.workloads.user_function import CaptureTimeoutError

INTERVAL_S = 10.0
LIMIT_S = 600.0
GRACE_S = 60.0
OWN = ("torch", "stepmark")  # packages whose lines are not the user's


class Watch:
    """Shows the status every INTERVAL_S, and ends what runs after limit_s.

    ends_process: also if it blocks in C++, where Python handles no signals, after GRACE_S more.
    Without effect outside of the main thread, where signals do not arrive.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        show: Callable[[str], object] = lambda text: None,
        *,
        ends_process: bool = False,
    ) -> None:
        self._limit_s = limit_s
        self._show = show
        self._ends_process = ends_process
        self._expired = False

    def check(self) -> None:
        """Raise CaptureTimeoutError after the limit."""
        if self._expired:
            raise CaptureTimeoutError(
                f"the job still runs after {self._limit_s:g} s: see --timeout"
            )

    @contextlib.contextmanager
    def running(self, status: Callable[[], str]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        start = time.monotonic()
        self._expired = False

        def ring(_: int, frame: FrameType | None) -> None:
            seconds = time.monotonic() - start
            if seconds < self._limit_s:
                self._show(f"{status()}, {seconds:.0f} s")
                return
            self._expired = True
            # An exception inside of torch, below C++, would end the process; operators check.
            # Only lines of the user's, which may call the standard library, do so at once.
            while frame is not None and package(frame) in sys.stdlib_module_names:
                frame = frame.f_back
            if frame is not None and package(frame) not in OWN:
                self.check()

        before = signal.signal(signal.SIGALRM, ring)
        interval_s = min(INTERVAL_S, self._limit_s)
        signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
        if self._ends_process:
            faulthandler.dump_traceback_later(self._limit_s + GRACE_S, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
