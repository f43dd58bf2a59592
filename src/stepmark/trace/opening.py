"""A file to text: plain, gzipped or UTF-16, or a ConfigError that says why not."""

from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.units import MIB
from stepmark.trace import bounded_read

# Larger ones are traces or dumps.
MAX_BYTES = 512 * MIB
_LOOKED_AT = 8192
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError if there is none to read."""
    data = bounded_read.read(path, MAX_BYTES)
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
