"""Keep a copy of a command's output in bounded space, while it reaches its reader unchanged."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stepmark.ground.units import MIB

HEAD_BYTES, TAIL_BYTES = 8 * MIB, 24 * MIB
_READ_BYTES = 64 * 1024
_POLL_S = 0.1
# A process that the command left behind may write on; what it writes later is not kept.
_DRAIN_S = 5.0


class OutputFile:
    """The beginning of what is written and its end, which is a ring until it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = path.open("w+b", buffering=0)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Add to the end. After an error, such as a full disk, nothing more is kept."""
        try:
            while data and self._file:
                place, room = self._size, HEAD_BYTES - self._size
                if room <= 0:
                    place = (self._size - HEAD_BYTES) % TAIL_BYTES + HEAD_BYTES
                    room = HEAD_BYTES + TAIL_BYTES - place
                self._file.seek(place)
                self._size += self._file.write(data[:room])
                data = data[room:]
        except OSError:
            self._file = None

    def close(self, last_line: str) -> None:
        """Put the end in order behind the beginning, then the line."""
        with contextlib.suppress(OSError):
            omitted = self._size - HEAD_BYTES - TAIL_BYTES
            if omitted > 0 and self._file:
                self._file.seek(HEAD_BYTES)
                ring = self._file.read(TAIL_BYTES)
                start = omitted % TAIL_BYTES
                self._file.seek(HEAD_BYTES)
                self._file.write(b"\n[... %d bytes left out ...]\n" % omitted)
                self._file.write(ring[start:] + ring[:start])
            if self._file:
                self._file.seek(0, os.SEEK_END)
                self._file.write(f"\n{last_line}\n".encode())
                self._file.close()
                self._file = None


@contextlib.contextmanager
def copied_output(file: OutputFile) -> Iterator[tuple[int, int]]:
    """Yield descriptors for a command's stdout and stderr; what it writes goes to ours too.

    Each is a terminal where ours is one, and both are the same where ours are: then lines of
    both stay in order. Nothing is held back.
    """
    targets: dict[int, int] = {}  # of what is read
    ends: list[int] = []
    for number in (1, 2):
        if number == 2 and os.path.sameopenfile(1, 2):
            ends.append(ends[0])
            continue
        source, end = _terminal(number) if os.isatty(number) else os.pipe()
        targets[source] = number
        ends.append(end)

    def resize(*_signal: object) -> None:
        for source, number in targets.items():
            _copy_size(number, source)

    has_ended = threading.Event()
    copier = threading.Thread(target=_copy, args=(targets, file, has_ended), daemon=True)
    previous = signal.signal(signal.SIGWINCH, resize)
    copier.start()
    try:
        yield ends[0], ends[1]
    finally:
        for end in set(ends):
            os.close(end)
        has_ended.set()
        copier.join(_DRAIN_S)
        signal.signal(signal.SIGWINCH, previous)


def _terminal(number: int) -> tuple[int, int]:
    """Return both ends of a terminal of the same size that changes no byte."""
    source, end = pty.openpty()
    tty.setraw(end)
    _copy_size(number, source)
    return source, end


def _copy_size(number: int, terminal: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(number, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def _copy(targets: dict[int, int], file: OutputFile, has_ended: threading.Event) -> None:
    """Copy until all writers have gone, or until the command has ended and nothing is left."""
    sources = set(targets)
    while sources:
        is_last = has_ended.is_set()
        ready, _, _ = select.select(sources, (), (), 0.0 if is_last else _POLL_S)
        if is_last and not ready:
            return
        for source in ready:
            try:
                data = os.read(source, _READ_BYTES)
                file.write(data)
                _write_all(targets[source], data)
            except OSError:
                # The terminal's writers have gone; or our reader has, as the command must see.
                data = b""
            if not data:
                sources.remove(source)
                os.close(source)


def _write_all(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select((), (target,), ())
