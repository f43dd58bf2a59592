"""PyTorch flight-recorder dumps: one file per rank, the last operations of each.

torch.distributed (FlightRecorderDetail.hpp) writes them as a pickle or as JSON, version 1.1 to
2.10. This reader handles what the versions disagree on: seq_id or collective_seq_id, groups as
mappings or lists of ranks, numbers or strings of numbers, None or 0 for unknown times.

Over 250 lines: one small function per field that has more than one form.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from sys import intern
from typing import Any

from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_bytes
from stepmark.job_logs.flight_recorder import restricted_pickle
from stepmark.job_logs.flight_recorder.operations import (
    MAX_ELEMENTS,
    Dump,
    Group,
    Operation,
    Shapes,
    parse_integer,
)

MAX_ENTRIES = 1_000_000
MAX_TENSORS = 100_000  # of one operation
_RANK_IN_NAME = (re.compile(r"rank[_.-]?(\d{1,7})", re.IGNORECASE), re.compile(r"(\d{1,7})$"))
_PEERS = re.compile(r"(\d{1,7})\s*(->|<-)\s*(\d{1,7})")

# Autograd's own threads run nothing but backward passes.
_BACKWARD_THREAD = "pt_autograd"
# Functions of torch that run in one pass only. Checkpointing runs forward hooks again in the
# backward pass, so a backward frame anywhere decides.
_BACKWARD = frozenset(
    (
        *("pre_backward", "_pre_backward", "post_backward", "_backward_prefetch"),
        *("_root_post_backward_final_callback", "_pre_backward_hook", "_post_backward_hook"),
        *("_engine_run_backward", "backward", "recompute_fn", "unpack_hook"),
    )
)
_FORWARD = frozenset(
    ("pre_forward", "_pre_forward", "post_forward", "_post_forward", "forward")
)
_OPTIMIZER_FILE = "torch/optim/"
_TIMES = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")


def read_flight_recorder(paths: Sequence[Path]) -> list[Dump]:
    """Return the dumps of one job by rank. Raises ConfigError; also for two of one rank."""
    dumps = [read_dump(path) for path in paths]
    ranks = [dump.rank for dump in dumps]
    if len(dumps) > 1:
        for dump in dumps:
            if dump.rank is None:
                allowed = "a name that ends in the rank, such as rank3.pickle"
                raise ConfigError("file", dump.file, allowed)
            if ranks.count(dump.rank) > 1:
                allowed = f"one dump of rank {dump.rank}; give the dumps of one moment only"
                raise ConfigError("file", dump.file, allowed)
    return sorted(dumps, key=lambda dump: dump.rank or 0)


def looks_like_flight_recorder(head: bytes) -> bool:
    """Return whether a file that begins so may be a dump: any pickle, or its JSON."""
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return True
    start = head.lstrip()
    if start[:1] != b"{" or b'"distributedInfo"' in start or b'"traceEvents"' in start:
        return False  # a profiler's trace has a pg_config, too
    return b'"comm_lib_version"' in start or (
        b'"collective_seq_id"' in start or b'"profiling_name"' in start or b'"pg_con' in start
    )


def read_dump(path: Path) -> Dump:
    """Read one dump, plain or gzip. Raises ConfigError."""
    return parse(read_bytes(path), str(path), rank=_rank_of(path))


def parse(data: bytes, file: str, rank: int | None = None) -> Dump:
    """Parse the bytes of a dump. Raises ConfigError."""
    document = _document(data, file)
    if not isinstance(document, dict) or not {"entries", "pg_config"} & document.keys():
        raise ConfigError("file", file, "a flight-recorder dump: a mapping with entries")
    entries = document.get("entries") or []
    if not isinstance(entries, list | tuple) or len(entries) > MAX_ENTRIES:
        raise ConfigError("entries", file, f"a list of at most {MAX_ENTRIES} operations")
    groups = _groups(document.get("pg_config"))
    operations = [_operation(entry, index, file) for index, entry in enumerate(entries)]
    pairs = zip(entries, operations, strict=True)
    ids = {parse_integer(entry.get("pg_id")): operation for entry, operation in pairs}
    return Dump(
        file=file,
        rank=rank if rank is not None else parse_integer(document.get("rank")),
        version=str(document.get("version", ""))[:40],
        nccl=str(document.get("comm_lib_version") or "")[:40],
        groups=groups,
        watchdog_completed=_watchdog_completed(document.get("pg_status"), ids, groups),
        operations=tuple(_with_group_state(operations)),
        backends=frozenset(str(e.get("profiling_name")).rpartition(":")[0] for e in entries),
        latest_ns=max((time for entry in entries for time in _times(entry)), default=None),
        has_unrecorded=any(_is_after_unrecorded(entry) for entry in entries),
    )


def _document(data: bytes, file: str) -> object:
    if data[:1] == b"\x80":
        return restricted_pickle.load(data, file)
    try:
        json_text.check_depth(data)
        return json.loads(data, parse_int=_short_int)  # it may have NaN, which is no JSON
    except ValueError as error:
        raise ConfigError("file", file, f"a whole dump ({str(error)[:100]})") from None


def _short_int(text: str) -> int:
    """Refuse excessive lengths; int() does so with a message of several lines."""
    if len(text) > 100:
        raise ValueError("an integer of excessive length")
    return int(text)


def _rank_of(path: Path) -> int | None:
    """Return the rank by the file's name: torch appends it to the path that it was given."""
    name = path.name.removesuffix(".gz")
    for suffix in (".pickle", ".pkl", ".json", ".bin", ".txt"):
        name = name.removesuffix(suffix)
    matches = (pattern.search(name) for pattern in _RANK_IN_NAME)
    return next((int(match[1]) for match in matches if match), None)


