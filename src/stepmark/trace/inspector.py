"""Output of NCCL's inspector, a profiler plugin: JSON lines, one per finished operation.

Up to format 4.2 each line has its communicator as `header`; from 4.3 on only the `dump_stats`
line before them has it. Sizes are per rank for collectives with a part of each rank. The
format is that of plugins/profiler/inspector in the sources of NCCL.

Over 250 lines: one format, read in one pass, and what its own lines say about what they lack.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepmark.core.collectives import FACTS, Collective, num_parts
from stepmark.core.errors import ConfigError
from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.log_facts import MAX_RANKS
from stepmark.core.message import Histogram, MessageKind, Tally
from stepmark.trace.read_text import open_binary

MAX_LINE_BYTES = 2**24
# NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, unless it was set.
DEFAULT_FLOOR_BYTES = 8192
KERNEL_GPU = "kernel_gpu"  # the device's clock; the others are the host's

_NAMES = {
    "allreduce": Collective.ALL_REDUCE.value,
    "allgather": Collective.ALL_GATHER.value,
    "reducescatter": Collective.REDUCE_SCATTER.value,
    "broadcast": Collective.BROADCAST.value,
    "reduce": Collective.REDUCE.value,
    "alltoall": Collective.ALL_TO_ALL.value,
    "gather": Collective.GATHER.value,
    "scatter": Collective.SCATTER.value,
    "send": "send",
    "recv": "recv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFacts:
    """What the lines of one job say."""

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
class _Sum:
    """Operations of one kind and clock."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    ranks: set[object] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _State:
    """What is known after some lines; facts() closes it."""

    sums: dict[MessageKind, dict[str, _Sum]] = field(default_factory=dict)
    # process -> communicator -> its ranks there
    seen: dict[tuple[str, str], dict[str, set[int | None]]] = field(default_factory=dict)
    versions: dict[str, None] = field(default_factory=dict)
    dropped: dict[object, int] = field(default_factory=dict)
    algorithms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    odd: list[Evidence] = field(default_factory=list)
    num_odd: int = 0
    smallest: int | None = None
    first_drop: Evidence | None = None


def looks_like_inspector(head: bytes) -> bool:
    """Whether a file that begins so holds lines of the inspector."""
    start = head.lstrip()
    return start[:1] == b"{" and any(
        key in start for key in (b'"coll_perf"', b'"p2p_perf"', b'"dump_stats"')
    )


def read_inspector(paths: Sequence[Path]) -> InspectorFacts:
    """All files of one job, plain or gzipped. Raises ConfigError, also for no operation."""
    state = _State()
    for path in paths:
        with open_binary(path) as stream:
            lines = iter(lambda: stream.readline(MAX_LINE_BYTES), b"")
            _read_lines(lines, str(path), state)
    if not state.sums:
        raise ConfigError("file", paths[0], "inspector lines with coll_perf or p2p_perf")
    return _facts(state)


def _read_lines(lines: Iterable[bytes], file: str, state: _State) -> None:
    """Add a file's lines. A line that is no record of the inspector is counted as odd."""
    current: _Communicator | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            state.num_odd += 1
            if len(state.odd) < 3:
                shown = line[:100].decode("utf-8", "replace").strip()
                state.odd.append(Evidence(file=file, line=number, text=shown))
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
            if isinstance(held := record.get(f"{prefix}_perf"), dict):
                _add(state, held, prefix, current or _nobody(file))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    keys = {"header", "coll_perf", "p2p_perf", "dump_stats", "proxy_trace"}
    return found if isinstance(found, dict) and keys & found.keys() else None


def _communicator(record: Mapping[str, Any], file: str) -> _Communicator:
    header, metadata = record["header"], record.get("metadata")
    held: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    ranks = _whole(header.get("n_ranks"))
    return _Communicator(
        id=str(header.get("id") or "")[:60],
        name=str(header.get("comm_name") or "")[:60],
        rank=_whole(header.get("rank")),
        num_ranks=ranks if ranks and ranks <= MAX_RANKS else None,
        process=(str(held.get("hostname") or file)[:200], str(held.get("pid", ""))[:20]),
    )


def _nobody(file: str) -> _Communicator:
    return _Communicator(id="", name="", rank=None, num_ranks=None, process=(file, ""))


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**60:
        return None
    return int(value)


