"""The only writer of output files.

A regular file appears whole or not at all, with the mode it had. A device, a pipe or an open
descriptor is written in place and never replaced.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from stepmark.ground.errors import ConfigError
from stepmark.ground.redaction import redact

_DESCRIPTOR = re.compile(r"(?:/proc/(\d+)|/dev)/fd/(\d+)$")
_MAX_LINKS = 40


class Lock:
    """Lock on an open file or folder, until it is closed."""

    def __init__(self, fd: int, field: str, path: Path, allowed: str) -> None:
        """Raises ConfigError, and closes fd, where another process has the lock."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(field, path, allowed) from None
        except OSError:  # a file system without locks
            pass
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def user_cache() -> Path:
    """Return this program's folder in the user's cache. Raises RuntimeError without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = given if given.is_absolute() else Path("~/.cache").expanduser()
    return home / "stepmark"


@contextlib.contextmanager
def written(target: str | Path, field: str = "output") -> Iterator[IO[bytes]]:
    """Yield a stream of bytes that becomes `target`; "-" is stdout.

    Raises ConfigError naming `field` where it cannot be written.
    """
    if str(target) == "-":
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with config_errors(target, field), _stream(Path(target)) as stream:
        yield stream


def write_text(target: str | Path, text: str, field: str = "output") -> None:
    """As `written`, for a whole text."""
    if str(target) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with written(target, field) as stream:
        stream.write(text.encode())


@contextlib.contextmanager
def config_errors(target: object, field: str = "output") -> Iterator[None]:
    """Turn an OSError into one sentence about the file that was asked for."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, ValueError) and "null byte" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(field, target, f"a file that can be written ({reason})") from None


def new_file(path: Path) -> Path:
    """Create and return path, or path.0, path.1, ...: the first that does not exist yet."""
    candidate = path
    tried = 0
    with config_errors(path):
        while True:
            try:
                candidate.touch(exist_ok=False)
            except FileExistsError:
                candidate = path.with_name(f"{path.name}.{tried}")
                tried += 1
            else:
                return candidate


def is_special(path: Path) -> bool:
    """Whether this is no regular file, but e.g. a device or a pipe."""
    return descriptor_of(path) is not None or (path.exists() and not path.is_file())


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream to a new file that takes the place of the regular file `path` at the end.

    Raises OSError, and then leaves nothing behind.
    """
    try:
        path = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, "a loop of links", str(path)) from None
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    temporary = path.with_name(f".{path.name[:80]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def redact_file(path: Path) -> None:
    """Remove the secrets of a text file; it is written anew where it has some."""
    text = path.read_bytes().decode(errors="surrogateescape")
    if (shown := redact(text)) != text:
        with replaced(path) as stream:
            stream.write(shown.encode(errors="surrogateescape"))


def sync_folder(folder: Path) -> None:
    """Put a rename on disk, where the file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _stream(path: Path) -> Iterator[IO[bytes]]:
    fd = descriptor_of(path)
    if fd is not None:  # a file behind it keeps what was written so far
        with contextlib.suppress(AttributeError):  # stdout is closed
            sys.stdout.flush()
        with os.fdopen(os.dup(fd), "wb") as stream:
            yield stream
    elif is_special(path):
        with path.open("wb") as stream:
            yield stream
    else:
        with replaced(path) as stream:
            yield stream


def descriptor_of(path: Path) -> int | None:
    """Return the open descriptor of this process that a name such as /dev/stdout leads to."""
    for _ in range(_MAX_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if match := _DESCRIPTOR.match(str(path)):
            return int(match[2]) if int(match[1] or os.getpid()) == os.getpid() else None
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None