def _groups(config: object) -> dict[str, Group]:
    """Return groups by name. A value is a mapping, or in old dumps the list of ranks."""
    if not isinstance(config, dict):
        return {}
    groups = {}
    for key, value in config.items():
        name = str(key)
        fields: Mapping[str, Any] = value if isinstance(value, dict) else {"ranks": value}
        groups[name] = Group(
            name=name,
            description=_description(fields.get("desc") or ""),
            ranks=_ranks(fields.get("ranks")),
        )
    return groups


def _description(value: object) -> str:
    return "" if value == "undefined" else str(value)[:200]


def _ranks(value: object) -> tuple[int, ...] | None:
    """Return the ranks of a list, or of one written as text; None if empty or unreadable."""
    if isinstance(value, str):
        parts: list[Any] = re.findall(r"-?\w+", value)
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return None
    ranks = [parse_integer(part) for part in parts]
    valid = [rank for rank in ranks if rank is not None and rank >= 0]
    return tuple(sorted(set(valid))) if valid and len(valid) == len(ranks) else None


def _watchdog_completed(
    value: object, ids: Mapping[int | None, Operation], groups: Mapping[str, Group]
) -> dict[str, int]:
    """Return numbers by group name. The dump has pg_id, which only entries map to a name."""
    if not isinstance(value, dict):
        return {}
    numbers = {}
    for key, fields in value.items():
        operation = ids.get(parse_integer(key))
        if not isinstance(fields, dict) or (operation is None and not groups):
            continue
        only_group = next(iter(groups)) if len(groups) == 1 else ""
        number = parse_integer(fields.get("last_completed_collective"))
        if number is not None and number >= 0:
            numbers[only_group if operation is None else operation.group] = number
    return numbers


def _operation(entry: object, index: int, file: str) -> Operation:
    """Parse one entry. Millions of entries have few different words: these are interned."""
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
        sequence=next(
            (n for key in keys if (n := parse_integer(entry.get(key))) is not None), None
        ),
        record_id=parse_integer(entry.get("record_id")),
        inputs=_shapes(entry, "input"),
        outputs=_shapes(entry, "output"),
        state=intern(state),
        duration_s=_milliseconds(entry.get("duration_ms")),
        peers=_peers(title),
        phase=_phase(entry.get("thread_name"), entry.get("frames")),
        where=intern(_where(entry.get("frames"))),
        created_ns=parse_integer(entry.get("time_created_ns")),
        timeout_s=_milliseconds(entry.get("timeout_ms")),
    )


