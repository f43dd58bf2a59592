"""Collect the facts of a debug log while it is read, and return them at the end.

Among them are its messages by kind.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from stepmark.cases.message import Histogram, MessageKind, Tally, message_bytes
from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import (
    AdapterSpeed,
    Communicator,
    GpuDirect,
    Interface,
    LogFacts,
    NicPath,
    NicUse,
    Occurrences,
    Plugin,
    StagedAdapter,
    Transport,
)
from stepmark.ground.read_text import printable
from stepmark.job_logs.failures import classify
from stepmark.job_logs.job_output import OutputReader
from stepmark.job_logs.nccl_log import mismatch
from stepmark.job_logs.nccl_log.communicators import (
    CommHandle,
    CommunicatorTable,
    PredictionTable,
    TuningChoices,
    communicators_of,
)
from stepmark.job_logs.nccl_log.lines import (
    DTYPES,
    FIRST,
    NUMBER,
    OTHER,
    THREAD_BITS,
    Call,
    Calls,
    LogMessage,
)

_MAX_EVIDENCE = 3
_MAX_SIMILAR = 500
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_GPUDIRECT = re.compile(
    r"^(?:NET/(.+?) ?: )?GPU Direct RDMA (Enabled|Disabled) for (?:GPU (\S+) / )?"
    r"HCA (\S+?)(?: '([^']*)')?(?: \(distance (\w+) (?:<=|>) (\w+)\))?(?:[, ].*)?$"
)

Key = TypeVar("Key")


class AdapterSide(NamedTuple):
    """A rank's end of connections through a network device, of which side and with what.

    NCCL decides on GPUDirect RDMA by GPU, device and direction: all channels have it or none.
    """

    handle: int  # order of its communicator
    rank: int
    side: int  # 0: it sends, 1: it receives
    kind: str
    device: int
    proxy: str | None  # the rank whose adapter it is, with PXN


class Link(NamedTuple):
    """A connection as a line of one of its channels states it."""

    kind: str
    source: int
    target: int | None

    def is_within(self, num_ranks: int | None) -> bool:
        """Return whether the communicator has these ranks; a torn line may name others."""
        return num_ranks is None or max(self.source, self.target or 0) < num_ranks


@dataclass(slots=True)
class OccurrenceCounter:
    """Counts lines that state the same, and keeps the first."""

    lines: int = 0
    processes: set[str] = field(default_factory=set)
    hosts: dict[str, None] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, message: LogMessage) -> None:
        self.lines += 1
        self.hosts[message.host] = None
        if message.process:
            self.processes.add(message.process)
        if len(self.evidence) < _MAX_EVIDENCE:
            self.evidence.append(message.evidence())

    def result(self, torn: Set[str]) -> Occurrences:
        return Occurrences(
            lines=self.lines,
            processes=len(self.processes - torn),
            hosts=tuple(self.hosts),
            evidence=tuple(self.evidence),
        )


@dataclass(slots=True)
class StagedLines:
    """Lines without GPUDirect RDMA by the name of their channel, and the first of them."""

    first: LogMessage
    channels: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class LinkLines:
    """Number of lines of a connection's sending and receiving side, and the first line."""

    first: LogMessage
    sides: list[int] = field(default_factory=lambda: [0, 0])
    pxn: list[int] = field(default_factory=lambda: [0, 0])
    staged: dict[AdapterSide, StagedLines] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return max(self.sides)

    def add(self, other: "LinkLines", direct: Container[AdapterSide]) -> None:
        """Add the lines of another process; direct: adapters with GPUDirect RDMA."""
        for side in (0, 1):
            self.sides[side] += other.sides[side]
            self.pxn[side] += other.pxn[side]
        for end, lines in other.staged.items():
            # A line without the words, where others of this end have them, is cut.
            if end not in direct:
                self.staged[end] = lines

    def num_direct(self, kind: str) -> int:
        """Return the number of channels with GPUDirect RDMA, which both ends must have."""
        if not kind.startswith(("NET/", "COLLNET/")):
            return 0
        staged = Counter[str]()
        for lines in self.staged.values():
            staged |= lines.channels
        return max(0, self.channels - staged.total())

    def staged_adapters(self) -> tuple[StagedAdapter, ...]:
        return tuple(
            StagedAdapter(
                rank=end.rank,
                device=end.device,
                evidence=lines.first.evidence(),
            )
            for end, lines in self.staged.items()
        )

    def sides_with(self, lines: Sequence[int]) -> list[bool]:
        """Return for each side whether most of its lines state it: a torn one may not."""
        pairs = zip(lines, self.sides, strict=True)
        return [2 * part > whole for part, whole in pairs if whole]


