"""Read files, plain or gzip, up to a size: a small file can unpack to terabytes."""

import codecs
import errno
import gzip
import io
import os
import re
import select
import stat
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import descriptor_of
from stepmark.ground.units import GIB, MIB

if TYPE_CHECKING:
    import numpy as np

MAX_BYTES = GIB
MAX_TEXT_BYTES = 512 * MIB  # larger files are traces or dumps
MAX_RATIO = 250  # of gzip, which reaches 1,030; traces have 12 to 29, AICB workloads 193
_SMALL_BYTES = 8 * MIB  # which any gzip file may unpack to
_BUFFER_BYTES = 256 * 1024
_PIECE_BYTES = 4 * MIB
_FIRST_DATA_S = 1.0  # within which the writer of a pipe writes
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CHECKED_FOR_ZEROS = 8192
_COLORS = re.compile(rb"\x1b\[[\d;]{0,40}[mK]")


def open_file(path: Path, field: str = "file") -> BufferedReader:
    """Open a file, or a pipe to which a process writes, without waiting for a writer.

    Raises ConfigError for a device, and for a pipe without data; else OSError or ValueError.
    """
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    mode = os.fstat(stream.fileno()).st_mode
    if not (
        stat.S_ISREG(mode)
        or descriptor_of(path) is not None  # such as /dev/stdin
        or (stat.S_ISFIFO(mode) and select.select([stream], [], [], _FIRST_DATA_S)[0])
    ):
        stream.close()
        raise ConfigError(field, path, "a file, or a pipe to which a process writes")
    os.set_blocking(stream.fileno(), True)
    return stream


class _Unpacked(io.RawIOBase):
    """The content of a gzip file. Reading raises OSError where it is a bomb."""

    def __init__(self, packed: BufferedReader) -> None:
        self._packed = packed
        self._gzip = gzip.GzipFile(fileobj=packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._gzip.readinto(buffer[:_BUFFER_BYTES])
        if self._packed.seekable():
            check_ratio(self._packed.tell(), self._gzip.tell())
        return count


def check_ratio(packed_bytes: int, unpacked_bytes: int) -> None:
    """Raise OSError if this much of a gzip file unpacked to more than files of real jobs do."""
    if unpacked_bytes > max(_SMALL_BYTES, MAX_RATIO * packed_bytes):
        raise OSError(errno.EFBIG, f"it unpacks to more than {MAX_RATIO} times its size")


@contextmanager
def open_binary(path: Path, field: str = "file") -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is gzip. Raise ConfigError where it cannot be read."""
    with readable(path, field), open_file(path, field) as raw:
        if raw.peek(2)[:2] != _GZIP_MAGIC:
            yield raw
            return
        with io.BufferedReader(_Unpacked(raw), _BUFFER_BYTES) as unpacked:
            yield unpacked


@contextmanager
def readable(path: Path, field: str) -> Iterator[None]:
    """Turn what goes wrong while a file is opened and read into a ConfigError."""
    try:
        yield
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
    data = io.BytesIO()
    with open_binary(path, field) as stream:
        # In pieces: a large read allocates all of its limit first, whatever the file has.
        while piece := stream.read(min(_PIECE_BYTES, limit - data.tell())):
            data.write(piece)
    return data.getvalue()


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """Return the table of a TOML file. Raise ConfigError for other content."""
    try:
        return tomllib.loads(read_whole(path, field).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(field, path, f"a TOML file ({str(error)[:100]})") from None


def read_npy(path: Path, field: str) -> "np.ndarray":
    """Return the array of a .npy file without objects. Raise ConfigError for other content."""
    import numpy as np  # noqa: PLC0415

    try:
        return np.lib.format.read_array(io.BytesIO(read_whole(path, field)))
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise ConfigError(field, path, f"a readable .npy ({str(error)[:100]})") from None


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