def _group_name(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return (name, description): a pair, in old dumps the name alone."""
    value = entry.get("process_group", entry.get("pg_name"))
    if isinstance(value, list | tuple) and value:
        return str(value[0])[:200], _description(value[1] if len(value) > 1 else "")
    return str(entry.get("pg_id", "") if value in (None, [], ()) else value)[:200], ""


def _shapes(entry: Mapping[str, Any], side: str) -> Shapes | None:
    """Return (elements, type) per tensor; None where sizes or types are missing or odd."""
    sizes = entry.get(f"{side}_sizes")
    types = entry.get(f"{side}_dtypes")
    if not isinstance(sizes, list | tuple) or len(sizes) > MAX_TENSORS:
        return None
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list | tuple) or (sizes and not names):
        return None
    shapes = []
    for index, dims in enumerate(sizes):
        elements = _elements(dims)
        if elements is None:
            return None
        name = names[index] if len(names) == len(sizes) else names[0]
        shapes.append((elements, intern(str(name)[:40])))
    return tuple(shapes)


def _elements(dims: object) -> int | None:
    if not isinstance(dims, list | tuple) or len(dims) > 64:
        return None
    sizes = [parse_integer(dim) for dim in dims]
    valid = [size for size in sizes if size is not None and 0 <= size <= MAX_ELEMENTS]
    if len(valid) < len(sizes):
        return None
    elements = math.prod(valid)
    return elements if elements <= MAX_ELEMENTS else None


def _times(entry: Mapping[str, Any]) -> Iterator[int]:
    for key in _TIMES:
        if (time := parse_integer(entry.get(key))) is not None:
            yield time


def _is_after_unrecorded(entry: Mapping[str, Any]) -> bool:
    """Return whether gloo ran sends or receives before: it counts them but records none."""
    numbers = [parse_integer(entry.get(key)) for key in ("op_id", "collective_seq_id")]
    is_gloo = str(entry.get("profiling_name")).startswith("gloo:")
    return is_gloo and None not in numbers and numbers[0] != numbers[1]


def _milliseconds(value: object) -> float | None:
    try:
        seconds = float(value) / 1e3 if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < math.inf else None


def _peers(title: str) -> tuple[int, int] | None:
    """Return (source, destination) within the group: of "send 0->1" and "recv 0<-1"."""
    match = _PEERS.search(title)
    if match is None:
        return None
    left = int(match[1])
    right = int(match[3])
    return (left, right) if match[2] == "->" else (right, left)


def _phase(thread_name: object, frames: object) -> str:
    """Return "forward", "backward" or "optimizer", or "" where nothing proves it."""
    if str(thread_name or "").startswith(_BACKWARD_THREAD):
        return "backward"
    if not isinstance(frames, list | tuple):
        return ""
    records = [frame for frame in frames[:1000] if isinstance(frame, dict)]
    names = {str(frame.get("name")) for frame in records}
    if names & _BACKWARD:
        return "backward"
    if any(_OPTIMIZER_FILE in str(frame.get("filename")) for frame in records):
        return "optimizer"
    return "forward" if names & _FORWARD else ""


def _where(frames: object) -> str:
    """Return the first frame outside torch, else the innermost one."""
    if not isinstance(frames, list | tuple):
        return ""
    records = [frame for frame in frames[:200] if isinstance(frame, dict)]
    own = (frame for frame in records if "torch/" not in str(frame.get("filename")))
    caller = next(own, records[0] if records else None)
    if caller is None:
        return ""
    return f"{caller.get('name')} at {caller.get('filename')}:{caller.get('line')}"[:200]


def _with_group_state(operations: Sequence[Operation]) -> list[Operation]:
    """Give members of a coalesced group the state of its entry, which follows them.

    torch leaves the members themselves "scheduled".
    """
    updated = list(operations)
    for index, marker in enumerate(operations):
        if not marker.is_marker or marker.sequence is None:
            continue
        for place in range(index - 1, -1, -1):
            member = updated[place]
            if member.is_marker or member.step != marker.step:
                break
            updated[place] = replace(member, state=marker.state)
    return updated
