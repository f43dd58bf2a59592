"""The hang guard of a rank under a parent of ours: it reports, the parent watches."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stepmark.launch import heartbeat_store
from stepmark.launch.heartbeat_store import Beat, HeartbeatStore

SET_UP_S = 300.0  # from creation to the first `begin` or `idle`
_POLL_S = 0.2


class Heartbeat:
    """Reports what this rank works on and until when. Create it early.

    Limits are in seconds. A position is an index into the plan.
    """

    def __init__(self, folder: Path, rank: int, first: int = 0) -> None:
        """Raises OSError where the folder cannot be written."""
        self._store = HeartbeatStore(folder)
        self.first = first
        self._dump: Callable[[], str] = lambda: ""
        self._abort: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        # Before the first beat: the parent sends SIGUSR1 to ranks that have one.
        self._stack = (folder / f"{heartbeat_store.STACK}-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        self._beat = Beat(
            rank=rank, pid=os.getpid(), position=None, since_s=0.0, deadline_s=None
        )
        self.idle(SET_UP_S)
        threading.Thread(target=self._attend, name="heartbeat", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Heartbeat | None":
        """None in a process that no parent of ours watches."""
        if not (folder := os.environ.get(heartbeat_store.FOLDER)):
            return None
        rank = os.environ.get("RANK", "0")
        return cls(Path(folder), int(rank), int(os.environ.get(heartbeat_store.FIRST, "0")))

    def begin(self, position: int, limit_s: float) -> None:
        """Report work on this case, which should be done in limit_s."""
        self._report(position, limit_s)

    def idle(self, limit_s: float) -> None:
        """Report set-up, or what lies between cases and after the last one."""
        self._report(None, limit_s)

    def restart_at(self, position: int) -> bool:
        """Ask for new ranks from this position once these have ended well.

        True: they will be started. Called by every rank, or by rank 0 alone. Raises ValueError
        for a position that these ranks have begun at: it would not end.
        """
        if position <= self.first:
            raise ValueError(f"began at {self.first}, cannot restart at {position}")
        self._beat = replace(self._beat, restart_at=position)
        self._store.write_beat(self._beat)
        return True

    def on_abort(self, dump: Callable[[], str], abort: Callable[[], None]) -> None:
        """Set what a daemon thread calls when the parent gives these ranks up, in this order.

        dump: the flight recorder as JSON. abort: end what blocks, such as communicators.
        """
        self._dump, self._abort = dump, abort

    def close(self, exit_code: int) -> None:
        """Report that all work is done. Nothing is watched any more."""
        if not self._closed.is_set():
            self._closed.set()
            self._beat = replace(self._beat, deadline_s=None, exit_code=exit_code)
            self._store.write_beat(self._beat)

    def _report(self, position: int | None, limit_s: float) -> None:
        now_s = time.monotonic()
        self._beat = replace(
            self._beat, position=position, since_s=now_s, deadline_s=now_s + limit_s
        )
        self._store.write_beat(self._beat)

    def _attend(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._store.has(heartbeat_store.ABORT):
                self._give_up()
                return

    def _give_up(self) -> None:
        # The parent kills this process next: what fails here can only cost evidence.
        rank = self._beat.rank
        with contextlib.suppress(Exception):
            if text := self._dump():
                self._store.write(f"{heartbeat_store.FLIGHT}-{rank}.json", text)
        with contextlib.suppress(Exception):
            self._abort()
        with contextlib.suppress(Exception):
            self._store.write(f"{heartbeat_store.GAVE_UP}-{rank}", "")
