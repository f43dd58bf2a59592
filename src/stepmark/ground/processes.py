"""Processes of this host: marked ones, children that end with their parent, other ranks."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import psutil


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return all living processes that have NAME=value in their environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and is_alive(process):
                processes.append(process)
    return processes


def is_alive(process: psutil.Process) -> bool:
    """Return whether it lives: False for a zombie and for a later process with its pid."""
    try:
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to this process, never to a later one with its pid."""
    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(number)


_KILL_S = 10.0  # a driver may take seconds to tear a killed process down
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def kill_all(children: Sequence["subprocess.Popen[bytes]"], name: str, value: str) -> list[int]:
    """SIGKILL the sessions of these children and all processes that have NAME=value.

    Returns the pids that survive 10 s.
    """
    end_s = time.monotonic() + _KILL_S
    while True:
        living = [child for child in children if child.poll() is None]
        for child in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        others = marked(name, value)
        for other in others:
            send(other, signal.SIGKILL)
        pids = {child.pid for child in living} | {other.pid for other in others}
        if not pids or time.monotonic() > end_s:
            return sorted(pids)
        time.sleep(0.02)


def tie_to_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a call for the child: it gets this signal when the thread that started it ends.

    Loads what it needs at once, so that the call itself is safe between fork and exec.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return tie


def tie_child(number: signal.Signals) -> Callable[[], None]:
    """Return a preexec_fn for Popen. A child whose parent is gone already ends at once."""
    tie = tie_to_parent(number)
    parent = os.getpid()

    def begin() -> None:
        tie()
        if os.getppid() != parent:
            os._exit(1)

    return begin


class LocalPeers:
    """The other ranks of this host under an outer launcher, from creation to close.

    torchrun sends SIGTERM to the others both when one rank dies and when a user ends the job.
    The ranks that were gone at SIGTERM distinguish the two. Create it in the main thread.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Watch pids by rank, except those that are not visible, as from another container."""
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                self._processes[rank] = psutil.Process(pid)
        self.gone: tuple[int, ...] = ()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python runs handlers between bytecodes, which a wait in C delays; this byte is
        # written at once.
        self._before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._writer = writer
        self._thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, after a signal that has arrived is handled."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self._thread.join(1.0)

    @property
    def stopped(self) -> list[int]:
        """Ranks that are now stopped by SIGSTOP or a debugger."""
        ranks = []
        for rank, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    ranks.append(rank)
        return ranks

    def wait_for_end(self, limit_s: float) -> tuple[int, ...]:
        """Return the ranks that have ended as soon as there are any; () after limit_s."""
        end_s = time.monotonic() + limit_s
        while not (gone := self._ended()) and time.monotonic() < end_s:
            time.sleep(0.01)
        return gone

    def _ended(self) -> tuple[int, ...]:
        return tuple(rank for rank, process in self._processes.items() if not is_alive(process))

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self.gone = self._ended()
        os.close(reader)
