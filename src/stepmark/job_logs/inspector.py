"""Read the output of NCCL's inspector, a profiler plugin: one JSON line per operation.

Up to format 4.2 each line has its communicator as `header`; from 4.3 on only the `dump_stats`
line before them has it. Sizes are per rank for collectives with a part of each rank. The
format is that of plugins/profiler/inspector in the sources of NCCL.

Over 250 lines: one format, read in one pass, and findings on its gaps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.cases.message import RECV, SEND, Histogram, MessageKind, Tally, message_bytes
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.json_text import as_object
from stepmark.ground.read_text import open_binary
from stepmark.ground.units import ranks_text
from stepmark.model.collectives import FACTS, Collective, collective_named

MAX_LINE_BYTES = 2**24
# NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, unless it was set.
DEFAULT_FLOOR_BYTES = 8192
KERNEL_GPU = "kernel_gpu"  # the device's clock; the others are the host's

_NAMES = {*Collective, SEND, RECV}


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFacts:
    """Facts of the lines of one job."""

    histogram: Histogram
    num_ranks_seen: int  # that wrote lines
    timing_sources: dict[str, int]  # operations by clock; "" where the format has none
    algorithms: dict[tuple[str, str, str], int]  # (collective, algorithm, protocol), operations
    versions: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communicator:
    id: str
    name: str
    rank: int | None
    num_ranks: int | None
    process: tuple[str, str]  # host, pid

    @property
    def label(self) -> str:
        return self.id if self.name in ("", "unknown") else f"{self.name} {self.id}".strip()


@dataclass(slots=True, kw_only=True)
class _Total:
    """Operations of one kind and clock."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    ranks: set[object] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _State:
    """Totals of the lines read so far."""

    totals: dict[MessageKind, dict[str, _Total]] = field(default_factory=dict)
    # process -> communicator -> its ranks there
    ranks: dict[tuple[str, str], dict[str, set[int | None]]] = field(default_factory=dict)
    versions: dict[str, None] = field(default_factory=dict)
    dropped: dict[object, int] = field(default_factory=dict)
    algorithms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    unread: list[Evidence] = field(default_factory=list)
    num_unread: int = 0
    smallest: int | None = None
    first_drop: Evidence | None = None
    # Communicator and collective -> rank -> its last number, and file and line that has it.
    last: dict[tuple[str, str], dict[int, tuple[int, str, int]]] = field(default_factory=dict)


def looks_like_inspector(head: bytes) -> bool:
    """Return whether a file that begins so holds lines of the inspector."""
    start = head.lstrip()
    return start[:1] == b"{" and any(
        key in start for key in (b'"coll_perf"', b'"p2p_perf"', b'"dump_stats"')
    )


def read_inspector(paths: Sequence[Path]) -> InspectorFacts:
    """Read all files of one job, plain or gzip. Raises ConfigError, also for no operation."""
    state = _State()
    for path in paths:
        with open_binary(path) as stream:
            lines = iter(lambda: stream.readline(MAX_LINE_BYTES), b"")
            _read_lines(lines, str(path), state)
    if not state.totals:
        raise ConfigError("file", paths[0], "inspector lines with coll_perf or p2p_perf")
    return _facts(state)


def _read_lines(lines: Iterable[bytes], file: str, state: _State) -> None:
    """Add a file's lines; count lines that are no records of the inspector."""
    current: _Communicator | None = None
    unknown = _Communicator(id="", name="", rank=None, num_ranks=None, process=(file, ""))
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            state.num_unread += 1
            if len(state.unread) < 3:
                text = line[:100].decode("utf-8", "replace").strip()
                state.unread.append(Evidence(file=file, line=number, text=text))
            continue
        if isinstance(record.get("header"), dict):
            current = _communicator(record, file)
            metadata = record.get("metadata")
            if isinstance(metadata, dict):
                version = metadata.get("inspector_output_format_version")
                state.versions.setdefault(str(version)[:20])
        if isinstance(stats := record.get("dump_stats"), dict):
            _add_stats(state, stats, current, Evidence(file=file, line=number, text=""))
        for prefix in ("coll", "p2p"):
            if isinstance(fields := record.get(f"{prefix}_perf"), dict):
                _add(state, fields, prefix, current or unknown, (file, number))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json_text.decode(line)
    except ValueError:
        return None
    keys = {"header", "coll_perf", "p2p_perf", "dump_stats", "proxy_trace"}
    return record if isinstance(record, dict) and keys & record.keys() else None


def _communicator(record: Mapping[str, Any], file: str) -> _Communicator:
    header = record["header"]
    process = as_object(record.get("metadata"))
    num_ranks = _integer(header.get("n_ranks"))
    return _Communicator(
        id=str(header.get("id") or "")[:60],
        name=str(header.get("comm_name") or "")[:60],
        rank=_integer(header.get("rank")),
        num_ranks=num_ranks if num_ranks and num_ranks <= MAX_RANKS else None,
        process=(str(process.get("hostname") or file)[:200], str(process.get("pid", ""))[:20]),
    )


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**60:
        return None
    return int(value)


