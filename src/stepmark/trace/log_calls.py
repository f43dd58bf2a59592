"""Calls of a debug log: COLL and CALL lines, and what they add up to.

Long (over 250 lines) because a call's parts, its count and its place in a sequence stand in
the same line and share their tables. Enum numbers are those of nccl.h, as printed.
"""

import re
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from stepmark.core.collectives import FACTS, Collective, Parts, num_parts
from stepmark.core.dtypes import DType
from stepmark.core.finding import Evidence
from stepmark.core.log_facts import MAX_RANKS, ChannelCounts, Graph, InitTime
from stepmark.core.message import Histogram, MessageKind, Tally

_DTYPES = (
    *(DType.INT8, DType.UINT8, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64),
    *(DType.FP16, DType.FP32, DType.FP64, DType.BF16, DType.FP8_E4M3, DType.FP8_E5M2),
)
_OPS = ("sum", "prod", "max", "min", "avg")
NAMES = {
    "AllReduce": Collective.ALL_REDUCE,
    "AllGather": Collective.ALL_GATHER,
    "ReduceScatter": Collective.REDUCE_SCATTER,
    "Broadcast": Collective.BROADCAST,
    "Bcast": Collective.BROADCAST,
    "Reduce": Collective.REDUCE,
    "AlltoAll": Collective.ALL_TO_ALL,
    "AllToAll": Collective.ALL_TO_ALL,
    "AlltoAllv": Collective.ALL_TO_ALL_V,
    "AllToAllv": Collective.ALL_TO_ALL_V,
    "Gather": Collective.GATHER,
    "Scatter": Collective.SCATTER,
    "Send": "send",
    "Recv": "recv",
}
NAMES_OF = {str(name): name for name in Collective}
# Threads of a process: any but the first, the first, one that the line does not name.
OTHER, FIRST, UNKNOWN = range(3)
_UNCOMPARED = ("send", "recv")  # each rank has its own
# More distinct kinds than this would be sizes that change with every call.
MAX_KINDS = 100_000

_COLL = re.compile(
    rb"(\w+): opCount ([0-9a-f]{1,16}) .{0,200}? count (\d{1,18}) datatype (\d{1,4}) "
    rb"(?:op (\d{1,9}) (?:root (-?\d{1,9}) "
    rb"(?:comm (0x[0-9a-f]+) (?:\[nranks=(\d{1,9})\])?)?)?)?"
)
_GLOBAL_RANK = re.compile(rb" globalrank (\d{1,9})")
_CALL = re.compile(
    rb"nccl(\w+)\([0-9a-fx]+,[0-9a-fx]+,(\d{1,18}),(\d{1,4}),(\d{1,9}),(-?\d{1,9}),(0x[0-9a-f]+|[0-9a-f]+),"
)


class Call(NamedTuple):
    """One call as its line says. Equal calls of the ranks of a communicator match."""

    collective: str
    elements: int  # the count of the line
    dtype: int
    op: int | None
    root: int | None

    def num_bytes(self) -> int | None:
        """What the count amounts to; None for a type unknown to us."""
        known = self.dtype < len(_DTYPES)
        return self.elements * _DTYPES[self.dtype].itemsize if known else None

    def text(self) -> str:
        """As people read it, e.g. "all_gather of 512 bf16"."""
        kind = str(_DTYPES[self.dtype]) if self.dtype < len(_DTYPES) else f"type {self.dtype}"
        words = f"{self.collective} of {self.elements} {kind}"
        known = NAMES_OF.get(self.collective)
        if known and FACTS[known].reduces and self.op is not None:
            words += f", {_OPS[self.op] if self.op < len(_OPS) else 'user-made op'}"
        if known and FACTS[known].rooted and self.root is not None:
            words += f", root {self.root}"
        return words


class Parsed(NamedTuple):
    """A call and where it was issued; pointer b"" where the line is cut before it."""

    call: Call
    pointer: bytes
    op_count: int | None
    num_ranks: int | None
    global_rank: int | None


