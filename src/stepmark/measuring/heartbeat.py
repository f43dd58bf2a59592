"""The hang guard of a rank: it reports to our parent process, or else ends itself.

Ranks and the parent that watches them report to each other through files in one folder.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from stepmark.ground.files import config_errors
from stepmark.ground.units import parse_duration

FOLDER = "STEPMARK_HEARTBEATS"  # environment variable: the folder
FIRST = "STEPMARK_FIRST"  # environment variable: the position at which ranks begin

# Written by the parent: ranks must give up; they should stop after the present case.
ABORT = "abort"
STOP = "stop"
# Written by each rank, with its number: stacks, flight recorder, "has given up", its state.
STACK = "stack"
FLIGHT = "flight"
GAVE_UP = "gave_up"
BEAT = "beat"
MEMORY = Path("/dev/shm")
_PREFIX = "stepmark-ranks-"
_OWNER = "owner"  # a file that the parent holds locked while it lives
_ROOM_BYTES = 2**20  # stacks and flight recorders of a few ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of a rank and its deadline by CLOCK_MONOTONIC, which all processes share."""

    rank: int
    pid: int
    position: int | None  # None in set-up and between cases
    since_s: float
    deadline_s: float | None  # None: no deadline
    restart_at: int | None = None  # position at which new ranks should begin after these
    exit_code: int | None = None  # all work is done; the process itself may end later


class HeartbeatStore:
    """A folder of small files, each written under another name and renamed when complete."""

    def __init__(self, folder: Path, owner: IO[str] | None = None) -> None:
        """owner: the locked file of the process that made the folder."""
        self.folder = folder
        self._owner = owner

    @classmethod
    def new(cls) -> "HeartbeatStore":
        """Make a folder, on tmpfs if it has room: a beat costs 20 us there, 120 us on ext4.

        Removes the folders that killed parents have left. Raises ConfigError without room.
        """
        try:
            return cls._new_in(MEMORY)
        except OSError:
            pass
        folder = tempfile.gettempdir()
        with config_errors(folder, "TMPDIR"):
            return cls._new_in(Path(folder))

    @classmethod
    def _new_in(cls, root: Path) -> "HeartbeatStore":
        _remove_abandoned(root)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        try:
            room = folder / "room"
            room.write_bytes(bytes(_ROOM_BYTES))  # a full tmpfs still makes folders
            room.unlink()
            owner = (folder / f"{_OWNER}-new").open("w")
            with contextlib.suppress(OSError):  # without locks nobody removes it
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only now: an unlocked owner is that of a folder that is abandoned.
                os.rename(owner.name, folder / _OWNER)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, owner)

    def write(self, name: str, text: str) -> None:
        """Write a file at once. Raises OSError, e.g. for a full disk."""
        target = f"{self.folder}/{name}"
        temporary = f"{target}.{os.getpid()}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
        os.rename(temporary, target)

    def read(self, name: str) -> str | None:
        """Return a file's text; None until it exists."""
        try:
            return (self.folder / name).read_text(errors="replace")
        except OSError:
            return None

    def has(self, name: str) -> bool:
        return os.path.exists(f"{self.folder}/{name}")

    def write_beat(self, beat: Heartbeat) -> None:
        self.write(f"{BEAT}-{beat.rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the last beat of each of these ranks that has started."""
        texts = (self.read(f"{BEAT}-{rank}") for rank in ranks)
        beats = [Heartbeat(**json.loads(text)) for text in texts if text]
        return {beat.rank: beat for beat in beats}

    def remove(self) -> None:
        # Errors are ignored: a rank that is being killed may still write here.
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner is not None:
            self._owner.close()


def _remove_abandoned(root: Path) -> None:
    """Remove this user's folders whose parent no longer lives: the kernel drops its lock.

    Unlike a pid, a lock is also seen from another container, and has no successor.
    """
    for owner in root.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            if owner.parent.lstat().st_uid != os.geteuid():
                continue
            with owner.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)  # refuses a symbolic link


# Each step of set-up: the start on a slow disk, joining, leaving. Interpreters start at
# different speeds.
SET_UP_S = 120.0
_LEAST_SET_UP_S = 10.0  # python and torch alone, per rank of a core
_POLL_S = 0.2