def _add(
    state: _State,
    fields: Mapping[str, Any],
    prefix: str,
    communicator: _Communicator,
    place: tuple[str, int],
) -> None:
    name = collective_named(str(fields.get(prefix) or ""))
    size = _integer(fields.get(f"{prefix}_msg_size_bytes"))
    if name not in _NAMES or size is None:
        state.num_unread += 1
        return
    kind = MessageKind(
        collective=name,
        dtype="",
        group=communicator.label,
        num_ranks=communicator.num_ranks,
        phase="",
        call_bytes=size,
        message_bytes=message_bytes(name, size, communicator.num_ranks),
    )
    source = str(fields.get(f"{prefix}_timing_source") or "")[:40]
    total = state.totals.setdefault(kind, {}).setdefault(source, _Total())
    total.calls += 1
    seconds = _microseconds(fields.get(f"{prefix}_exec_time_us"))
    if seconds is not None:
        total.timed += 1
        total.seconds += seconds
    total.ranks.add((communicator.process, communicator.rank))
    sequence = _integer(fields.get("coll_sn"))
    if sequence is not None and communicator.rank is not None and communicator.id:
        last = state.last.setdefault((communicator.label, name), {})
        if sequence >= last.get(communicator.rank, (0,))[0]:
            last[communicator.rank] = (sequence, *place)
    groups = state.ranks.setdefault(communicator.process, {})
    groups.setdefault(communicator.id, set()).add(communicator.rank)
    state.smallest = size if state.smallest is None else min(state.smallest, size)
    if algorithm := str(fields.get(f"{prefix}_algo") or "")[:20]:
        protocol = str(fields.get(f"{prefix}_proto") or "")[:20]
        state.algorithms[name, algorithm, protocol] += 1


def _microseconds(value: object) -> float | None:
    """Return seconds; None also for 0, a time below the resolution of one microsecond."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1e6 if 0 < value < math.inf else None


def _add_stats(
    state: _State, stats: Mapping[str, Any], communicator: _Communicator | None, where: Evidence
) -> None:
    """Add totals, which are cumulative per communicator and rank: the last one counts."""
    for prefix in ("coll", "p2p"):
        total = _integer(stats.get(f"{prefix}_dropped_total"))
        if not total:
            continue
        key = (
            prefix,
            communicator and (communicator.id, communicator.rank, communicator.process),
        )
        state.dropped[key] = max(total, state.dropped.get(key, 0))
        if state.first_drop is None:
            text = f"{prefix}_dropped_total {total}"
            state.first_drop = Evidence(file=where.file, line=where.line, text=text)


def _facts(state: _State) -> InspectorFacts:
    sources: Counter[str] = Counter()
    for by_source in state.totals.values():
        for source, total in by_source.items():
            sources[source] += total.calls
    # Times of two clocks are never added; the device's are preferred.
    clock = max(sources, key=lambda source: (source == KERNEL_GPU, sources[source]))
    histogram = {}
    for kind, by_source in state.totals.items():
        timed = by_source.get(clock, _Total())
        ranks: set[object] = set().union(*(total.ranks for total in by_source.values()))
        histogram[kind] = Tally(
            calls=sum(total.calls for total in by_source.values()),
            ranks=len(ranks),
            timed_calls=timed.timed,
            seconds=timed.seconds,
        )
    return InspectorFacts(
        histogram=histogram,
        # A process's ranks are those of its largest group: all groups count from 0.
        num_ranks_seen=sum(max(map(len, groups.values())) for groups in state.ranks.values()),
        timing_sources=dict(sources),
        algorithms=dict(state.algorithms),
        versions=tuple(state.versions),
        findings=tuple(_findings(state, sources, clock)),
    )


def _behind(state: _State) -> Iterator[Finding]:
    """Yield ranks whose records end at an earlier collective than those of others."""
    for (communicator, name), last in state.last.items():
        most = max(number for number, _, _ in last.values())
        behind = {rank: place for rank, place in last.items() if place[0] < most}
        if not behind:
            continue
        worst = min(behind, key=lambda rank: behind[rank])
        number, file, line = behind[worst]
        yield Finding(
            rule="behind",
            severity=Severity.WARNING,
            text=f"The records of {ranks_text(behind)} of {communicator} end earlier than "
            f"those of {ranks_text(last.keys() - behind.keys())}: {name} {number} of {most} on "
            f"rank {worst}. It hangs here, unless it still ran or its records were late.",
            evidence=(Evidence(file=file, line=line, text=f"coll_sn {number}"),),
            count=len(behind),
            ranks=tuple(sorted(behind)),
        )


def _findings(state: _State, sources: Counter[str], clock: str) -> Iterator[Finding]:
    yield from _behind(state)
    if state.dropped:
        assert state.first_drop is not None
        lost = sum(state.dropped.values())
        yield Finding(
            rule="inspector-dropped",
            severity=Severity.WARNING,
            text=f"{lost} operations were overwritten before they were written: counts are too "
            "low (NCCL_INSPECTOR_DUMP_COLL_RING_SIZE)",
            evidence=(state.first_drop,),
            count=len(state.dropped),
        )
    others = {source: n for source, n in sources.items() if source != KERNEL_GPU and source}
    if others:
        counts = ", ".join(f"{n} {source}" for source, n in others.items())
        left_out = "; their times are left out" if clock == KERNEL_GPU else ""
        yield Finding(
            rule="inspector-host-clock",
            severity=Severity.WARNING,
            text=f"operations timed by the host, not by the device: {counts}{left_out}",
            count=sum(others.values()),
        )
    if state.num_unread:
        yield Finding(
            rule="inspector-odd-lines",
            severity=Severity.WARNING,
            text=f"{state.num_unread} lines are no records of the inspector, or unknown ones",
            evidence=tuple(state.unread),
            count=state.num_unread,
        )
    if state.smallest is not None and state.smallest >= DEFAULT_FLOOR_BYTES:
        yield Finding(
            rule="inspector-floor",
            severity=Severity.NOTE,
            text=f"no operation is below {DEFAULT_FLOOR_BYTES} bytes: by default it leaves "
            "smaller messages out (NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES)",
        )
    names = {kind.collective for kind in state.totals} - {SEND, RECV}
    if any(FACTS[Collective(name)].synchronizing for name in names):
        yield Finding(
            rule="inspector-waits",
            severity=Severity.NOTE,
            text="a rank's time includes waiting for other ranks: it is not the transfer time",
        )