SimilarTable = dict[str, tuple[str, OccurrenceCounter]]


class Collector:
    """Facts that the handlers of lines have recorded so far."""

    def __init__(self) -> None:
        self.communicators = CommunicatorTable()
        self.calls = Calls()
        self.output = OutputReader()
        self.aborted: list[Evidence] = []
        self.predictions = PredictionTable()
        self.choices = TuningChoices()
        self.processes: dict[str, Evidence] = {}  # with their first line
        self.num_messages: Counter[str] = Counter()  # by process, without calls
        self.versions: dict[tuple[str, str], OccurrenceCounter] = {}
        self.environment: dict[tuple[str, str], OccurrenceCounter] = {}
        self.networks: dict[str, OccurrenceCounter] = {}
        self.nvls: dict[bool, OccurrenceCounter] = {}
        self.warnings: SimilarTable = {}
        self.harmless: SimilarTable = {}
        self.p2p_disabled: SimilarTable = {}
        self.links: dict[tuple[int, Link], LinkLines] = {}
        self.direct: set[AdapterSide] = set()  # with GPUDirect RDMA
        # The first line by communicator, rank and device.
        self.nics: dict[tuple[int, int, int], LogMessage] = {}
        self.forget_counters: Callable[[str], None] = lambda process: None
        self.plugins: dict[Plugin, OccurrenceCounter] = {}
        self.interfaces: dict[Interface, OccurrenceCounter] = {}
        self.gpudirect: dict[GpuDirect, OccurrenceCounter] = {}
        self.adapter_speeds: dict[AdapterSpeed, OccurrenceCounter] = {}
        self.nic_paths: dict[NicPath, OccurrenceCounter] = {}

    def count(self, table: dict[Key, OccurrenceCounter], key: Key, message: LogMessage) -> None:
        """Count a line of the fact `key`."""
        table.setdefault(key, OccurrenceCounter()).add(message)

    def count_similar(self, table: SimilarTable, message: LogMessage) -> None:
        """Count a line among those that differ from it in numbers alone."""
        key = _NUMBER.sub("#", message.text)[:300]
        if key in table or len(table) < _MAX_SIMILAR:
            table.setdefault(key, (message.text, OccurrenceCounter()))[1].add(message)

    def warn(self, message: LogMessage) -> None:
        """Count a WARN line, also as a failure if a rule knows it."""
        self.count_similar(self.warnings, message)
        if classify(printable(message.line)) is not None:
            self.output.read(message.line, message.number, message.process)

    def add_plugin(
        self, message: LogMessage, kind: str, event: str, name: str, api: int | None = None
    ) -> None:
        self.count(self.plugins, Plugin(kind, event, name, api), message)

    def add_interface(self, message: LogMessage, role: str, name: str, address: str) -> None:
        self.count(self.interfaces, Interface(role, name, address), message)

    def add_gpudirect(self, message: LogMessage) -> None:
        if match := _GPUDIRECT.match(message.text):
            net, state, gpu, index, name, distance, level = match.groups()
            device = name or (f"GPU {gpu} / HCA {index}" if gpu else f"HCA {index}")
            use = GpuDirect(state == "Enabled", net or "", device, distance, level)
        else:
            use = GpuDirect(False, "OFI", message.text, None, None)
        self.count(self.gpudirect, use, message)

    def result(self, files: Sequence[Path], num_lines: int, num_ranks: int | None) -> LogFacts:
        """Return all facts, after the last line was read."""
        known = [handle for handle in self.communicators.handles if handle.is_known]
        lines_of = self.num_messages.copy()
        for handle in known:
            lines_of[handle.process] += handle.sequence.num_calls
        torn = torn_names(lines_of)
        whole = [handle for handle in known if handle.comm_id]
        handles = [
            handle
            for handle in known
            if handle.process not in torn and not _is_cut(handle, whole)
        ]
        processes = tuple(name for name in self.processes if name not in torn)
        compared = mismatch.compare_sequences(handles, self.calls, files)
        messages, num_rounded = histogram_of(handles, self.calls, num_ranks)
        communicators = communicators_of(handles)
        failures, progress, absent = self.output.result(
            _rank_by_process(communicators, has_pids=len(files) == 1)
        )
        return LogFacts(
            files=tuple(str(path) for path in files),
            num_lines=num_lines,
            hosts=tuple(dict.fromkeys(name.rpartition(":")[0] for name in processes)),
            processes=processes,
            torn=tuple(self.processes[name] for name in self.processes if name in torn),
            torn_lines=sum(lines_of[name] for name in torn),
            versions=_results(self.versions, torn),
            environment=_results(self.environment, torn),
            networks=_results(self.networks, torn),
            nvls=_results(self.nvls, torn),
            communicators=communicators,
            transports=self._transports(communicators, torn),
            nics=self._nic_uses(torn),
            plugins=_results(self.plugins, torn),
            interfaces=_results(self.interfaces, torn),
            gpudirect=_results(self.gpudirect, torn),
            adapter_speeds=_results(self.adapter_speeds, torn),
            nic_paths=_results(self.nic_paths, torn),
            predictions=tuple(self.predictions.cells.values()),
            choices=self.choices.result(handles, self.calls, num_ranks),
            warnings=_results(dict(self.warnings.values()), torn),
            harmless=_results(dict(self.harmless.values()), torn),
            p2p_disabled=_results(dict(self.p2p_disabled.values()), torn),
            messages=messages,
            mismatches=tuple(compared.mismatches),
            behind=tuple(compared.lagging),
            peers=tuple(compared.peers),
            lost=tuple(compared.lost),
            failures=failures,
            progress=progress,
            absent=absent,
            endings=tuple(self.output.endings.values()),
            aborted=tuple(self.aborted),
            has_steps=self.output.num_trainings > 0,
            stopped=tuple(self.output.stopped),
            after_ends=tuple(self.output.after_ends.values()),
            unread_calls=self.calls.unread,
            rounded_calls=num_rounded,
        )

    def _transports(
        self, communicators: Sequence[Communicator], torn: Container[str]
    ) -> tuple[Transport, ...]:
        hosts = {
            group.key: {member.rank: member.host for member in group.members}
            for group in communicators
        }
        nodes = {group.key: group.num_nodes for group in communicators}
        # Every process of a communicator logs its own side of a link.
        joined: dict[tuple[str, Link], LinkLines] = {}
        num_kinds = Counter[str]()
        for (index, link), lines in self.links.items():
            handle = self.communicators.handles[index]
            if handle.process in torn or not link.is_within(handle.num_ranks):
                continue
            num_kinds[link.kind] += sum(lines.sides)
            joined.setdefault((handle.key, link), LinkLines(lines.first)).add(
                lines, self.direct
            )
        cut = _cut_kinds(num_kinds)
        transports = []
        for (communicator, link), lines in joined.items():
            if link.kind in cut:
                continue
            host_of = hosts.get(communicator, {})
            target = None if link.target is None else host_of.get(link.target)
            link_hosts = (host_of.get(link.source), target)
            transports.append(
                Transport(
                    communicator=communicator,
                    kind=link.kind,
                    source=link.source,
                    target=link.target,
                    same_host=_same_host(link.kind, link_hosts, nodes.get(communicator)),
                    channels=lines.channels,
                    gdrdma_channels=lines.num_direct(link.kind),
                    pxn=any(lines.sides_with(lines.pxn)),
                    evidence=lines.first.evidence(),
                    staged=lines.staged_adapters(),
                )
            )
        return tuple(transports)

    def _nic_uses(self, torn: Container[str]) -> tuple[NicUse, ...]:
        return tuple(
            NicUse(
                communicator=self.communicators.handles[index].key,
                rank=rank,
                host=first.host,
                device=device,
                evidence=first.evidence(),
            )
            for (index, rank, device), first in self.nics.items()
            if self.communicators.handles[index].process not in torn
        )


