"""The other ranks of this host under an outer launcher: which were gone when SIGTERM came.

torchrun answers the death of one rank with SIGTERM to the others, as it does when a user ends
the job. Who still lives at that moment tells the two apart.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping

import psutil

from stepmark.launch import processes


class LocalPeers:
    """Watches from creation to close. Create it in the main thread."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """pids by rank. Those that cannot be seen, as from another container, are left out."""
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                self._processes[rank] = psutil.Process(pid)
        self.gone: tuple[int, ...] = ()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python runs handlers between bytecodes, which a wait in C puts off; this byte is
        # written at once.
        self._before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._writer = writer
        self._thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until a signal that has come is dealt with."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self._thread.join(1.0)

    @property
    def stopped(self) -> list[int]:
        """Ranks that SIGSTOP or a debugger holds now."""
        found = []
        for rank, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    found.append(rank)
        return found

    def wait_for_end(self, limit_s: float) -> tuple[int, ...]:
        """The first that are seen to have ended; none within limit_s."""
        end_s = time.monotonic() + limit_s
        while not (gone := self._ended()) and time.monotonic() < end_s:
            time.sleep(0.01)
        return gone

    def _ended(self) -> tuple[int, ...]:
        live = processes.is_alive
        return tuple(rank for rank, one in self._processes.items() if not live(one))

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self.gone = self._ended()
        os.close(reader)
