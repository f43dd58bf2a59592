"""Communicators of a debug log, and the tuner's predictions and choices for their calls."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stepmark.cases.message import message_bytes
from stepmark.findings.log_facts import (
    ChannelCounts,
    Choice,
    Communicator,
    Member,
    Prediction,
)
from stepmark.ground.grouping import group_by
from stepmark.job_logs.nccl_log.lines import (
    NAMES_OF,
    NUMBER,
    Calls,
    CallSequence,
    LogMessage,
)
from stepmark.model.collectives import collective_named

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class CommHandle(Member):
    """A communicator in one process: its rank there, and what log lines state of the whole."""

    order: int  # of first mention, from 0
    num_ranks: int | None = None
    comm_id: str | None = None
    num_nodes: int | None = None
    local_ranks: int | None = None
    rings: Counter[tuple[int, ...]] = field(default_factory=Counter)
    num_trees: int | None = None
    channels: ChannelCounts | None = None
    over_nvlink: bool | None = None  # whether a graph is; None: no line shows one
    coll: CallSequence = field(default_factory=CallSequence)
    api: CallSequence = field(default_factory=CallSequence)

    @property
    def key(self) -> str:
        """commId, else host:pid:pointer; "" where the lines are cut before the pointer."""
        if self.comm_id or not self.pointer:
            return self.comm_id or ""
        return f"{self.process}:{self.pointer}" if self.process else self.pointer

    @property
    def sequence(self) -> CallSequence:
        """The calls. With NCCL_DEBUG=TRACE each has lines of both kinds: one is counted."""
        return self.coll or self.api

    @property
    def is_known(self) -> bool:
        return bool(self.pointer or self.sequence or self.init)


class CommunicatorTable:
    """Communicators by process and pointer; a pointer can be reused after its end."""

    def __init__(self) -> None:
        self.handles: list[CommHandle] = []
        self._live: dict[tuple[str, str], CommHandle] = {}
        self._owners: dict[str, set[str]] = {}
        self._latest: dict[tuple[str, int | None], CommHandle] = {}

    def of(self, message: LogMessage, pointer: str) -> CommHandle:
        """Return the communicator of a line; without a process, that of the only owner."""
        process = message.process
        owners = self._owners.get(pointer, set())
        if not process and len(owners) == 1:
            (process,) = owners
        handle = self._live.get((process, pointer))
        if handle is None:
            handle = self._add(process, message.host, pointer)
        self._latest[message.process, message.device] = handle
        self._latest[message.process, None] = handle
        return handle

    def start(self, message: LogMessage, pointer: str, comm_id: str | None) -> CommHandle:
        """Return the communicator that starts here: a new one if the pointer was in use."""
        old = self._live.get((message.process, pointer))
        if old is not None and (old.completed or old.comm_id not in (None, comm_id)):
            self._add(message.process, message.host, pointer)
        handle = self.of(message, pointer)
        handle.comm_id = comm_id or handle.comm_id
        return handle

    def latest(self, message: LogMessage) -> CommHandle | None:
        """Return the one that this process and device named last; lines of links name none."""
        return self._latest.get((message.process, message.device)) or self._latest.get(
            (message.process, None)
        )

    def with_rank(self, message: LogMessage, rank: int, num_ranks: int) -> CommHandle | None:
        """Return the last one of the line's process with this rank and size."""
        key = (message.process, rank, num_ranks)
        latest = self.latest(message)
        for handle in ([latest] if latest else []) + self.handles[::-1]:
            if (handle.process, handle.rank, handle.num_ranks) == key:
                return handle
        return None

    def _add(self, process: str, host: str, pointer: str) -> CommHandle:
        order = len(self.handles)
        handle = CommHandle(process=process, host=host, pointer=pointer, order=order)
        self._live[process, pointer] = handle
        self._owners.setdefault(pointer, set()).add(process)
        self.handles.append(handle)
        return handle


