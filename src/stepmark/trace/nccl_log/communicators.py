"""Communicators of a debug log: as one process knows them, and what these add up to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stepmark.core.finding import Evidence
from stepmark.core.log_facts import ChannelCounts, Communicator, Graph, InitTime, Member
from stepmark.core.message import Histogram, MessageKind, Tally
from stepmark.trace.nccl_log.calls import (
    DTYPES,
    UNKNOWN,
    Call,
    Calls,
    CallSequence,
    message_bytes,
)
from stepmark.trace.nccl_log.lines import LogMessage


@dataclass(slots=True, eq=False)
class CommHandle:
    """A communicator as one process knows it: its pointer, and what lines state of it."""

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
        """Calls. With NCCL_DEBUG=TRACE each has a line of both kinds: only one is counted."""
        return self.coll if self.coll.counters else self.api

    @property
    def is_known(self) -> bool:
        return bool(self.pointer or self.sequence.counters or self.init)


class CommunicatorTable:
    """Communicators by process and pointer; a pointer can be reused after its end."""

    def __init__(self) -> None:
        self.handles: list[CommHandle] = []
        self._live: dict[tuple[str, str], CommHandle] = {}
        self._owners: dict[str, set[str]] = {}
        self._latest: dict[tuple[str, int | None], CommHandle] = {}

    def of(self, message: LogMessage, pointer: str) -> CommHandle:
        """Return the one a line names. Without a process, the pointer's only owner is meant."""
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
        """Return the one that begins with this line: a new one where the pointer was in use."""
        old = self._live.get((message.process, pointer))
        if old is not None and (old.completed or old.comm_id not in (None, comm_id)):
            self._add(message.process, message.host, pointer)
        handle = self.of(message, pointer)
        handle.comm_id = comm_id or handle.comm_id
        return handle

    def latest(self, message: LogMessage) -> CommHandle | None:
        """Return the one that the line's process and device named last; links name none."""
        return self._latest.get((message.process, message.device)) or self._latest.get(
            (message.process, None)
        )

    def with_rank(self, message: LogMessage, rank: int, num_ranks: int) -> CommHandle | None:
        """Return the last one of the line's process with this rank of so many."""
        wanted = (message.process, rank, num_ranks)
        latest = self.latest(message)
        for handle in ([latest] if latest else []) + self.handles[::-1]:
            if (handle.process, handle.rank, handle.num_ranks) == wanted:
                return handle
        return None

    def _add(self, process: str, host: str, pointer: str) -> CommHandle:
        handle = CommHandle(process, host, pointer, order=len(self.handles))
        self._live[process, pointer] = handle
        self._owners.setdefault(pointer, set()).add(process)
        self.handles.append(handle)
        return handle


def communicators_of(handles: Sequence[CommHandle]) -> tuple[Communicator, ...]:
    """Return communicators with the members that their ranks' lines name."""
    groups: dict[str, list[CommHandle]] = {}
    for handle in handles:
        if handle.pointer or handle.init:
            groups.setdefault(handle.key, []).append(handle)
    return tuple(_communicator(key, members) for key, members in groups.items())


def _communicator(key: str, handles: Sequence[CommHandle]) -> Communicator:
    num_ranks = _first(handle.num_ranks for handle in handles)
    num_nodes = _first(handle.num_nodes for handle in handles)
    if num_nodes is None and num_ranks and _has_all_ranks(handles, num_ranks):
        num_nodes = len({handle.host for handle in handles})
    rings: dict[tuple[int, ...], int] = {}
    for handle in handles:
        for order, count in handle.rings.items():
            rings[order] = max(rings.get(order, 0), count)
    graphs = next((handle.graphs for handle in handles if handle.graphs), [])
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
                completed=handle.completed or bool(handle.sequence.counters),
                init=handle.init,
            )
            for handle in sorted(handles, key=lambda one: -1 if one.rank is None else one.rank)
        ),
        rings=tuple(rings.items()),
        num_trees=_first(handle.num_trees for handle in handles),
        channels=next((handle.channels for handle in handles if handle.channels), None),
        graphs=tuple(dict.fromkeys(graphs)),
        known_by_id=handles[0].comm_id is not None,
    )


def _has_all_ranks(handles: Sequence[CommHandle], num_ranks: int) -> bool:
    ranks = {handle.rank for handle in handles}
    known = {rank for rank in ranks if rank is not None}
    return len(known) == len(ranks) == num_ranks == max(known) + 1


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def histogram_of(
    handles: Sequence[CommHandle], calls: Calls, num_ranks: int | None
) -> tuple[Histogram, int]:
    """Return (messages by kind, calls that were counted at a rounded size).

    phase: PyTorch runs the backward pass in a thread of its own (autograd's), so where a
    process issued calls both from its first thread and from another, the first thread's are
    "forward" (including the optimizer's) and the others' "backward". A process whose calls come
    from one side alone proves nothing: "".
    """
    threads: dict[str, set[int]] = {}
    for handle in handles:
        known = {key % 3 for key in handle.sequence.counters if key % 3 != UNKNOWN}
        threads.setdefault(handle.process, set()).update(known)
    counts: Counter[MessageKind] = Counter()
    ranks: Counter[MessageKind] = Counter()
    num_rounded = 0
    for handle in handles:
        kinds = set()
        for key, counter in handle.sequence.counters.items():
            has_both = len(threads[handle.process]) == 2 and handle.process
            phase = ("backward", "forward", "")[key % 3] if has_both else ""
            call = calls.listed[key // 3]
            kind = _message_kind(call, handle, phase, handle.num_ranks or num_ranks)
            if kind is None:
                calls.unread += counter.calls
                continue
            counts[kind] += counter.calls
            num_rounded += counter.calls if key // 3 in calls.rounded else 0
            kinds.add(kind)
        ranks.update(kinds)
    tallies = {
        kind: Tally(calls=count, ranks=ranks[kind]) for kind, count in counts.items() if count
    }
    return tallies, num_rounded


def _message_kind(
    call: Call, handle: CommHandle, phase: str, num_ranks: int | None
) -> MessageKind | None:
    call_bytes = call.num_bytes()
    if call_bytes is None:
        return None
    return MessageKind(
        collective=call.collective,
        dtype=DTYPES[call.dtype],
        group=handle.key,
        num_ranks=num_ranks,
        phase=phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes(call.collective, call_bytes, num_ranks),
    )