def _is_cut(handle: CommHandle, whole: Sequence[CommHandle]) -> bool:
    """Return whether the pointer is the beginning of one whose start the log has."""
    return not (handle.comm_id or handle.sequence) and any(
        handle.process in ("", other.process) and other.pointer.startswith(handle.pointer)
        for other in whole
    )


def _cut_kinds(num_kinds: Mapping[str, int]) -> set[str]:
    """Return kinds of torn lines: less, or more, than the words of a far more frequent one."""
    return {
        kind
        for kind, lines in num_kinds.items()
        for other, others in num_kinds.items()
        if lines * MIN_RATIO <= others
        and kind != other
        and (other.startswith(kind) or kind.startswith(other))
    }


def _rank_by_process(
    groups: Sequence[Communicator], *, has_pids: bool
) -> Callable[[str], int | None]:
    """Return a function from host:pid to the rank in the largest communicator.

    has_pids: also from "pid N", if one process has it; hosts of other files may have it too.
    """
    by_size = sorted(groups, key=lambda group: group.num_ranks or 0)
    members = [member for group in by_size for member in group.members]
    ranks = {m.process: m.rank for m in members if m.rank is not None and m.process}
    if has_pids:
        pids = Counter(name.rpartition(":")[2] for name in ranks)
        named = [(name.rpartition(":")[2], rank) for name, rank in ranks.items()]
        ranks |= {f"pid {pid}": rank for pid, rank in named if pids[pid] == 1}
    return ranks.get


