"""Lines of a debug log as bytes: read in blocks, put together again, and who wrote them.

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
from stepmark.core.units import MIB
from stepmark.trace.read_text import open_binary

BLOCK_BYTES = 8 * MIB
# NCCL cuts its lines at 1 KiB; longer ones are something else, or several that ran together.
MAX_LINE_BYTES = 16 * 1024
_LONGEST_KEPT = MIB
_WINDOW = 512

_HOST = rb"([\w.\-]{1,253}):(\d{1,10}):(\d{1,10})"
_PREFIX = re.compile(_HOST + rb" (?:\[(-?\d{1,4})\] ?)?")
_STAMP = re.compile(rb"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\s\]]{0,40}\]? ?")
_STARTS = re.compile(
    rb"[\w.\-]{1,253}:\d{1,10}:\d{1,10} (?:\[-?\d{1,4}\] )?(?:\S{1,120} ){0,3}NCCL "
)


@dataclass(frozen=True, slots=True)
class Writer:
    """Who wrote a line. process is host:pid, "" where the line does not name it."""

    process: str
    host: str
    is_main: bool  # the process's first thread
    device: int | None


NOBODY = Writer("", "", False, None)


def batches(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first line, lines); the last of them is only to look ahead.

    Raises ConfigError where the file cannot be read.
    """
    with open_binary(path) as stream:
        yield from _split(stream)


def quotes(path: Path, numbers: Collection[int]) -> dict[int, str]:
    """The texts of lines (from 1), read again; none if the file is gone or was a pipe."""
    found: dict[int, str] = {}
    last = max(numbers, default=0)
    try:
        for first, lines in batches(path):
            for number in numbers:
                if first <= number < first + len(lines) - 1:
                    found[number] = text_of(lines[number - first])
            if last < first + len(lines) - 1:
                break
    except ConfigError:
        return found
    return found


def text_of(line: bytes) -> str:
    """A line as people read it: no control characters, not endless."""
    text = line[:2048].decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def writer_of(line: bytes, at: int) -> Writer:
    """Who wrote the message whose NCCL stands at byte `at` of the line."""
    start = max(0, at - _WINDOW)
    found = list(_PREFIX.finditer(line, start, at + 1))
    if not found:
        return NOBODY
    host, pid, tid = (part.decode() for part in found[-1].groups()[:3])
    device = found[-1][4]
    return Writer(f"{host}:{pid}", host, pid == tid, None if device is None else int(device))


def unstamped(line: bytes) -> bytes:
    """Without the time stamp at its start: two calls of a kind are then equal but for it."""
    stamp = _STAMP.match(line)
    return line[stamp.end() :] if stamp else line


def segments(line: bytes) -> list[bytes]:
    """Messages of several processes that ran together in one line, apart again."""
    if line.count(b"NCCL ") < 2:
        return [line]
    starts = [found.start() for found in _STARTS.finditer(line)]
    if len(starts) < 2:
        return [line]
    edges = [0, *starts[1:], len(line)]
    return [line[low:high] for low, high in pairwise(edges)]


def _split(raw: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, list[bytes]]]:
    carry, first = b"", 1
    while block := raw.read(BLOCK_BYTES):
        lines = (carry + block).split(b"\n")
        if len(lines) < 3:
            carry = b"\n".join(line[:_LONGEST_KEPT] for line in lines)
            continue
        carry = lines[-2] + b"\n" + lines[-1][:_LONGEST_KEPT]
        del lines[-1]
        yield first, lines
        first += len(lines) - 1
    lines = carry.split(b"\n")
    if lines[-1]:
        lines.append(b"")
    if len(lines) > 1:
        yield first, lines