def _add(state: _State, held: Mapping[str, Any], prefix: str, who: _Communicator) -> None:
    name = _NAMES.get(str(held.get(prefix) or "").lower().removeprefix("nccl"))
    size = _whole(held.get(f"{prefix}_msg_size_bytes"))
    if name is None or size is None:
        state.num_odd += 1
        return
    kind = MessageKind(
        collective=name,
        dtype="",
        group=who.label,
        num_ranks=who.num_ranks,
        phase="",
        call_bytes=size,
        message_bytes=_message_bytes(name, size, who.num_ranks),
    )
    source = str(held.get(f"{prefix}_timing_source") or "")[:40]
    one = state.sums.setdefault(kind, {}).setdefault(source, _Sum())
    one.calls += 1
    seconds = _microseconds(held.get(f"{prefix}_exec_time_us"))
    if seconds is not None:
        one.timed += 1
        one.seconds += seconds
    one.ranks.add((who.process, who.rank))
    state.seen.setdefault(who.process, {}).setdefault(who.id, set()).add(who.rank)
    state.smallest = size if state.smallest is None else min(state.smallest, size)
    if algorithm := str(held.get(f"{prefix}_algo") or "")[:20]:
        protocol = str(held.get(f"{prefix}_proto") or "")[:20]
        state.algorithms[name, algorithm, protocol] += 1


def _message_bytes(name: str, size: int, num_ranks: int | None) -> int | None:
    if name in ("send", "recv"):
        return size
    if num_ranks is None:
        return size if num_parts(Collective(name), 2) == 1 else None
    return size * num_parts(Collective(name), num_ranks)


def _microseconds(value: object) -> float | None:
    """0 is a time below the resolution of one microsecond: unknown, not none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1e6 if 0 < value < math.inf else None


def _add_stats(
    state: _State, stats: Mapping[str, Any], who: _Communicator | None, where: Evidence
) -> None:
    """Totals are cumulative per communicator and rank: the last counts, not the sum."""
    for prefix in ("coll", "p2p"):
        total = _whole(stats.get(f"{prefix}_dropped_total"))
        if not total:
            continue
        key = (prefix, who and (who.id, who.rank, who.process))
        state.dropped[key] = max(total, state.dropped.get(key, 0))
        if state.first_drop is None:
            text = f"{prefix}_dropped_total {total}"
            state.first_drop = Evidence(file=where.file, line=where.line, text=text)


def _facts(state: _State) -> InspectorFacts:
    sources: Counter[str] = Counter()
    for by_source in state.sums.values():
        for source, one in by_source.items():
            sources[source] += one.calls
    # Times of two clocks are never added: the device's, if there are any.
    clock = max(sources, key=lambda source: (source == KERNEL_GPU, sources[source]))
    histogram = {}
    for kind, by_source in state.sums.items():
        timed = by_source.get(clock, _Sum())
        ranks: set[object] = set().union(*(one.ranks for one in by_source.values()))
        histogram[kind] = Tally(
            calls=sum(one.calls for one in by_source.values()),
            ranks=len(ranks),
            timed_calls=timed.timed,
            seconds=timed.seconds,
        )
    return InspectorFacts(
        histogram=histogram,
        num_ranks_seen=_num_ranks_seen(state),
        timing_sources=dict(sources),
        algorithms=dict(state.algorithms),
        versions=tuple(state.versions),
        findings=tuple(_findings(state, sources, clock)),
    )


def _num_ranks_seen(state: _State) -> int:
    """A process has as many ranks as its communicator with the most: small groups number theirs
    from 0 again.
    """
    return sum(max(map(len, groups.values())) for groups in state.seen.values())


def _findings(state: _State, sources: Counter[str], clock: str) -> Iterator[Finding]:
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
        shown = ", ".join(f"{n} {source}" for source, n in others.items())
        left_out = "" if clock != KERNEL_GPU else "; their times are left out"
        yield Finding(
            rule="inspector-host-clock",
            severity=Severity.WARNING,
            text=f"operations timed by the host, not by the device: {shown}{left_out}",
            count=sum(others.values()),
        )
    if state.num_odd:
        yield Finding(
            rule="inspector-odd-lines",
            severity=Severity.WARNING,
            text=f"{state.num_odd} lines are no records of the inspector, or of a new kind",
            evidence=tuple(state.odd),
            count=state.num_odd,
        )
    if state.smallest is not None and state.smallest >= DEFAULT_FLOOR_BYTES:
        yield Finding(
            rule="inspector-floor",
            severity=Severity.NOTE,
            text=f"nothing under {DEFAULT_FLOOR_BYTES} bytes: by default the inspector leaves "
            "smaller messages out (NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES)",
        )
    if any(FACTS[Collective(kind.collective)].synchronizing for kind in _collectives(state)):
        yield Finding(
            rule="inspector-waits",
            severity=Severity.NOTE,
            text="a rank's time includes waiting for the others: it is no time of the wire",
        )


def _collectives(state: _State) -> Iterator[MessageKind]:
    return (kind for kind in state.sums if kind.collective not in ("send", "recv"))