def _results(table: Mapping[Key, OccurrenceCounter], torn: Set[str]) -> dict[Key, Occurrences]:
    return {key: counter.result(torn) for key, counter in table.items()}


def _same_host(
    kind: str, hosts: tuple[str | None, str | None], nodes: int | None
) -> bool | None:
    if kind == "SHM" or (kind.startswith("P2P/") and kind != "P2P/MNNVL") or nodes == 1:
        return True
    if kind.startswith("COLLNET/"):
        return False
    return None if None in hosts else hosts[0] == hosts[1]


# A process writes at least so many times as many lines as torn ones of it look like another.
MIN_RATIO = 8


def torn_names(num_lines: Mapping[str, int]) -> set[str]:
    """Return the processes (host:pid) that only torn lines name, given the lines of each.

    A line cut in front names a host that ends like the right one; one that begins inside
    another line names a host that ends with the right one.
    """
    by_pid: dict[str, dict[str, int]] = {}
    for process, lines in num_lines.items():
        host, _, pid = process.rpartition(":")
        by_pid.setdefault(pid, {})[host] = lines
    torn = set()
    for pid, hosts in by_pid.items():
        frequent = sorted(((lines, host) for host, lines in hosts.items()), reverse=True)
        for host, lines in hosts.items():
            for others, other in frequent:
                if others < lines * MIN_RATIO:
                    break
                is_part = other.endswith(host) or host.endswith(other)
                if host and host != other and is_part:
                    torn.add(f"{host}:{pid}")
                    break
    return torn


