"""Lines of a debug log as bytes: the process that wrote each, and the calls that they state.

A line is `[time stamp] [launcher's tag] host:pid:tid [device] NCCL INFO message`; `[device]` is
absent in CALL lines, and what precedes NCCL may also be missing (text copied from a page). Enum
numbers of calls are those of nccl.h, as printed.
"""

import re
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from stepmark.cases.message import RECV, SEND
from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import open_binary, printable, without_colors
from stepmark.ground.units import KIB, MIB
from stepmark.model.collectives import FACTS, Collective, collective_named

# The lines of a block and what is cut out of them fit into a processor's cache.
BLOCK_BYTES = 128 * KIB
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
        return Evidence(file=self.file, line=self.number, text=printable(self.line))

    def with_next_line(self) -> "LogMessage":
        """Return the message joined to the next line, unless that is one of its own."""
        rest = self.following.strip()
        if not rest or b"NCCL" in rest:
            return self
        text = f"{self.text.rstrip()} {printable(rest)}"
        return replace(self, text=text, line=self.line.rstrip() + b" " + rest)


@dataclass(slots=True)
class Block:
    """Consecutive lines of a file, each with its line end, and the line after them."""

    first: int  # number of the first line
    end: int  # number of the line after them
    text: bytes
    ahead: bytes
    _lines: list[bytes] = field(default_factory=list)  # separated when one is needed

    def line(self, number: int) -> bytes:
        """Return a line without its end, also the one after the block."""
        if not self._lines:
            self._lines = self.text.split(b"\n")
            self._lines[-1] = self.ahead
        return self._lines[number - self.first]


def blocks(path: Path) -> Iterator[Block]:
    """Yield the lines of a file. Raises ConfigError where it cannot be read."""
    with open_binary(path) as stream:
        yield from _split(stream)


def quotes(path: Path, numbers: Collection[int]) -> dict[int, str]:
    """Read the texts of lines (from 1) again; {} if the file is gone or was a pipe."""
    texts: dict[int, str] = {}
    last = max(numbers, default=0)
    try:
        for block in blocks(path):
            wanted = (number for number in numbers if block.first <= number < block.end)
            texts |= {number: printable(block.line(number)) for number in wanted}
            if last < block.end:
                break
    except ConfigError:
        pass
    return texts


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


def _split(raw: IO[bytes]) -> Iterator[Block]:
    carry = b""
    first = 1
    while text := raw.read(BLOCK_BYTES):
        text = without_colors(carry + text)
        end = text.rfind(b"\n")
        last = text.rfind(b"\n", 0, max(end, 0)) + 1
        if not last:
            carry = b"\n".join(line[:_MAX_KEPT_BYTES] for line in text.split(b"\n"))
            continue
        carry = text[last : end + 1 + _MAX_KEPT_BYTES]
        next_first = first + text.count(b"\n", 0, last)
        yield Block(first, next_first, text[:last], text[last:end])
        first = next_first
    if carry:
        text = carry if carry.endswith(b"\n") else carry + b"\n"
        yield Block(first, first + text.count(b"\n"), text, b"")


DTYPES = (
    *(DType.INT8, DType.UINT8, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64),
    *(DType.FP16, DType.FP32, DType.FP64, DType.BF16, DType.FP8_E4M3, DType.FP8_E5M2),
)
_OPS = ("sum", "prod", "max", "min", "avg")
NAMES_OF = {str(name): name for name in Collective}
# Threads of a process: any but the first, the first, one that the line does not name.
OTHER, FIRST, UNKNOWN = range(3)
UNORDERED = (SEND, RECV)  # they differ by rank, and are compared by pair of ranks
# Above this number, sizes probably change with every call and are rounded.
MAX_KINDS = 100_000

_COLL = re.compile(
    rb"(NCCL \w+ +)?\b(\w+): opCount ([0-9a-f]{1,16}) .{0,200}? count (\d{1,18}) "
    rb"datatype (\d{1,4}) (?:op (\d{1,9}) (?:root (-?\d{1,9}) "
    rb"(?:comm (0x[0-9a-f]+) (?:\[nranks=(\d{1,9})\])?)?)?)?"
)
# Lines of calls that are whole, with what does not change from call to call: the call, and its
# communicator. Without the rest (opCount, buffers, stream) they are found twice as fast.
CALL_LINES = re.compile(
    rb" opCount \S{1,16}+ sendbuff \S{1,18}+ recvbuff \S{1,18}+(?: acc \S{1,18}+)?+"
    rb"( count \S++ datatype \S++ op \S++ root \S++)( comm \S++ \S++)"
    rb" stream \S++(?: task \d++ globalrank \d++)?+\r?+\n"
)
_GLOBAL_RANK = re.compile(rb" globalrank (\d{1,9})")
_CALL = re.compile(
    rb"nccl(\w+)\([0-9a-fx]+,[0-9a-fx]+,(\d{1,18}),(\d{1,4}),(\d{1,9}),(-?\d{1,9}),(0x[0-9a-f]+|[0-9a-f]+),"
)


def type_name(dtype: int) -> str:
    """Return the name of a type of NCCL's by its number."""
    return str(DTYPES[dtype]) if dtype < len(DTYPES) else f"type {dtype}"


class Call(NamedTuple):
    """One call as its line states it. Matching calls of a communicator's ranks are equal."""

    collective: str
    elements: int  # the count of the line
    dtype: int
    op: int | None
    root: int | None

    def num_bytes(self) -> int | None:
        """Return the size of the count; None for an unknown type."""
        is_known = self.dtype < len(DTYPES)
        return self.elements * DTYPES[self.dtype].itemsize if is_known else None

    def text(self) -> str:
        """Return a description, e.g. "all_gather of 512 bf16"."""
        words = f"{self.collective} of {self.elements} {type_name(self.dtype)}"
        collective = NAMES_OF.get(self.collective)
        if collective and FACTS[collective].reduces and self.op is not None:
            words += f", {_OPS[self.op] if self.op < len(_OPS) else 'user-defined op'}"
        if collective and FACTS[collective].rooted and self.root is not None:
            words += f", root {self.root}"
        return words


