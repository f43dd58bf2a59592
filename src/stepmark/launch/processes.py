"""Processes of this host, as Linux tells of them under /proc."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What one look at a process saw."""

    pid: int
    started: int  # clock ticks since boot; pid and this name a process for good
    state: str  # R, S, D (uninterruptible), T and t (stopped), Z and X (ended), I
    num_threads: int
    wait_status: int  # as waitpid gives it; 0 until the process has ended

    @property
    def ended(self) -> bool:
        """A zombie whose other threads still end holds its memory and its device."""
        return self.state in "ZX" and self.num_threads <= 1

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def look(pid: int) -> Process | None:
    """None for no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; the third field is the first after it.
    fields = text.rpartition(b")")[2].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        num_threads=int(fields[17]),
        started=int(fields[19]),
        wait_status=int(fields[49]),
    )


def look_again(process: Process) -> Process | None:
    """None once it is gone, though a later process may have its pid."""
    now = look(process.pid)
    return now if now is not None and now.started == process.started else None


def is_alive(process: Process) -> bool:
    now = look_again(process)
    return now is not None and not now.ended


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to this process, never to a later one with its pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError), _handle(process) as handle:
        if look_again(process) is None:
            return
        if handle is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)


@contextlib.contextmanager
def _handle(process: Process) -> Iterator[int | None]:
    """Holds the pid; None where the kernel (before 5.3) or a container has no such thing."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def children(pid: int) -> list[int]:
    """Processes that this one started, zombies too. Empty where the kernel does not say."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def environment(pid: int) -> list[str]:
    """NAME=value as the process began with; empty for one that ended or is another user's."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return []
    return text.decode(errors="replace").split("\0")


def marked(mark: str) -> list[Process]:
    """All processes that have NAME=value in their environment."""
    found = []
    for name in os.listdir("/proc"):
        # Looked at before its environment is read: `send` then refuses a recycled pid.
        if name.isdecimal() and (process := look(int(name))) and mark in environment(int(name)):
            found.append(process)
    return found