def communicators_of(handles: Sequence[CommHandle]) -> tuple[Communicator, ...]:
    """Return communicators with the members that their ranks' lines name."""
    named = (handle for handle in handles if handle.pointer or handle.init)
    groups = group_by(named, lambda handle: handle.key)
    return tuple(_communicator(key, members) for key, members in groups.items())


def _communicator(key: str, handles: Sequence[CommHandle]) -> Communicator:
    num_ranks = _first(handle.num_ranks for handle in handles)
    num_nodes = _first(handle.num_nodes for handle in handles)
    ranks = {handle.rank for handle in handles}
    if len(ranks) == num_ranks and ranks == set(range(len(ranks))):
        # NCCL counts ranks that cannot share memory as nodes of their own, and containers of
        # one machine have several host names: the smaller number is right.
        num_hosts = len({handle.host for handle in handles})
        num_nodes = num_hosts if num_nodes is None else min(num_nodes, num_hosts)
    rings: dict[tuple[int, ...], int] = {}
    for handle in handles:
        for order, count in handle.rings.items():
            rings[order] = max(rings.get(order, 0), count)
    local_ranks = [handle.local_ranks for handle in handles if handle.local_ranks]
    return Communicator(
        key=key,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        local_ranks=max(local_ranks, default=None),
        members=tuple(
            Member(
                process=handle.process,
                host=handle.host,
                pointer=handle.pointer,
                rank=handle.rank,
                local_rank=handle.local_rank,
                device=handle.device,
                bus_id=handle.bus_id,
                started=handle.started,
                completed=handle.completed or bool(handle.sequence),
                destroyed=handle.destroyed,
                init=handle.init,
            )
            for handle in sorted(handles, key=lambda h: -1 if h.rank is None else h.rank)
        ),
        rings=tuple(rings.items()),
        num_trees=_first(handle.num_trees for handle in handles),
        channels=_first(handle.channels for handle in handles),
        over_nvlink=bool(_first(handle.over_nvlink for handle in handles)),
    )


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_SPELLINGS = {name.upper().replace("_", ""): name for name in (*_ALGORITHMS, *_PROTOCOLS)}
_CHOICE = re.compile(
    r"^(?:(\w+)( \[[\w ]+\])?: )?(\d{1,18}) Bytes -> (?:Algo (\w+) proto (\w+)"
    r"(?: time ([\d.]{1,20}))?(?: channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
    r"|Kernel (\S+) nchannels (\d{1,4}).*|(.+))$"
)
_CELL = re.compile(r"^ *(-?[\d.]{1,12})/ *(-?[\d.]{1,12}) *$")
_OLD_HEAD = re.compile(r"(\w+)/ *(\w+)")


