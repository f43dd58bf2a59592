"""The hang guard of a rank under a parent of ours: it says what it does, the parent watches."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stepmark.launch import letters, processes
from stepmark.launch.death import tie_to_parent
from stepmark.launch.letters import Beat, Letters

SET_UP_S = 300.0  # from creation to the first `begin` or `idle`
_POLL_S = 0.2


class Heartbeat:
    """A Guard. Create it early: from then on this rank dies with its launcher."""

    def __init__(self, folder: Path, rank: int, first: int = 0) -> None:
        """Raises OSError where the folder cannot be written."""
        self._letters = Letters(folder)
        self.first = first
        run = self._letters.read(letters.RUN)
        self.run = Path(run) if run else None
        self._dump: Callable[[], str] = lambda: ""
        self._abort: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self._die_with_launcher()
        # Before the first beat: the parent sends SIGUSR1 to ranks that have one.
        self._stack = (folder / f"{letters.STACK}-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        self._beat = Beat(
            rank=rank, pid=os.getpid(), position=None, since_s=0.0, deadline_s=None
        )
        self.idle(SET_UP_S)
        threading.Thread(target=self._attend, name="heartbeat", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Heartbeat | None":
        """None in a process that no parent of ours watches."""
        if not (folder := os.environ.get(letters.WATCH)):
            return None
        rank, first = os.environ.get("RANK", "0"), os.environ.get(letters.FIRST, "0")
        return cls(Path(folder), int(rank), int(first))

    def begin(self, position: int, limit_s: float) -> None:
        self._say(position, limit_s)

    def idle(self, limit_s: float) -> None:
        self._say(None, limit_s)

    def run_is_at(self, path: Path) -> None:
        if self._beat.rank == 0:
            self._letters.leave(letters.RUN, str(path.absolute()))

    def go_on_at(self, position: int) -> bool:
        """Raises ValueError for a position that these ranks have begun at: it would not end."""
        if position <= self.first:
            raise ValueError(f"began at {self.first}, cannot go on at {position}")
        if self._beat.rank == 0:
            self._letters.leave(letters.GO_ON, str(position))
        return True

    def on_abort(self, dump: Callable[[], str], abort: Callable[[], None]) -> None:
        """What a daemon thread calls when the parent gives these ranks up, in this order.

        dump: the flight recorder as JSON. abort: end what blocks, such as communicators.
        """
        self._dump, self._abort = dump, abort

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._beat = replace(self._beat, deadline_s=None, closed=True)
            self._letters.leave_beat(self._beat)

    def _say(self, position: int | None, limit_s: float) -> None:
        now_s = time.monotonic()
        self._beat = replace(
            self._beat, position=position, since_s=now_s, deadline_s=now_s + limit_s
        )
        self._letters.leave_beat(self._beat)

    def _die_with_launcher(self) -> None:
        tie_to_parent(signal.SIGKILL)()
        agent = self._letters.read(letters.AGENT)
        if agent is None:  # no launcher, as in a test
            return
        pid, started = (int(word) for word in agent.split())
        now = processes.look(pid)
        if now is None or now.started != started or now.ended:
            os._exit(1)

    def _attend(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._letters.has(letters.ABORT):
                self._give_up()
                return

    def _give_up(self) -> None:
        # The parent kills this process next: what fails here can only cost evidence.
        rank = self._beat.rank
        with contextlib.suppress(Exception):
            if text := self._dump():
                self._letters.leave(f"{letters.FLIGHT}-{rank}.json", text)
        with contextlib.suppress(Exception):
            self._abort()
        with contextlib.suppress(Exception):
            self._letters.leave(f"{letters.GAVE_UP}-{rank}", "")
