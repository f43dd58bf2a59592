"""Lines of a debug log as bytes: read in blocks, with the process that wrote each.

A line is `[time stamp] [launcher's tag] host:pid:tid [device] NCCL INFO message`; `[device]` is
absent in CALL lines, and what precedes NCCL may also be missing (text copied from a page).
"""

import gzip
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from stepmark.core.errors import ConfigError
from stepmark.core.finding import Evidence
from stepmark.core.units import MIB
from stepmark.trace.read_text import open_binary

BLOCK_BYTES = 8 * MIB
# NCCL cuts its lines at 1 KiB; longer ones are something else, or several that ran together.
MAX_LINE_BYTES = 16 * 1024
_MAX_KEPT_BYTES = MIB
_MAX_PREFIX_BYTES = 512

_HOST = rb"([\w.\-]{1,253}):(\d{1,10}):(\d{1,10})"
_PREFIX = re.compile(_HOST + rb" (?:\[(-?\d{1,4})\] ?)?")
_STAMP = re.compile(rb"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\s\]]{0,40}\]? ?")
_STARTS = re.compile(
    rb"[\w.\-]{1,253}:\d{1,10}:\d{1,10} (?:\[-?\d{1,4}\] )?(?:\S{1,120} ){0,3}NCCL "
)


@dataclass(frozen=True, slots=True)
class Writer:
    """The origin of a line. process is host:pid, "" where the line does not name it."""

    process: str
    host: str
    is_main: bool  # the process's first thread
    device: int | None


UNKNOWN_WRITER = Writer("", "", False, None)


@dataclass(slots=True)
class LogMessage:
    """One message. `following` is the next line of the file, for lines that were wrapped."""

    process: str  # host:pid, "" unknown
    host: str
    is_main: bool
    device: int | None
    text: str  # the message
    file: str
    number: int
    line: bytes
    following: bytes

    def evidence(self) -> Evidence:
        return Evidence(file=self.file, line=self.number, text=text_of(self.line))

    def with_next_line(self) -> str:
        """Return the text with the next line, unless that is a message of its own."""
        rest = self.following.strip()
        if not rest or b"NCCL" in rest:
            return self.text
        return f"{self.text.rstrip()} {text_of(rest)}"


def batches(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (number of the first line, lines); the last of them is only for looking ahead.

    Raises ConfigError where the file cannot be read.
    """
    with open_binary(path) as stream:
        yield from _split(stream)


def quotes(path: Path, numbers: Collection[int]) -> dict[int, str]:
    """Read the texts of lines (from 1) again; {} if the file is gone or was a pipe."""
    texts: dict[int, str] = {}
    last = max(numbers, default=0)
    try:
        for first, lines in batches(path):
            for number in numbers:
                if first <= number < first + len(lines) - 1:
                    texts[number] = text_of(lines[number - first])
            if last < first + len(lines) - 1:
                break
    except ConfigError:
        return texts
    return texts


def text_of(line: bytes) -> str:
    """Return a line for display: without control characters, of limited length."""
    text = line[:2048].decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def writer_of(line: bytes, at: int) -> Writer:
    """Return the writer of the message whose NCCL is at byte `at` of the line."""
    start = max(0, at - _MAX_PREFIX_BYTES)
    prefixes = list(_PREFIX.finditer(line, start, at + 1))
    if not prefixes:
        return UNKNOWN_WRITER
    host, pid, tid = (part.decode() for part in prefixes[-1].groups()[:3])
    device = prefixes[-1][4]
    return Writer(f"{host}:{pid}", host, pid == tid, None if device is None else int(device))


def unstamped(line: bytes) -> bytes:
    """Remove a leading time stamp: calls of one kind then differ in nothing else."""
    stamp = _STAMP.match(line)
    return line[stamp.end() :] if stamp else line


def segments(line: bytes) -> list[bytes]:
    """Separate messages of several processes that were printed into one line."""
    if line.count(b"NCCL ") < 2:
        return [line]
    starts = [match.start() for match in _STARTS.finditer(line)]
    if len(starts) < 2:
        return [line]
    edges = [0, *starts[1:], len(line)]
    return [line[low:high] for low, high in pairwise(edges)]


def _split(raw: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, list[bytes]]]:
    carry, first = b"", 1
    while block := raw.read(BLOCK_BYTES):
        lines = (carry + block).split(b"\n")
        if len(lines) < 3:
            carry = b"\n".join(line[:_MAX_KEPT_BYTES] for line in lines)
            continue
        carry = lines[-2] + b"\n" + lines[-1][:_MAX_KEPT_BYTES]
        del lines[-1]
        yield first, lines
        first += len(lines) - 1
    lines = carry.split(b"\n")
    if lines[-1]:
        lines.append(b"")
    if len(lines) > 1:
        yield first, lines
