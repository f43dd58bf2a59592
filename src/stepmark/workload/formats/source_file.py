"""A file of foreign origin as bytes or lines: plain or gzip, or one ConfigError."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from stepmark.core.errors import ConfigError

_MAX_BYTES = 2**30  # unpacked; 2048 micro-batches of 96 layers take 214 MB in AICB's CSV
_GZIP = b"\x1f\x8b"


def read_bytes(path: Path, what: str) -> bytes:
    """The whole file, unpacked where it is gzip. Raises ConfigError naming `what`."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(what, path, f"a file that can be read ({reason})") from None
    except ValueError:  # a NUL in the path
        raise ConfigError(what, path, "a file that can be read") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(what, path, f"a file of at most {_MAX_BYTES} bytes")
    return data


def read_lines(path: Path, what: str) -> list[str]:
    """Lines without their "\\n"; the last is "" where the file ends in one."""
    try:
        return read_bytes(path, what).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(what, path, f"UTF-8 text (byte {error.start})") from None


@contextlib.contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Puts the file's name before what a ConfigError says of its content."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.shown, error.allowed) from None
