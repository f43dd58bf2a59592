"""A file to text: plain, gzipped or UTF-16, or a ConfigError that says why not."""

import gzip
import zlib
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.units import MIB

# Larger ones are traces or dumps. A gzip file can unpack to a thousand times its size.
MAX_BYTES = 512 * MIB
_LOOKED_AT = 8192
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError if there is none to read."""
    try:
        data = _bytes(path)
    except FileNotFoundError:
        raise ConfigError("file", path, "a file that exists") from None
    except IsADirectoryError:
        raise ConfigError("file", path, "a file, not a folder") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError("file", path, "a complete gzip file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no such name"
        raise ConfigError("file", path, f"a file that can be read ({reason})") from None
    if not data.strip():
        raise ConfigError("file", path, "a file with something in it; it is empty")
    if data[:2] in _UTF16:
        return data.decode("utf-16", errors="replace").removeprefix("\ufeff")
    if b"\0" in data[:_LOOKED_AT]:
        raise ConfigError("file", path, "a text file, or one that gzip packed; it is binary")
    return data.decode("utf-8", errors="replace").removeprefix("\ufeff")


def lines_of(text: str) -> list[str]:
    """Lines as an editor counts them: str.splitlines also breaks at form feeds and others."""
    return [line.rstrip("\r") for line in text.split("\n")]


def _bytes(path: Path) -> bytes:
    with path.open("rb") as raw:
        head = raw.read(2)
        raw.seek(0)
        if head != b"\x1f\x8b":
            return _limited(raw.read(MAX_BYTES + 1), path)
        with gzip.GzipFile(fileobj=raw) as unpacked:
            return _limited(unpacked.read(MAX_BYTES + 1), path)


def _limited(data: bytes, path: Path) -> bytes:
    if len(data) > MAX_BYTES:
        raise ConfigError("file", path, f"a text of at most {MAX_BYTES // MIB} MiB")
    return data