@dataclass(slots=True)
class Cell:
    """What one more line of a kind changes: a count, and the sequence of its communicator."""

    calls: int
    append: Callable[[int], None]
    base: int  # number of the call, in the upper half; the line's number goes below


@dataclass(slots=True)
class Stream:
    """Calls of one communicator on one rank, in the order of their lines.

    A call takes 8 bytes: 4 for what it is, 4 for its line.
    """

    calls: "array[int]" = field(default_factory=lambda: array("Q"))
    files: list[tuple[int, int]] = field(default_factory=list)
    first_op_count: int | None = None
    tallies: dict[int, Cell] = field(default_factory=dict)  # number of the call x 3 + thread

    def entered(self, file_index: int) -> None:
        """What follows stands in this file."""
        if not self.files or self.files[-1][1] != file_index:
            self.files.append((len(self.calls), file_index))

    def place(self, position: int) -> tuple[int, int]:
        """(file, line) of a call."""
        index = next(index for at, index in reversed(self.files) if at <= position)
        return index, self.calls[position] & 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class Handle:
    """A communicator as one process knows it: the pointer, and what lines said of it."""

    process: str
    host: str
    pointer: str
    order: int  # of all, from 0
    rank: int | None = None
    num_ranks: int | None = None
    comm_id: str | None = None
    num_nodes: int | None = None
    local_ranks: int | None = None
    local_rank: int | None = None
    device: int | None = None
    bus_id: str | None = None
    started: Evidence | None = None
    completed: bool = False
    init: InitTime | None = None
    rings: Counter[tuple[int, ...]] = field(default_factory=Counter)
    num_trees: int | None = None
    channels: ChannelCounts | None = None
    graphs: list[Graph] = field(default_factory=list)
    coll: Stream = field(default_factory=Stream)
    api: Stream = field(default_factory=Stream)

    @property
    def key(self) -> str:
        """commId, else host:pid:pointer; "" where the lines are cut before the pointer."""
        if self.comm_id or not self.pointer:
            return self.comm_id or ""
        return f"{self.process}:{self.pointer}" if self.process else self.pointer

    @property
    def stream(self) -> Stream:
        """With NCCL_DEBUG=TRACE each call has a line of both kinds: only one is counted."""
        return self.coll if self.coll.tallies else self.api


_NOTHING: deque[int] = deque(maxlen=0)


class Calls:
    """Numbers for calls, and cells to count them in."""

    def __init__(self) -> None:
        self.known: dict[Call, int] = {}
        self.listed: list[Call] = []
        self.rounded: set[int] = set()
        self.unread = 0
        self.broken: set[str] = set()  # processes of which calls are missing

    def cell(self, stream: Stream, call: Call, thread: int, *, compared: bool) -> Cell:
        """Where calls like this one, of this communicator and thread, are counted."""
        number = self._number(call)
        key = number * 3 + thread
        cell = stream.tallies.get(key)
        if cell is None:
            ordered = compared and call.collective not in _UNCOMPARED
            append = stream.calls.append if ordered else _NOTHING.append
            cell = stream.tallies[key] = Cell(0, append, number << 32)
        return cell

    def _number(self, call: Call) -> int:
        if call.collective in _UNCOMPARED:
            call = call._replace(op=None, root=None)
        number = self.known.get(call)
        if number is not None:
            return number
        too_many = len(self.listed) >= MAX_KINDS
        if too_many:
            call = call._replace(elements=_rounded_up(call.elements))
            if call in self.known:
                return self.known[call]
        number = self.known[call] = len(self.listed)
        self.listed.append(call)
        if too_many:
            self.rounded.add(number)
        return number


def _rounded_up(elements: int) -> int:
    return 1 << (elements - 1).bit_length() if elements else 0