class PredictionTable:
    """The tuner's printed table: headings name algorithms, three to a block; then rows."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str, str], Prediction] = {}
        self._heads: dict[tuple[str, int | None], list[tuple[str, str]]] = {}

    def add_row(self, message: LogMessage, communicator: str) -> None:
        """Add a line with columns; other lines are no part of the table."""
        name, _, rest = message.text.partition("|")
        name = name.strip()
        columns = [part.strip() for part in rest.split("|")]
        place = (message.process, message.device)
        if name == "Algorithm":
            algorithms = [_spelled(column) for column in columns if column]
            self._heads[place] = [(name, p) for name in algorithms for p in _PROTOCOLS]
        elif name == "Latency/AlgBw":
            heads = (_OLD_HEAD.match(column) for column in columns)
            self._heads[place] = [(_spelled(m[1]), _spelled(m[2])) for m in heads if m]
        elif collective_named(name) in NAMES_OF and place in self._heads:
            for head, column in zip(self._heads[place], columns, strict=False):
                self._add_cell(communicator, collective_named(name), *head, column)

    def _add_cell(
        self, communicator: str, collective: str, algorithm: str, protocol: str, text: str
    ) -> None:
        match = _CELL.match(text)
        latency, algbw = (
            (parse_float(digits) for digits in match.groups()) if match else (0.0, 0.0)
        )
        if latency is None or not algbw or algbw < 0:  # 0: not available, or switched off
            return
        prediction = Prediction(
            communicator=communicator,
            collective=collective,
            algorithm=algorithm,
            protocol=protocol,
            latency_s=latency * 1e-6,
            algbw_bytes_per_s=algbw * 1e9,
        )
        self.cells.setdefault((communicator, collective, algorithm, protocol), prediction)


class TuningChoices:
    """TUNING lines. Each kind of line is parsed once and counted by process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def counter(self, message: LogMessage) -> list[int] | None:
        """Return the counter of equal lines of this process; None if the line is no choice."""
        if _CHOICE.match(message.text) is None:
            return None
        return self._counts.setdefault((message.process, message.text), [0])

    def result(
        self, handles: Sequence[CommHandle], calls: Calls, num_ranks: int | None
    ) -> tuple[Choice, ...]:
        """Return all choices. The number of ranks is that of calls of equal size, if unique."""
        by_size, by_process = _ranks(handles, calls) if self._counts else ({}, {})
        counts: dict[Choice, int] = {}
        for (process, text), (count,) in self._counts.items():
            match = _CHOICE.match(text)
            assert match is not None
            choice = _choice(match)
            place = (process, choice.collective, choice.printed_bytes)
            ranks = by_size.get(place) or by_process.get(process) or {num_ranks}
            agreed_ranks = next(iter(ranks)) if len(ranks) == 1 else None
            if match[6] is None:  # a line with a time has the size of the message
                size = message_bytes(choice.collective, choice.printed_bytes, agreed_ranks)
                choice = replace(choice, message_bytes=size)
            counts[choice] = counts.get(choice, 0) + count
        return tuple(replace(choice, calls=count) for choice, count in counts.items())


def _choice(match: re.Match[str]) -> Choice:
    """Return the choice of a line, not yet counted, of a message of the printed size."""
    name, variant, size, algorithm, protocol, time, low, high, kernel, channels, other = (
        match.groups()
    )
    seconds = None if time is None else parse_float(time)
    description = (variant or "").strip(" []") or (other or "")
    return Choice(
        collective=collective_named(name or ""),
        printed_bytes=int(size),
        message_bytes=int(size),
        algorithm=_spelled(algorithm) if algorithm else description,
        protocol=_spelled(protocol, _PROTOCOLS) if protocol else (kernel or ""),
        channels=int(channels) if channels else int(high) - int(low) + 1 if high else None,
        time_s=None if seconds is None else seconds * 1e-6,
        calls=0,
    )


def _spelled(name: str, names: Sequence[str] = _ALGORITHMS) -> str:
    """Return our spelling of a name, or of its number."""
    if name.isascii() and name.isdecimal():
        return names[int(name)] if len(name) == 1 and int(name) < len(names) else name
    return _SPELLINGS.get(name.upper().replace("_", ""), name)


def parse_float(digits: str) -> float | None:
    """Return None for what is no number, such as 1.2.3 in a mangled line."""
    try:
        return float(digits)
    except ValueError:
        return None


def _ranks(
    handles: Sequence[CommHandle], calls: Calls
) -> tuple[dict[tuple[str, str, int], set[int | None]], dict[str, set[int | None]]]:
    """Return numbers of ranks by (process, collective, size) and by process."""
    by_size: dict[tuple[str, str, int], set[int | None]] = {}
    by_process: dict[str, set[int | None]] = {}
    for handle in handles:
        if handle.num_ranks is None:
            continue
        by_process.setdefault(handle.process, set()).add(handle.num_ranks)
        for key in set(handle.sequence.keys()) | handle.sequence.unordered.keys():
            call = calls.kinds[key & NUMBER]
            if (size := call.num_bytes()) is not None:
                place = (handle.process, call.collective, size)
                by_size.setdefault(place, set()).add(handle.num_ranks)
    return by_size, by_process
