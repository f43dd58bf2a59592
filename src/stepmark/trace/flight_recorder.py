"""PyTorch flight-recorder dumps: one file per rank, the last operations of each.

Written by torch.distributed (FlightRecorderDetail.hpp) as a pickle or as JSON, version 1.1 to
2.10. What the versions disagree on is read here: seq_id or collective_seq_id, groups as
mappings or lists of ranks, numbers or strings of numbers, None or 0 for unknown times.

Over 250 lines: one small function per field that has more than one form.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import intern
from typing import Any

from stepmark.core.errors import ConfigError
from stepmark.core.message import Histogram
from stepmark.trace import restricted_pickle
from stepmark.trace.flight_messages import histogram_of
from stepmark.trace.flight_operation import (
    MAX_ELEMENTS,
    Dump,
    Group,
    Operation,
    Shapes,
    Status,
    whole,
)
from stepmark.trace.flight_phase import phase_of
from stepmark.trace.read_text import read_bytes

MAX_ENTRIES = 1_000_000
MAX_TENSORS = 100_000  # of one operation
_RANK_IN_NAME = (re.compile(r"rank[_.-]?(\d{1,7})", re.IGNORECASE), re.compile(r"(\d{1,7})$"))
_PEERS = re.compile(r"(\d{1,7})\s*(->|<-)\s*(\d{1,7})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFacts:
    """Dumps of one job, by rank, and their messages."""

    dumps: tuple[Dump, ...]
    histogram: Histogram
    uncounted: dict[str, int]  # why operations are not in the histogram, and how many


def read_flight_recorder(paths: Sequence[Path]) -> FlightFacts:
    """Dumps of the ranks of one job. Raises ConfigError; also for two dumps of one rank."""
    dumps = [read_dump(path) for path in paths]
    known = [dump.rank for dump in dumps]
    if len(dumps) > 1:
        for dump in dumps:
            if dump.rank is None:
                allowed = "a name that ends in the rank, such as rank3.pickle"
                raise ConfigError("file", dump.file, allowed)
            if known.count(dump.rank) > 1:
                allowed = f"one dump of rank {dump.rank}; give the dumps of one moment only"
                raise ConfigError("file", dump.file, allowed)
    dumps.sort(key=lambda dump: dump.rank or 0)
    histogram, uncounted = histogram_of(dumps)
    return FlightFacts(dumps=tuple(dumps), histogram=histogram, uncounted=uncounted)


def looks_like_flight_recorder(head: bytes) -> bool:
    """Whether a file that begins so is worth reading as a dump: any pickle, or its JSON."""
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return True
    start = head.lstrip()
    if start[:1] != b"{":
        return False
    return b'"comm_lib_version"' in start or (
        b'"collective_seq_id"' in start or b'"profiling_name"' in start or b'"pg_con' in start
    )


def read_dump(path: Path) -> Dump:
    """One dump, plain or gzipped. Raises ConfigError."""
    return parse(read_bytes(path), str(path), rank=_rank_of(path))


def parse(data: bytes, file: str, rank: int | None = None) -> Dump:
    """A dump from its bytes. Raises ConfigError."""
    document = _document(data, file)
    if not isinstance(document, dict) or not {"entries", "pg_config"} & document.keys():
        raise ConfigError("file", file, "a flight-recorder dump: a mapping with entries")
    entries = document.get("entries") or []
    if not isinstance(entries, list | tuple) or len(entries) > MAX_ENTRIES:
        raise ConfigError("entries", file, f"a list of at most {MAX_ENTRIES} operations")
    groups = _groups(document.get("pg_config"))
    operations = [_operation(entry, index, file) for index, entry in enumerate(entries)]
    pairs = zip(entries, operations, strict=True)
    ids = {whole(entry.get("pg_id")): one for entry, one in pairs}
    return Dump(
        file=file,
        rank=rank if rank is not None else whole(document.get("rank")),
        version=str(document.get("version", ""))[:40],
        nccl=str(document.get("comm_lib_version") or "")[:40],
        groups=groups,
        status=_status(document.get("pg_status"), ids, groups),
        operations=tuple(_with_group_state(operations)),
    )


def _document(data: bytes, file: str) -> object:
    if data[:1] == b"\x80":
        return restricted_pickle.load(data, file)
    try:
        return json.loads(data, parse_int=_short_int)
    except (ValueError, RecursionError) as error:
        raise ConfigError("file", file, f"a whole dump ({str(error)[:100]})") from None


def _short_int(text: str) -> int:
    """int() refuses absurd lengths with a message of several lines."""
    if len(text) > 100:
        raise ValueError("an integer of absurd length")
    return int(text)


def _rank_of(path: Path) -> int | None:
    """From the file's name: torch appends the rank to the path that it was given."""
    name = path.name.removesuffix(".gz")
    for known in (".pickle", ".pkl", ".json", ".bin", ".txt"):
        name = name.removesuffix(known)
    for pattern in _RANK_IN_NAME:
        if found := pattern.search(name):
            return int(found[1])
    return None


def _groups(config: object) -> dict[str, Group]:
    """By name. A group's value is a mapping, or in old dumps the list of its ranks."""
    if not isinstance(config, dict):
        return {}
    found = {}
    for key, value in config.items():
        name = str(key)
        held: Mapping[str, Any] = value if isinstance(value, dict) else {"ranks": value}
        description = str(held.get("desc") or "")[:200]
        found[name] = Group(
            name=name,
            description="" if description == "undefined" else description,
            ranks=_ranks(held.get("ranks")),
        )
    return found