def parsed_coll(line: bytes) -> Parsed | None:
    """A COLL line; None if it is cut before its count and type are sure to be whole."""
    found = _COLL.search(line)
    if found is None:
        return None
    name, order, count, dtype, op, root, pointer, num_ranks = found.groups()
    rank = _GLOBAL_RANK.search(line, found.end())
    call = _call(name, count, dtype, op, root)
    ranks = _int(num_ranks)
    if ranks is not None and ranks > MAX_RANKS:
        ranks = None
    return Parsed(call, pointer or b"", int(order, 16), ranks, _int(rank and rank[1]))


def parsed_call(line: bytes) -> Parsed | None:
    """A CALL line of a collective or of Send and Recv; None for other API calls."""
    found = _CALL.search(line)
    if found is None:
        return None
    name, count, dtype, op, root, pointer = found.groups()
    return Parsed(_call(name, count, dtype, op, root), pointer, None, None, None)


def _call(
    name: bytes, count: bytes, dtype: bytes, op: bytes | None, root: bytes | None
) -> Call:
    plain = name.decode("ascii", errors="replace").removeprefix("mscclFunc")
    collective = str(NAMES.get(plain, plain.lower()))
    number = _int(op)
    return Call(
        collective=collective,
        elements=int(count),
        dtype=min(int(dtype), 99),
        # User-made operations are numbered by each process for itself.
        op=None if number is None else min(number, len(_OPS)),
        root=_int(root),
    )


def _int(digits: bytes | None) -> int | None:
    return None if digits is None else int(digits)


def histogram(
    handles: Iterable[Handle], calls: Calls, num_ranks: int | None
) -> tuple[Histogram, int]:
    """(messages by kind, calls that were counted at a rounded size).

    phase: PyTorch runs the backward pass in a thread of its own (autograd's), so where a
    process issued calls both from its first thread and from another, the first thread's are
    "forward" (whatever else it did, the optimizer's included) and the others' "backward". A
    process whose calls come from one side alone proves nothing: "".
    """
    held = list(handles)
    sides: dict[str, set[int]] = {}
    for handle in held:
        mains = {key % 3 for key in handle.stream.tallies if key % 3 != UNKNOWN}
        sides.setdefault(handle.process, set()).update(mains)
    counts: Counter[MessageKind] = Counter()
    ranks: dict[MessageKind, int] = {}
    rounded = 0
    for handle in held:
        seen = set()
        for key, cell in handle.stream.tallies.items():
            both = len(sides[handle.process]) == 2 and handle.process
            phase = ("backward", "forward", "")[key % 3] if both else ""
            call = calls.listed[key // 3]
            kind = _kind(call, handle, phase, handle.num_ranks or num_ranks)
            if kind is None:
                calls.unread += cell.calls
                continue
            counts[kind] += cell.calls
            rounded += cell.calls if key // 3 in calls.rounded else 0
            seen.add(kind)
        for kind in seen:
            ranks[kind] = ranks.get(kind, 0) + 1
    return {k: Tally(calls=n, ranks=ranks[k]) for k, n in counts.items() if n}, rounded


def _kind(call: Call, handle: Handle, phase: str, num_ranks: int | None) -> MessageKind | None:
    call_bytes = call.num_bytes()
    if call_bytes is None:
        return None
    return MessageKind(
        collective=call.collective,
        dtype=_DTYPES[call.dtype],
        group=handle.key,
        num_ranks=num_ranks,
        phase=phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes(call.collective, call_bytes, num_ranks),
    )


def message_bytes(collective: str, call_bytes: int, num_ranks: int | None) -> int | None:
    """The size as nccl-tests counts it; None where it takes the unknown number of ranks."""
    known = NAMES_OF.get(collective)
    if known is None:
        return call_bytes if collective in _UNCOMPARED else None
    if FACTS[known].parts is Parts.WHOLE:
        return call_bytes
    return None if num_ranks is None else call_bytes * num_parts(known, num_ranks)