def set_up_limit_s(timeout: object, num_ranks: int) -> float:
    """Return the limit of a step of set-up: --timeout, unless no start is that fast."""
    if not timeout:
        return SET_UP_S
    least_s = _LEAST_SET_UP_S * max(1.0, num_ranks / (os.cpu_count() or 1))
    return min(SET_UP_S, max(parse_duration(str(timeout), "timeout"), least_s))


class HeartbeatWriter:
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
        self._stack = (folder / f"{STACK}-{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        self._beat = Heartbeat(
            rank=rank, pid=os.getpid(), position=None, since_s=0.0, deadline_s=None
        )
        self.idle(SET_UP_S)
        threading.Thread(target=self._attend, name="heartbeat", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "HeartbeatWriter | None":
        """Return the heartbeat; None in a process without a watching parent."""
        if not (folder := os.environ.get(FOLDER)):
            return None
        rank = os.environ.get("RANK", "0")
        return cls(Path(folder), int(rank), int(os.environ.get(FIRST, "0")))

    def begin(self, position: int | None, limit_s: float) -> None:
        """Report work on this case, which should be done in limit_s."""
        now_s = time.monotonic()
        self._beat = replace(
            self._beat, position=position, since_s=now_s, deadline_s=now_s + limit_s
        )
        self._store.write_beat(self._beat)

    def idle(self, limit_s: float) -> None:
        """Report set-up, or work between cases and after the last one."""
        self.begin(None, limit_s)

    def restart_at(self, position: int) -> bool:
        """Request new ranks from this position after a normal end of these.

        True: they will be started. Called by every rank, or by rank 0 alone. Raises ValueError
        for the position at which these ranks began, which would repeat forever.
        """
        if position <= self.first:
            raise ValueError(f"began at {self.first}, cannot restart at {position}")
        self._beat = replace(self._beat, restart_at=position)
        self._store.write_beat(self._beat)
        return True

    def is_stopping(self) -> bool:
        """Return whether the parent has requested a stop after the present case."""
        return self._store.has(STOP)

    def on_abort(self, dump: Callable[[], str], abort: Callable[[], None]) -> None:
        """Set the calls of a daemon thread when the parent gives these ranks up, in this order.

        dump: return the flight recorder as JSON. abort: end blocked communicators.
        """
        self._dump = dump
        self._abort = abort

    def close(self, exit_code: int) -> None:
        """Report that all work is done. Nothing is watched any more."""
        if not self._closed.is_set():
            self._closed.set()
            self._beat = replace(self._beat, deadline_s=None, exit_code=exit_code)
            self._store.write_beat(self._beat)

    def _attend(self) -> None:
        while not self._closed.wait(_POLL_S):
            if not self._store.has(ABORT):
                continue
            # The parent kills this process next: a failure here only loses diagnostics.
            rank = self._beat.rank
            with contextlib.suppress(Exception):
                if text := self._dump():
                    self._store.write(f"{FLIGHT}-{rank}.json", text)
            with contextlib.suppress(Exception):
                self._abort()
            with contextlib.suppress(Exception):
                self._store.write(f"{GAVE_UP}-{rank}", "")
            return


_RECORD_S = 10.0  # on_timeout writes one line; a dead file system must not block the end
_STDERR = 2  # not sys.stderr, which may be replaced or locked by the thread that hangs


class Watchdog:
    """Ends its own rank past a deadline: stacks to stderr, on_timeout(position), exit code 3.

    It works while the main thread is in C code that has released the GIL, as torch does.
    """

    first = 0

    def __init__(self, on_timeout: Callable[[int | None], None]) -> None:
        self._on_timeout = on_timeout
        # One tuple, so that the thread never sees a position with another's deadline.
        self._task: tuple[int | None, float] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, position: int | None, limit_s: float) -> None:
        self._task = (position, time.monotonic() + limit_s)

    def idle(self, limit_s: float) -> None:
        self.begin(None, limit_s)

    def restart_at(self, position: int) -> bool:
        """Return False: there is no parent to start new ranks."""
        return False

    def is_stopping(self) -> bool:
        """Return False: a signal ends the present case."""
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
        # The rank must end even if its report fails.
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"stepmark: a rank hangs {where}; its threads:\n".encode())
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        record = threading.Thread(target=self._on_timeout, args=(position,), daemon=True)
        record.start()
        record.join(_RECORD_S)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os._exit(3)
