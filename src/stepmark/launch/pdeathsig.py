"""Processes that do not outlive the one that started them. Linux only; elsewhere they may."""

import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie_to_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a call for the child: it gets this signal when the thread that started it ends.

    Loads what it needs at once, so that the call itself is safe between fork and exec.
    """
    if sys.platform != "linux":
        return lambda: None
    import ctypes  # noqa: PLC0415

    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return tie


def tie_child(number: signal.Signals) -> Callable[[], None]:
    """Return a preexec_fn for Popen. A child whose parent is gone already ends at once."""
    tie, parent = tie_to_parent(number), os.getpid()

    def begin() -> None:
        tie()
        if os.getppid() != parent:
            os._exit(1)

    return begin
