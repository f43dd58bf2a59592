"""Parsed columns of large traces, kept for the next question about the same file.

An entry is a folder with a Parquet file per table, and the rest of the trace as JSON. Its name
is the digest of the trace's bytes and of the code that reads traces: neither a changed file nor
another version of the reader is ever answered from it. Each file of an entry has a digest, so
that a damaged entry is not used. Entries are renamed into place when they are whole.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from stepmark.ground.files import user_cache
from stepmark.ground.packages import is_installed
from stepmark.model import collectives
from stepmark.timeline import trace_columns
from stepmark.timeline.trace_columns import TABLES, RankTrace
from stepmark.traces.kineto import (
    checks,
    event_tables,
    events,
    gloo,
    links,
    reader,
    stream,
)

# Of JSON. Below it the import of duckdb costs more than a tenth of reading the trace.
LEAST_BYTES = 64 << 20
MOST_BYTES = 2 << 30  # of all entries; those that were used last stay
_LEAST_PACKED = 1 << 20  # of a gzip file, which unpacks to 12 to 29 times as much
# What the entries depend on.
_READERS = (
    *(reader, stream, events, event_tables, gloo, checks, links),
    *(trace_columns, collectives),
)
# What of a trace is not in columns: with the digests of the columns' files it is the head.
_FACTS = [field for field in fields(RankTrace) if field.name not in TABLES]
_HEAD = "trace.json"
_UNFINISHED = "unfinished-"
_ABANDONED_S = 86_400  # after which an unfinished entry is a killed process's


def read_cached(path: Path, read: Callable[[Path], RankTrace]) -> RankTrace:
    """Return the trace from the cache, else as `read` does, and keep it.

    Nothing of the cache is an error: where it cannot be read or written, or DuckDB is not
    installed, the trace is read.
    """
    before = _stamp(path) if is_installed("duckdb") else None
    entry = _entry(path) if before else None
    if entry is None:
        return read(path)
    known = _load(entry)
    if known is not None:
        return replace(known, info=replace(known.info, file=str(path)))
    trace = read(path)
    # A file that changes while it is read is not the one whose digest names the entry.
    if trace.info.num_bytes >= LEAST_BYTES and not trace.info.cut and _stamp(path) == before:
        _store(entry, trace)
    return trace


def folder() -> Path:
    """Return the folder of the entries."""
    return user_cache() / "traces"


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what differs after most changes of a file; None where it is too small to keep."""
    least_packed = min(_LEAST_PACKED, LEAST_BYTES)
    try:
        stat = path.stat()
        if stat.st_size < least_packed:  # or no file: a pipe can be read only once
            return None
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
    except OSError:
        return None
    if stat.st_size < (least_packed if is_packed else LEAST_BYTES):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _entry(path: Path) -> Path | None:
    """Return the entry of a file by its content; None where that cannot be read."""
    digest = hashlib.sha256()
    try:
        for module in _READERS:
            digest.update(Path(str(module.__file__)).read_bytes())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        return folder() / digest.hexdigest()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def _load(entry: Path) -> RankTrace | None:
    """Return a kept trace, or None where there is none, or a damaged one."""
    try:
        digest, _, text = (entry / _HEAD).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        head = msgspec.json.decode(text)
        tables = dict(_columns(entry, head["digests"]))
        os.utime(entry)
        return RankTrace(
            **{field.name: msgspec.convert(head[field.name], field.type) for field in _FACTS},
            **{
                name: kind(
                    **(tables.get(name) or {f.name: event_tables.EMPTY for f in fields(kind)})
                )
                for name, kind in TABLES.items()
            },
        )
    except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None


def _columns(entry: Path, digests: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the columns of each table that has rows. Raises ValueError for damaged files."""
    import duckdb  # noqa: PLC0415 - takes a tenth of a second

    try:
        with duckdb.connect(config={"threads": 1}) as connection:
            for name, digest in digests.items():
                file = entry / f"{name}.parquet"
                if _digest(file) != digest:
                    raise ValueError(file)
                table = connection.execute("SELECT * FROM read_parquet(?)", [str(file)])
                yield name, table.fetchnumpy()
    except duckdb.Error as error:
        raise ValueError(entry) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _store(entry: Path, trace: RankTrace) -> None:
    """Keep a trace, where the folder can be written."""
    import duckdb  # noqa: PLC0415

    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=entry.parent))
    except OSError:
        return
    try:
        digests = {}
        with duckdb.connect(config={"threads": 1}) as connection:
            for name, kind in TABLES.items():
                table = getattr(trace, name)
                if table.start.size:
                    file = unfinished / f"{name}.parquet"
                    rows = {field.name: getattr(table, field.name) for field in fields(kind)}
                    connection.register("rows", rows)
                    connection.table("rows").write_parquet(str(file))
                    connection.unregister("rows")
                    digests[name] = _digest(file)
        facts = {field.name: getattr(trace, field.name) for field in _FACTS}
        text = msgspec.json.encode({"digests": digests, **facts})
        digest = hashlib.sha256(text).hexdigest().encode()
        (unfinished / _HEAD).write_bytes(digest + b"\n" + text)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one
        unfinished.rename(entry)
    except (OSError, ValueError, duckdb.Error, msgspec.MsgspecError):
        shutil.rmtree(unfinished, ignore_errors=True)
    _remove_oldest(entry.parent)


def _remove_oldest(cache: Path) -> None:
    """Remove entries beyond MOST_BYTES, those that were used longest ago first."""
    sizes: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):  # of an entry that another process removes
        for entry in cache.iterdir():
            used = entry.stat().st_mtime
            if not entry.name.startswith(_UNFINISHED):
                size = sum(file.stat().st_size for file in entry.iterdir())
                sizes.append((used, size, entry))
            elif time.time() - used > _ABANDONED_S:
                shutil.rmtree(entry, ignore_errors=True)
    total = sum(size for _, size, _ in sizes)
    for _, size, entry in sorted(sizes):
        if total <= MOST_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        total -= size
