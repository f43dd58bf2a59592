"""Standard input, output and error of a process, of which any may be closed, full or broken."""

import errno
import io
import os
import sys
from typing import Any, TextIO

from stepmark.ground.errors import ConfigError


class _Output(io.FileIO):
    """Standard output or standard error.

    What nobody can read is discarded: what a closed pipe gets, and messages that stderr does
    not take. Another failure of stdout (a full disk, a closed descriptor) is a ConfigError.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # The interpreter flushes at exit: what is left is discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if error.errno == errno.EPIPE or self.fileno() == 2:
                return len(data)
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise ConfigError(
                "output", "stdout", f"one that can be written ({reason})"
            ) from None


def check() -> None:
    """Open closed standard streams, and make their failures harmless or a ConfigError."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one: no other file may get it. Reading finds
            # nothing, and writing fails.
            os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = checked(1, sys.stdout)
    sys.stderr = checked(2, sys.stderr)


def checked(descriptor: int, stream: TextIO | None) -> TextIO:
    """Return a text stream like this one, on the descriptor 1 or 2, as `_Output` says."""
    encoding = stream.encoding if stream else None
    is_utf8 = (encoding or "").lower().replace("-", "") == "utf8"
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "w", closefd=False)),
        encoding=encoding,
        # A terminal without a character shows ?, and the table stays in line.
        errors=stream.errors if stream and is_utf8 else "replace",
        line_buffering=bool(stream and stream.line_buffering) or descriptor == 2,
    )