def _ranks(value: object) -> tuple[int, ...] | None:
    """A list, or one written as text; None where empty or unreadable."""
    if isinstance(value, str):
        parts: list[Any] = re.findall(r"-?\w+", value)
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return None
    ranks = [whole(part) for part in parts]
    known = [rank for rank in ranks if rank is not None and rank >= 0]
    return tuple(sorted(set(known))) if known and len(known) == len(ranks) else None


def _status(
    value: object, ids: Mapping[int | None, Operation], groups: Mapping[str, Group]
) -> dict[str, Status]:
    """By group name. The dump names a status by pg_id, which only entries tie to a name."""
    if not isinstance(value, dict):
        return {}
    found = {}
    for key, held in value.items():
        if not isinstance(held, dict):
            continue
        one = ids.get(whole(key))
        name = one.group if one is not None else next(iter(groups)) if len(groups) == 1 else ""
        if one is None and not groups:
            continue
        numbers = (
            whole(held.get(f"last_{word}_collective"))
            for word in ("enqueued", "started", "completed")
        )
        seen = [number if number is None or number >= 0 else None for number in numbers]
        found[name] = Status(enqueued=seen[0], started=seen[1], completed=seen[2])
    return found


def _operation(entry: object, index: int, file: str) -> Operation:
    """One entry. A thousand ranks have millions, of few different words: those are shared."""
    if not isinstance(entry, dict):
        raise ConfigError("entries", file, f"mappings; entry {index} is {type(entry).__name__}")
    name = str(entry.get("profiling_name") or "")[:200]
    backend, _, title = name.rpartition(":")
    kind = title.split(" ")[0]
    is_p2p = bool(entry.get("is_p2p", kind in ("send", "recv")))
    keys = ("p2p_seq_id", "seq_id") if is_p2p else ("collective_seq_id", "seq_id")
    group, description = _group_name(entry)
    state = str(entry.get("state") or "")[:20]
    if entry.get("retired") is True and backend == "gloo":
        state = "completed"  # gloo's operations stay "scheduled", and retire when they are done
    return Operation(
        group=intern(group),
        description=intern(description),
        kind=intern(kind),
        is_p2p=is_p2p,
        sequence=next((n for key in keys if (n := whole(entry.get(key))) is not None), None),
        record_id=whole(entry.get("record_id")),
        inputs=_shapes(entry, "input"),
        outputs=_shapes(entry, "output"),
        state=intern(state),
        created_ns=whole(entry.get("time_created_ns")) or None,
        duration_s=_milliseconds(entry.get("duration_ms")),
        timeout_s=_milliseconds(entry.get("timeout_ms")),
        peers=_peers(title),
        phase=phase_of(entry.get("thread_name"), entry.get("frames")),
        where=intern(_where(entry.get("frames"))),
    )


def _group_name(entry: Mapping[str, Any]) -> tuple[str, str]:
    """(name, description): a pair, in old dumps the name alone."""
    value = entry.get("process_group", entry.get("pg_name"))
    if isinstance(value, list | tuple) and value:
        description = str(value[1])[:200] if len(value) > 1 else ""
        return str(value[0])[:200], "" if description == "undefined" else description
    return str(entry.get("pg_id", "") if value in (None, [], ()) else value)[:200], ""


def _shapes(entry: Mapping[str, Any], side: str) -> Shapes | None:
    """((elements, type) per tensor); None where sizes or types are not there or odd."""
    sizes, types = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
    if not isinstance(sizes, list | tuple) or len(sizes) > MAX_TENSORS:
        return None
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list | tuple) or (sizes and not names):
        return None
    found = []
    for index, dims in enumerate(sizes):
        elements = _elements(dims)
        if elements is None:
            return None
        name = names[index] if len(names) == len(sizes) else names[0]
        found.append((elements, intern(str(name)[:40])))
    return tuple(found)


def _elements(dims: object) -> int | None:
    if not isinstance(dims, list | tuple) or len(dims) > 64:
        return None
    known = [whole(dim) for dim in dims]
    if any(dim is None or not 0 <= dim <= MAX_ELEMENTS for dim in known):
        return None
    elements = math.prod(dim for dim in known if dim is not None)
    return elements if elements <= MAX_ELEMENTS else None


def _milliseconds(value: object) -> float | None:
    try:
        seconds = float(value) / 1e3 if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < math.inf else None


def _peers(title: str) -> tuple[int, int] | None:
    """(source, destination) within the group of "send 0->1" and "recv 0<-1"."""
    found = _PEERS.search(title)
    if found is None:
        return None
    left, right = int(found[1]), int(found[3])
    return (left, right) if found[2] == "->" else (right, left)


def _where(frames: object) -> str:
    """The outermost frame that is not torch's, else the innermost: where people look."""
    if not isinstance(frames, list | tuple):
        return ""
    known = [frame for frame in frames[:200] if isinstance(frame, dict)]
    own = [one for one in known if "torch/" not in str(one.get("filename"))]
    chosen = own[0] if own else known[0] if known else None
    if chosen is None:
        return ""
    return f"{chosen.get('name')} at {chosen.get('filename')}:{chosen.get('line')}"[:200]


def _with_group_state(operations: Sequence[Operation]) -> list[Operation]:
    """Members of a coalesced group stay "scheduled" for ever; their group's entry, which
    follows them under the same number, has the state."""
    found = list(operations)
    for index, marker in enumerate(operations):
        if not marker.is_marker or marker.sequence is None:
            continue
        for place in range(index - 1, -1, -1):
            member = found[place]
            if member.is_marker or member.step != marker.step:
                break
            found[place] = replace(member, state=marker.state, is_coalesced=True)
    return found
