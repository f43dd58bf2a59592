"""Report the progress of a capture, and end one that takes too long."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

INTERVAL_S = 10.0


class CaptureTimeoutError(BaseException):
    """The job ran longer than allowed. Not an Exception, which a job's loop may catch."""


@contextlib.contextmanager
def watch(
    limit_s: float, status: Callable[[], str], show: Callable[[str], object]
) -> Iterator[None]:
    """Show the status every INTERVAL_S inside; raise CaptureTimeoutError after limit_s.

    Without effect outside of the main thread, where signals do not arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()

    def ring(*_: object) -> None:
        seconds = time.monotonic() - start
        if seconds >= limit_s:
            raise CaptureTimeoutError(f"the job still runs after {limit_s:g} s: see --timeout")
        show(f"{status()}, {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    interval_s = min(INTERVAL_S, limit_s)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
