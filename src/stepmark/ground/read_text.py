"""Read files, plain or gzip, up to a size: a small file can unpack to terabytes."""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stepmark.ground.errors import ConfigError
from stepmark.ground.units import GIB, MIB

MAX_BYTES = GIB
MAX_TEXT_BYTES = 512 * MIB  # larger files are traces or dumps
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CHECKED_FOR_ZEROS = 8192
_COLORS = re.compile(rb"\x1b\[[\d;]{0,40}[mK]")


@contextmanager
def open_binary(path: Path, field: str = "file") -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file, decompressed if it is gzip. Raise ConfigError where it cannot be read."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] != _GZIP_MAGIC:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked
    except FileNotFoundError:
        raise ConfigError(field, path, "a file that exists") from None
    except IsADirectoryError:
        raise ConfigError(field, path, "a file, not a folder") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(field, path, "a complete gzip file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no such name"
        raise ConfigError(field, path, f"a file that can be read ({reason})") from None


def read_whole(path: Path, field: str, limit: int = MAX_BYTES) -> bytes:
    """Return the content, decompressed, without a byte-order mark.

    Raise ConfigError if it exceeds `limit` bytes.
    """
    data = read_head(path, limit + 1, field)
    if len(data) > limit:
        allowed = f"a file of at most {limit // MIB} MiB after decompression"
        raise ConfigError(field, path, allowed)
    return data.removeprefix(codecs.BOM_UTF8)


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """As read_whole, of a file that is not empty."""
    data = read_whole(path, "file", limit)
    if not data.strip():
        raise ConfigError("file", path, "a file with content; this one is empty")
    return data


def read_head(path: Path, limit: int = 65536, field: str = "file") -> bytes:
    """Return the first bytes, decompressed. Raise ConfigError if the file cannot be read."""
    with open_binary(path, field) as stream:
        return stream.read(limit)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 or UTF-16 file. Raise ConfigError for other content."""
    data = read_bytes(path, MAX_TEXT_BYTES)
    if is_binary(data):
        raise ConfigError("file", path, "a text file, or a compressed one; this one is binary")
    return decode(data)


def is_binary(head: bytes) -> bool:
    """Return whether a file that begins with `head` is neither UTF-8 nor UTF-16 text."""
    return head[:2] not in _UTF16 and b"\0" in head[:_CHECKED_FOR_ZEROS]


def decode(data: bytes) -> str:
    """Return UTF-16 (by its byte-order mark) or UTF-8 data as text without mark and colors."""
    encoding = "utf-16" if data[:2] in _UTF16 else "utf-8"
    text = data.decode(encoding, errors="replace").removeprefix("\ufeff")
    return without_colors(text.encode()).decode() if "\x1b" in text else text


def without_colors(data: bytes) -> bytes:
    """Return UTF-8 text without the codes of a terminal's colors."""
    return _COLORS.sub(b"", data) if b"\x1b" in data else data


def printable(line: bytes) -> str:
    """Return a line for display: without control characters, of limited length."""
    text = line[:2048].decode("utf-8", errors="replace")
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return text.rstrip()


def lines_of(text: str) -> list[str]:
    """Split into lines as editors do; str.splitlines also splits at form feeds."""
    return [line.rstrip("\r") for line in text.split("\n")]
