"""Bytes of a file that may be gzipped, up to a bound: a small file can unpack to terabytes."""

import gzip
import zlib
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.units import GIB, MIB

MAX_BYTES = GIB
_GZIP = b"\x1f\x8b"


def read(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The whole content, unpacked. Raises ConfigError; also for more than `limit` bytes."""
    data = _take(path, limit + 1)
    if len(data) > limit:
        raise ConfigError("file", path, f"a file of at most {limit // MIB} MiB, unpacked")
    if not data:
        raise ConfigError("file", path, "a file with something in it; it is empty")
    return data


def head(path: Path, limit: int = 65536) -> bytes:
    """The first bytes, unpacked, to see what a file is. Raises ConfigError."""
    return _take(path, limit)


def _take(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP
            raw.seek(0)
            if not is_gzip:
                return raw.read(limit)
            with gzip.GzipFile(fileobj=raw) as packed:
                return packed.read(limit)
    except FileNotFoundError:
        raise ConfigError("file", path, "a file that exists") from None
    except IsADirectoryError:
        raise ConfigError("file", path, "a file, not a folder") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError("file", path, "a complete gzip file") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no such name"
        raise ConfigError("file", path, f"a file that can be read ({why})") from None
