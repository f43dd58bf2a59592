"""Read one profiler trace into columns."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepmark.ground.errors import ConfigError
from stepmark.ground.garbage import no_collection
from stepmark.timeline.trace_columns import (
    NONE,
    TABLES,
    Damage,
    Ints,
    RankInfo,
    RankTrace,
)
from stepmark.traces.kineto.event_tables import EMPTY, EventTables
from stepmark.traces.kineto.events import LEFT_OUT, Header, group_of
from stepmark.traces.kineto.stream import EventStream

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_BASE = 2**61


def read_trace(path: Path) -> RankTrace:
    """Read a trace. Raises ConfigError for a file that is none."""
    _keep_memory()
    tables = EventTables()
    stream = EventStream(path)
    with no_collection():
        try:
            for events in stream:
                tables.add(events)
        except OSError as error:
            stream.cut = f"it cannot be read ({error.strerror})"
        if tables.num_events and not tables.has_phases:
            allowed = "a profiler's JSON trace: its list has no events"
            raise ConfigError("trace", path, allowed)
        _return_memory()
        return _trace(tables, stream)


def _keep_memory() -> None:
    """Let glibc keep memory that is freed and needed again with every chunk.

    It returns it to the kernel otherwise, which costs a quarter of the reading time.
    """
    with contextlib.suppress(AttributeError, OSError):  # another libc
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_TRIM_THRESHOLD, 256 << 20)
        set_option(_M_MMAP_THRESHOLD, 64 << 20)


def _return_memory() -> None:
    """Give the kernel back what the chunks left between the pieces of columns.

    Whole columns then have pages of their own, which are returned when they are freed.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.malloc_trim(0)


def _versions(header: Header) -> dict[str, str]:
    versions = {
        name: str(value)
        for name in header.__struct_fields__
        if name.endswith("_version") and (value := getattr(header, name))
    }
    if header.distributed and header.distributed.nccl_version:
        versions["nccl_version"] = header.distributed.nccl_version
    return versions


def _trace(tables: EventTables, stream: EventStream) -> RankTrace:
    """Return everything that was read."""
    header = stream.header
    distributed = header.distributed
    base = header.base_ns or 0
    if abs(base) > _MAX_BASE:
        base, stream.bad_header = 0, f"baseTimeNanoseconds is {base}"
    rank = distributed.rank if distributed else None
    if rank is None and len(tables.ranks) == 1:
        rank = next(iter(tables.ranks))
    versions = _versions(header)
    tables.add_gloo()
    columns = {name: _table(tables, name, kind, base) for name, kind in TABLES.items()}
    starts = [int(table["start"][0]) for table in columns.values() if table["start"].size]
    ends = [int(table["end"].max()) for table in columns.values() if table["end"].size]
    info = RankInfo(
        file=str(stream.path),
        rank=rank,
        world_size=distributed.world_size if distributed else None,
        backend=distributed.backend if distributed else "",
        groups=tuple(map(group_of, distributed.pg_config)) if distributed else (),
        devices=None if header.devices is None else tuple(d.name for d in header.devices),
        is_rocm=any(name.startswith(("hip", "roc")) for name in (*versions, *tables.names)),
        trace_id=header.trace_id,
        first=min(starts, default=None),
        last=max(ends, default=None),
        num_events=tables.num_events,
        num_bytes=stream.num_bytes,
        cut=stream.cut,
        base_ns=base,
        damage=tuple(_damage(tables, stream)),
        versions=tuple(versions.items()),
    )
    return RankTrace(
        info=info,
        names=tuple(tables.names),
        threads=tuple((str(process), str(thread)) for process, thread in tables.threads),
        streams=tuple((_device(device), str(name)) for device, name in tables.streams),
        comm_args=tuple(tables.comm_args),
        shapes=tuple(dims.decode() for dims, _, _ in tables.shapes),
        operands=tuple(
            (types.decode(), strides.decode()) for _, types, strides in tables.shapes
        ),
        **{name: kind(**columns[name]) for name, kind in TABLES.items()},
    )


def _table(tables: EventTables, name: str, kind: Any, base: int) -> dict[str, Ints]:
    """Return the columns of a table by name, sorted by start and then the longest first."""
    fields = list(kind.__dataclass_fields__)
    pieces = tables.columns.pop(name, [])
    columns: dict[str, Ints] = {}
    for number, field in enumerate(fields):
        columns[field] = (
            np.concatenate([piece[number] for piece in pieces]) if pieces else EMPTY
        )
        for piece in pieces:
            piece[number] = EMPTY
    _return_memory()
    order = np.lexsort((-columns["end"], columns["start"]))
    is_sorted = np.array_equal(order, np.arange(order.size))
    for field, column in columns.items():
        columns[field] = column if is_sorted else column[order]
        if field in ("start", "end"):
            columns[field] += base
        elif field.startswith("work_"):
            columns[field] = np.where(columns[field] == NONE, NONE, columns[field] + base)
    return columns


def _damage(tables: EventTables, stream: EventStream) -> Iterator[Damage]:
    if stream.cut:
        text = f"{stream.cut}: what stands before is read"
        yield Damage(kind="cut", count=1, text=text)
    if stream.bad_header:
        yield Damage(kind="header", count=1, text=f"header: {stream.bad_header}")
    if stream.undecodable:
        text = f"events that are no JSON of an event, e.g.: {stream.first_error}"
        yield Damage(kind="undecodable", count=stream.undecodable, text=text)
    for kind, reason in LEFT_OUT.items():
        if count := tables.damage[kind]:
            text = f"{reason} are left out, e.g. {tables.examples[kind]}"
            yield Damage(kind=kind, count=count, text=text)
    if tables.damage["rounded"]:
        text = "times are absolute doubles, whose resolution is 0.25 us"
        yield Damage(kind="rounded", count=1, text=text)


def _device(device: int | str) -> int:
    return int(device) if str(device).isdecimal() else NONE
