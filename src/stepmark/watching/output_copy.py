"""Keep a copy of a command's output, while it reaches its reader unchanged.

The copy takes bounded space, and secrets are redacted in it.
"""

import contextlib
import fcntl
import os
import pty
import select
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

from stepmark.ground.redaction import redact
from stepmark.ground.units import MIB

HEAD_BYTES = 24 * MIB
TAIL_BYTES = 8 * MIB
_READ_BYTES = 64 * 1024
_POLL_S = 0.1
# A process that the command left behind may write on; what it writes later is not kept.
_DRAIN_S = 5.0


class OutputFile:
    """The beginning of what is written, and its end, which is in memory until it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self._tail = bytearray()
        self._line = bytearray()

    def write(self, data: bytes, *, is_end: bool = False) -> None:
        """Add to the end, without secrets. What does not fit on a full disk is not kept."""
        self._line += data
        # A line is redacted as a whole, but none is waited for without end.
        is_whole = is_end or len(self._line) > MIB
        size = len(self._line) if is_whole else 1 + max(map(self._line.rfind, b"\r\n"))
        text = self._line[:size].decode(errors="surrogateescape")
        data = redact(text).encode(errors="surrogateescape")
        del self._line[:size]
        room = max(0, HEAD_BYTES - self._size)
        self._size += len(data)
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.write(data[:room])
        self._tail += data[room:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def close(self, last_line: str) -> None:
        """Write the end, then the line."""
        self.write(b"", is_end=True)
        omitted = self._size - HEAD_BYTES - TAIL_BYTES
        gap = b"\n[... %d bytes left out ...]\n" % omitted if omitted > 0 else b""
        with contextlib.suppress(OSError):
            self._file.write(gap + self._tail[-TAIL_BYTES:] + f"\n{last_line}\n".encode())
            self._file.close()


@contextlib.contextmanager
def copied_output(file: OutputFile) -> Iterator[tuple[int, int]]:
    """Yield descriptors for a command's stdout and stderr; what it writes goes to ours too.

    Each is a terminal where ours is one, and both are the same where ours are: then lines of
    both stay in order. Nothing is held back.
    """
    source, stdout = _channel(1)
    targets = {source: 1}
    stderr = stdout
    if not os.path.sameopenfile(1, 2):
        source, stderr = _channel(2)
        targets[source] = 2
    has_ended = threading.Event()
    copier = threading.Thread(target=_copy, args=(targets, file, has_ended), daemon=True)
    copier.start()
    try:
        yield stdout, stderr
    finally:
        for end in {stdout, stderr}:
            os.close(end)
        has_ended.set()
        copier.join(_DRAIN_S)


def _channel(number: int) -> tuple[int, int]:
    """Return what to read, and what to write to in place of the descriptor of this number.

    A terminal has the size of ours and changes no byte.
    """
    if not os.isatty(number):
        return os.pipe()
    source, end = pty.openpty()
    tty.setraw(end)
    size = fcntl.ioctl(number, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(end, termios.TIOCSWINSZ, size)
    return source, end


def _copy(targets: dict[int, int], file: OutputFile, has_ended: threading.Event) -> None:
    """Copy until all writers have gone, or until the command has ended and nothing is left."""
    while targets:
        is_last = has_ended.is_set()
        ready, _, _ = select.select(targets, (), (), 0.0 if is_last else _POLL_S)
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
                del targets[source]
                os.close(source)


def _write_all(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select((), (target,), ())
