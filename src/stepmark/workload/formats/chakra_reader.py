"""Reads Chakra execution traces: a graph of nodes per rank becomes operations on streams.

Nodes run in the order of their numbers as far as their dependencies allow; those that neither
compute nor communicate are left out, and what waits for them waits for what they wait for. A
trace from elsewhere has no streams of ours: its computation is one stream, that of the CPU a
second, its communication a third, each in order. Loads and stores are computation too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepmark.core.collectives import Collective, RedOp, num_parts
from stepmark.core.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Phase
from stepmark.core.workload import (
    COMPUTE,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Workload,
)
from stepmark.workload.formats.chakra_schema import (
    COLLECTIVE_OF,
    COMPUTES,
    WHAT,
    Node,
    NodeType,
    Value,
    in_order,
    is_done,
    nodes,
    through,
)
from stepmark.workload.formats.ranks import WORLD, group_of, name_of, stages_of
from stepmark.workload.formats.source_file import decoded

GROUPS_FILE = "comm_groups.json"


def rank_files(path: Path) -> list[Path]:
    """PREFIX.0.et, PREFIX.1.et, ... of the folder, or of the one that is named."""
    if path.is_dir():
        first = sorted(path.glob("*.0.et"))
        if len(first) != 1:
            raise ConfigError(WHAT, path, f"a folder with one PREFIX.0.et: it has {len(first)}")
        path = first[0]
    if not (named := re.fullmatch(r"(.+)\.\d+\.et", path.name)):
        raise ConfigError(WHAT, path, "a file PREFIX.RANK.et")
    ranks = _ranks(path.parent, named[1])
    found = [path.with_name(f"{named[1]}.{rank}.et") for rank in range(len(ranks))]
    absent = [one.name for one in found if not one.is_file()]
    if absent or path not in found:
        lacks = absent[0] if absent else path.name
        raise ConfigError(
            WHAT, path, f"it must have the files of all ranks: there is no {lacks}"
        )
    return found


def _ranks(folder: Path, prefix: str) -> list[int]:
    """Those that have a file."""
    matches = (re.fullmatch(r"(.+)\.(\d+)\.et", one.name) for one in folder.glob("*.et"))
    return [int(one[2]) for one in matches if one and one[1] == prefix]


def groups(folder: Path) -> dict[str, list[int]]:
    """The ranks that each pg_name means; none where the file is not there."""
    file = folder / GROUPS_FILE
    if not file.is_file():
        return {}
    return decoded(file, dict[str, list[int]], WHAT, '{"1": [0, 1], ...}')


CPU, COMMUNICATION = "cpu", "communication"
_CALLERS = (
    "Of {} of {} files the ctrl_deps are left out: they go in a circle or out of the file, as "
    "those of callers do."
)


@dataclass(slots=True)
class _Stream:
    """Calls so far, which of them each named operation is of, and what has been waited for."""

    calls: int = 0
    named: list[int] = field(default_factory=list)
    waited: dict[str, int] = field(default_factory=dict)  # the last named one, by stream


def read(path: Path) -> Workload:
    """A file PREFIX.0.et with those of the other ranks beside it, or a folder of them.

    comm_groups.json beside them says which ranks pg_name means. Neighbouring ranks that do the
    same become one stage. Raises ConfigError for anything that is no such trace.
    """
    paths = rank_files(path)
    named = groups(paths[0].parent)
    world = len(paths)
    used: dict[str, Group] = {}
    programs = []
    callers = 0
    for rank, one in enumerate(paths):
        ordered, controlled = in_order(nodes(one), one.name)
        callers += not controlled
        programs.append(_Reader(one.name, world, rank, named, used).operations(ordered))
    stages, blocks = stages_of(programs)
    workload = Workload(
        name=paths[0].name.rsplit(".", 2)[0],
        rules="chakra",
        source="mlcommons/chakra, execution trace",
        world_size=world,
        groups=used,
        blocks=blocks,
        stages=stages,
        notes=(_CALLERS.format(callers, world),) if callers else (),
    )
    workload.check()
    return workload


class _Reader:
    """Nodes of one rank as operations; `used` collects the groups of all ranks."""

    def __init__(
        self,
        file: str,
        world_size: int,
        rank: int,
        ranks: Mapping[str, Sequence[int]],
        used: dict[str, Group],
    ) -> None:
        self._file, self._world, self._rank = file, world_size, rank
        self._ranks, self._used = ranks, used
        self._groups: dict[str, str] = {}  # by pg_name
        self._streams: dict[str, _Stream] = {}

    def operations(self, ordered: Sequence[Node]) -> list[Operation]:
        streams = {one.number: _stream(one) for one in ordered}
        waits = through(ordered)
        kept = [one for one in ordered if is_done(one)]
        awaited = {
            dep
            for one in kept
            for dep in waits[one.number]
            if streams[dep] != streams[one.number]
        }
        placed: dict[int, int] = {}  # which one of the named operations of its stream
        made = []
        for one in kept:
            name = streams[one.number]
            stream = self._streams.setdefault(name, _Stream())
            deps = [(streams[dep], placed.get(dep)) for dep in waits[one.number]]
            after = self._after(stream, deps, name)
            operation = self._operation(one, f"{self._file}: node {one.number}")
            stream.calls += not (isinstance(operation, CommOp) and operation.fused)
            if one.number in awaited:
                placed[one.number] = len(stream.named)
                stream.named.append(stream.calls)
                operation = replace(operation, name=name)
            made.append(replace(operation, stream=name, after=after))
        return made

    def _after(
        self, own: _Stream, deps: Iterable[tuple[str, int | None]], name: str
    ) -> tuple[str, ...]:
        """The newest call of each other stream, unless this one has waited for it before."""
        places: dict[str, list[int]] = {}
        for stream, place in deps:
            if stream != name and place is not None:
                places.setdefault(stream, []).append(place)
        found = []
        for stream, known in places.items():
            newest, named = max(known), self._streams[stream].named
            if newest <= own.waited.get(stream, -1):
                continue
            own.waited[stream] = newest
            for place in sorted(set(known)):
                if named[place] == named[newest]:
                    back = len(named) - 1 - place
                    found.append(f"{stream}~{back}" if back else stream)
        return tuple(found)

    def _operation(self, one: Node, where: str) -> Operation:
        values = one.values
        phase = str(values.get("phase", Phase.STEP))
        common: dict[str, Any] = {
            "phase": Phase(phase) if phase in set(Phase) else Phase.STEP,
            "module": str(values.get("module", "")),
            "layer": _whole(values, "layer"),
            "microbatch": _whole(values, "microbatch"),
            "recompute": bool(values.get("recompute", False)),
            "time_s": one.time_s,
        }
        if one.kind in COMPUTES:
            flops = _whole(values, "flops" if "flops" in values else "num_ops")
            moved = _whole(values, "bytes_moved" if "bytes_moved" in values else "tensor_size")
            if min(flops or 0, moved or 0) < 0:
                raise ConfigError(f"{where}: num_ops, tensor_size", (flops, moved), "0 or more")
            name = str(values.get("op", one.name))
            return ComputeOp(op=Kernel(name=name, flops=flops, bytes_moved=moved), **common)
        dtype = DType.UINT8
        if "dtype" in values:
            dtype = parse_dtype(str(values["dtype"]), f"{where}: dtype", MESSAGE_DTYPES)
        num_bytes = _whole(values, "comm_size")
        if num_bytes is None or num_bytes < 0:
            raise ConfigError(f"{where}: comm_size", num_bytes, "a number of bytes")
        build = self._collective if one.kind is NodeType.COMM_COLL else self._pair
        fused = bool(one.values.get("fused", False))
        return replace(build(one, where, dtype, num_bytes), fused=fused, **common)

    def _pair(self, one: Node, where: str, dtype: DType, num_bytes: int) -> CommOp:
        sends = one.kind is NodeType.COMM_SEND
        other = _whole(one.values, "comm_dst" if sends else "comm_src")
        if other is None or not 0 <= other < self._world:
            allowed = f"a rank from 0 to {self._world - 1}"
            raise ConfigError(f"{where}: comm_dst or comm_src", other, allowed)
        self._used[WORLD] = Group(digits=((self._world, 1),))
        return CommOp(
            collective=SEND if sends else RECV,
            dtype=dtype,
            count=_parted(num_bytes, dtype.itemsize, where),
            group=WORLD,
            phase=Phase.STEP,
            module="",
            peer=(other - self._rank) % self._world,
        )

    def _collective(self, one: Node, where: str, dtype: DType, num_bytes: int) -> CommOp:
        number = _whole(one.values, "comm_type")
        if number not in COLLECTIVE_OF:
            raise ConfigError(f"{where}: comm_type", number, f"from 0 to {max(COLLECTIVE_OF)}")
        kind = Collective(COLLECTIVE_OF[number])
        group = self._group(str(one.values.get("pg_name", "")), where)
        gathers = kind in (Collective.ALL_GATHER, Collective.GATHER)
        parts = 1 if gathers else num_parts(kind, self._used[group].size)
        redop = str(one.values.get("redop", RedOp.NONE))
        return CommOp(
            collective=str(kind),
            dtype=dtype,
            count=_parted(num_bytes, parts * dtype.itemsize, where),
            group=group,
            phase=Phase.STEP,
            module="",
            redop=RedOp(redop) if redop in set(RedOp) else RedOp.NONE,
            root=_whole(one.values, "root"),
        )

    def _group(self, pg_name: str, where: str) -> str:
        """ "" and "0" are all ranks, as ASTRA-sim takes them."""
        if pg_name not in self._groups:
            if pg_name in self._ranks:
                ranks: Sequence[int] = self._ranks[pg_name]
                if max(ranks, default=0) >= self._world:
                    absent = self._file.replace(f".{self._rank}.et", f".{self._world}.et")
                    allowed = f"ranks that have a file: there is no {absent}"
                    raise ConfigError(f"{where}: pg_name", f"{pg_name}: {ranks}", allowed)
                if self._rank not in ranks or not set(ranks) <= set(range(self._world)):
                    allowed = f"ranks from 0 to {self._world - 1}, {self._rank} among them"
                    raise ConfigError(f"{where}: pg_name", f"{pg_name}: {ranks}", allowed)
            elif pg_name in ("", "0"):
                ranks = range(self._world)
            else:
                raise ConfigError(f"{where}: pg_name", pg_name, f"a group of {GROUPS_FILE}")
            group = group_of(ranks, f"{GROUPS_FILE}: {pg_name}")
            name = name_of(group, self._world)
            self._groups[pg_name], self._used[name] = name, group
        return self._groups[pg_name]


def _stream(one: Node) -> str:
    stream = one.values.get("stream")
    if isinstance(stream, str) and stream:
        return stream
    if one.kind not in COMPUTES:
        return COMMUNICATION
    return CPU if one.values.get("is_cpu_op", False) else COMPUTE


def _whole(values: Mapping[str, Value], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parted(num_bytes: int, divisor: int, where: str) -> int:
    if num_bytes % divisor:
        raise ConfigError(f"{where}: comm_size", num_bytes, f"a multiple of {divisor} bytes")
    return num_bytes // divisor