@dataclass(slots=True)
class _GroupCalls:
    """Calls of a communicator by key, and on how many ranks each was issued."""

    members: list[CommHandle] = field(default_factory=list)
    totals: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    def count(self) -> None:
        """Count the calls of all members; those of most are equal, and are counted once."""
        copies = Counter(map(_calls_of, self.members))
        for (keys, unordered), num_copies in copies.items():
            own = Counter(array("I", keys))
            own.update(dict(unordered))
            for key, num_calls in own.items():
                self.totals[key] += num_calls * num_copies
                self.ranks[key] += num_copies

    def kinds(self, plain: Sequence[int], has_both: bool) -> dict[int, list[int]]:
        """Return the keys of each kind; plain: calls without operation and root, by number."""
        kinds: dict[int, list[int]] = {}
        for key in self.totals:
            thread = key & ~NUMBER if has_both else 0
            kinds.setdefault(thread | plain[key & NUMBER], []).append(key)
        if len(kinds) < len(self.totals):
            first = {key: keys[0] for keys in kinds.values() for key in keys}
            self.ranks.clear()
            for handle in self.members:
                own = set(handle.sequence.keys()) | handle.sequence.unordered.keys()
                self.ranks.update({first[key] for key in own})
        return kinds


def _calls_of(handle: CommHandle) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return the keys of the calls in order, and the numbers of those that have no order."""
    unordered = handle.sequence.unordered.items()
    calls = tuple((key, counter.calls) for key, counter in unordered)
    return handle.sequence.keys().tobytes(), calls


def histogram_of(
    handles: Sequence[CommHandle], calls: Calls, num_ranks: int | None
) -> tuple[Histogram, int]:
    """Return (messages by kind, calls that were counted at a rounded size).

    phase: PyTorch runs the backward pass in a thread of its own (autograd's), so where a
    process issued calls both from its first thread and from another, the first thread's are
    "forward" (including the optimizer's) and the others' "backward". It is "" where all calls
    of a process come from one of the two.
    """
    threads: dict[str, set[int]] = {}
    for handle in handles:
        threads.setdefault(handle.process, set()).update(handle.sequence.threads)
    groups: dict[tuple[str, int | None, bool], _GroupCalls] = {}
    for handle in handles:
        has_both = bool(handle.process) and threads[handle.process] >= {FIRST, OTHER}
        name = (handle.key, handle.num_ranks or num_ranks, has_both)
        groups.setdefault(name, _GroupCalls()).members.append(handle)
    tallies: Histogram = {}
    num_rounded = 0
    numbers: dict[Call, int] = {}
    plain = [
        numbers.setdefault(call._replace(op=None, root=None), number)
        for number, call in enumerate(calls.kinds)
    ]
    bytes_of = [call.num_bytes() for call in calls.kinds]  # by number
    sizes: dict[tuple[int, int | None], int | None] = {}
    for (group, size, has_both), own in groups.items():
        own.count()
        for merged, keys in own.kinds(plain, has_both).items():
            number = merged & NUMBER
            call = calls.kinds[number]
            total = sum(own.totals[key] for key in keys)
            call_bytes = bytes_of[number]
            if call_bytes is None:
                calls.unread += total
                continue
            if (number, size) not in sizes:
                sizes[number, size] = message_bytes(call.collective, call_bytes, size)
            kind = MessageKind(
                collective=call.collective,
                dtype=DTYPES[call.dtype],
                group=group,
                num_ranks=size,
                phase=("backward", "forward", "")[merged >> THREAD_BITS] if has_both else "",
                call_bytes=call_bytes,
                message_bytes=sizes[number, size],
            )
            tallies[kind] = Tally(calls=total, ranks=own.ranks[keys[0]])
            if calls.rounded:
                rounded = (own.totals[key] for key in keys if key & NUMBER in calls.rounded)
                num_rounded += sum(rounded)
    return tallies, num_rounded