class ParsedCall(NamedTuple):
    """A call and its communicator; pointer b"" where the line is cut before it."""

    call: Call
    pointer: bytes
    op_count: int | None
    num_ranks: int | None
    global_rank: int | None


@dataclass(slots=True)
class CallCounter:
    """Counts the lines of one kind, and appends them to their communicator's sequence."""

    calls: int
    append: Callable[[int], None]
    base: int  # key of the call, in the upper half; the line's number goes below
    first: tuple[int, int] = (0, 0)  # file and line


@dataclass(slots=True)
class CallSequence:
    """Calls of one communicator on one rank, in the order of their lines.

    A call takes 8 bytes: 4 for its key, which is its number and in the highest byte its thread,
    and 4 for its line. Calls that are not compared in order are only counted, by key.
    """

    calls: "array[int]" = field(default_factory=lambda: array("Q"))
    files: list[tuple[int, int]] = field(default_factory=list)
    first_op_count: int | None = None
    unordered: dict[int, CallCounter] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.calls or self.unordered)

    @property
    def num_calls(self) -> int:
        return len(self.calls) + sum(counter.calls for counter in self.unordered.values())

    def keys(self) -> "array[int]":
        """Return the keys of the calls in order."""
        return array("I", self.calls.tobytes())[HIGH_HALF::2]

    def number(self, position: int) -> int:
        return self.calls[position] >> 32 & NUMBER

    def enter_file(self, file_index: int) -> None:
        """Attribute the following calls to this file."""
        if not self.files or self.files[-1][1] != file_index:
            self.files.append((len(self.calls), file_index))

    def place(self, position: int) -> tuple[int, int]:
        """Return (file, line) of a call."""
        index = next(index for at, index in reversed(self.files) if at <= position)
        return index, self.calls[position] & 0xFFFFFFFF


# in a key
NUMBER = 0xFFFFFF
THREAD_BITS = 24
HIGH_HALF = int(array("H", b"\1\0")[0] == 1)  # of 8 bytes
_DISCARD: deque[int] = deque(maxlen=0)


class Calls:
    """Numbers of distinct calls, and the counters of their lines."""

    def __init__(self) -> None:
        self.numbers: dict[Call, int] = {}
        self.kinds: list[Call] = []  # by number
        self.rounded: set[int] = set()  # numbers of calls whose size was rounded
        self.has_all_peers = True
        self.unread = 0
        self.broken: set[str] = set()  # processes of which calls are missing

    def counter(
        self, sequence: CallSequence, call: Call, thread: int, *, is_compared: bool
    ) -> CallCounter:
        """Return the counter of such calls of this communicator and thread."""
        sequence.threads.add(thread)
        key = thread << THREAD_BITS | self._number(call)
        if is_compared and call.collective not in UNORDERED:
            return CallCounter(0, sequence.calls.append, key << 32)
        return sequence.unordered.setdefault(key, CallCounter(0, _DISCARD.append, 0))

    def _number(self, call: Call) -> int:
        if call.collective in UNORDERED:
            # The root is the peer.
            self.has_all_peers &= len(self.kinds) < MAX_KINDS // 2
            call = call._replace(op=None, root=call.root if self.has_all_peers else None)
        if call in self.numbers:
            return self.numbers[call]
        too_many = len(self.kinds) >= MAX_KINDS
        if too_many:
            rounded = 1 << (call.elements - 1).bit_length() if call.elements else 0
            call = call._replace(elements=rounded)
            if call in self.numbers:
                return self.numbers[call]
        number = self.numbers[call] = len(self.kinds)
        self.kinds.append(call)
        if too_many:
            self.rounded.add(number)
        return number


# Calls whose line may begin with their name. Others may be the end of a longer name there.
_NAMED = frozenset({*Collective, *UNORDERED} - {"reduce", "gather", "scatter"})


def parse_coll(line: bytes) -> ParsedCall | None:
    """Parse a COLL line; None if it is cut in its name or before its type is complete."""
    match = _COLL.search(line)
    if match is None:
        return None
    mark, name, order, count, dtype, op, root, pointer, num_ranks = match.groups()
    if not mark and collective_named(name.decode()) not in _NAMED:
        return None
    rank = _GLOBAL_RANK.search(line, match.end())
    call = _call(name, count, dtype, op, root)
    ranks = _int(num_ranks)
    if ranks is not None and ranks > MAX_RANKS:
        ranks = None
    return ParsedCall(call, pointer or b"", int(order, 16), ranks, _int(rank and rank[1]))


def parse_call(line: bytes) -> ParsedCall | None:
    """Parse a CALL line of a collective or of Send and Recv; None for other API calls."""
    match = _CALL.search(line)
    if match is None:
        return None
    name, count, dtype, op, root, pointer = match.groups()
    return ParsedCall(_call(name, count, dtype, op, root), pointer, None, None, None)


def _call(
    name: bytes, count: bytes, dtype: bytes, op: bytes | None, root: bytes | None
) -> Call:
    plain = name.decode("ascii", errors="replace").removeprefix("mscclFunc")
    number = _int(op)
    return Call(
        collective=collective_named(plain),
        elements=int(count),
        dtype=min(int(dtype), 99),
        # Each process numbers its user-defined operations.
        op=None if number is None else min(number, len(_OPS)),
        root=_int(root),
    )


def _int(digits: bytes | None) -> int | None:
    return None if digits is None else int(digits)
