"""Read Chakra execution traces: a graph of nodes per rank becomes operations on streams.

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

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType, parse_dtype
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp, num_parts
from stepmark.model.ops import Phase
from stepmark.step.source_file import decoded
from stepmark.step.workload import (
    COMPUTE,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Workload,
)
from stepmark.workloads.formats.chakra_schema import (
    COLLECTIVE_OF,
    COMPUTES,
    WHAT,
    Node,
    NodeType,
    Value,
    in_order,
    is_task,
    read_nodes,
    task_deps,
)
from stepmark.workloads.formats.ranks import (
    WORLD,
    disagreements,
    group_of,
    in_groups_of_messages,
    name_of,
    stages_of,
)

GROUPS_FILE = "comm_groups.json"


def rank_files(path: Path) -> list[Path]:
    """Return PREFIX.0.et, PREFIX.1.et, ... of a folder, or of one of these files."""
    if path.is_dir():
        first = sorted(path.glob("*.0.et"))
        if len(first) != 1:
            raise ConfigError(WHAT, path, f"a folder with one PREFIX.0.et: it has {len(first)}")
        path = first[0]
    if not (match := re.fullmatch(r"(.+)\.\d+\.et", path.name)):
        raise ConfigError(WHAT, path, "a file PREFIX.RANK.et")
    prefix = match[1]
    pattern = re.compile(rf"{re.escape(prefix)}\.\d+\.et")
    count = sum(1 for file in path.parent.glob("*.et") if pattern.fullmatch(file.name))
    paths = [path.with_name(f"{prefix}.{rank}.et") for rank in range(count)]
    absent = [file.name for file in paths if not file.is_file()]
    if absent or path not in paths:
        lacks = absent[0] if absent else path.name
        raise ConfigError(
            WHAT, path, f"it must have the files of all ranks: there is no {lacks}"
        )
    return paths


def groups(folder: Path) -> dict[str, list[int]]:
    """Return the ranks of each pg_name; nothing without the file."""
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
    """Calls so far, the call of each named operation, and the newest awaited operations."""

    calls: int = 0
    named: list[int] = field(default_factory=list)
    waited: dict[str, int] = field(default_factory=dict)  # index in `named`, by stream


def read(path: Path) -> Workload:
    """Read a file PREFIX.0.et and those of the other ranks in its folder, or a folder of them.

    comm_groups.json in the folder gives the ranks of each pg_name. Neighbouring ranks with the
    same program become one stage. Raise ConfigError for anything that is no such trace.
    """
    paths = rank_files(path)
    ranks_by_group = groups(paths[0].parent)
    world = len(paths)
    used_groups: dict[str, Group] = {}
    programs: list[list[Operation]] = []
    links: dict[tuple[int, ...], None] = {}
    callers = 0
    for rank, file in enumerate(paths):
        ordered, controlled = in_order(read_nodes(file), file.name)
        callers += not controlled
        reader = Reader(file.name, world, rank, ranks_by_group, used_groups)
        programs.append(reader.operations(ordered))
        links |= reader.links
    programs = in_groups_of_messages(programs, links, used_groups)
    stages, blocks = stages_of(programs)
    workload = Workload(
        name=paths[0].name.rsplit(".", 2)[0],
        rules="chakra",
        source="mlcommons/chakra, execution trace",
        world_size=world,
        groups=used_groups,
        blocks=blocks,
        stages=stages,
        notes=(_CALLERS.format(callers, world),) if callers else (),
    )
    workload.check()
    return replace(workload, notes=workload.notes + disagreements(workload))


class Reader:
    """Nodes of one rank as operations; `used_groups` collects the groups of all ranks."""

    def __init__(
        self,
        file: str,
        world_size: int,
        rank: int,
        ranks: Mapping[str, Sequence[int]],
        used_groups: dict[str, Group],
    ) -> None:
        self._file, self._world, self._rank = file, world_size, rank
        self._ranks, self._used_groups = ranks, used_groups
        self._group_names: dict[str, str] = {}  # by pg_name
        self._streams: dict[str, _Stream] = {}
        # Process groups that sends and receives name.
        self.links: dict[tuple[int, ...], None] = {}

    def operations(self, ordered: Sequence[Node]) -> list[Operation]:
        streams = {node.number: _stream(node) for node in ordered}
        waits = task_deps(ordered)
        tasks = [node for node in ordered if is_task(node)]
        awaited = {
            dep
            for node in tasks
            for dep in waits[node.number]
            if streams[dep] != streams[node.number]
        }
        placed: dict[int, int] = {}  # index in its stream's `named`
        operations = []
        for node in tasks:
            name = streams[node.number]
            stream = self._streams.setdefault(name, _Stream())
            deps = [(streams[dep], placed.get(dep)) for dep in waits[node.number]]
            after = self._after(stream, deps, name)
            operation = self.operation(node, f"{self._file}: node {node.number}")
            stream.calls += not (isinstance(operation, CommOp) and operation.fused)
            if node.number in awaited:
                placed[node.number] = len(stream.named)
                stream.named.append(stream.calls)
                operation = replace(operation, name=name)
            operations.append(replace(operation, stream=name, after=after))
        return operations

    def _after(
        self, own: _Stream, deps: Iterable[tuple[str, int | None]], name: str
    ) -> tuple[str, ...]:
        """Return the newest call of each other stream that this one has not waited for yet."""
        places: dict[str, list[int]] = {}
        for stream, place in deps:
            if stream != name and place is not None:
                places.setdefault(stream, []).append(place)
        names = []
        for stream, positions in places.items():
            newest, named = max(positions), self._streams[stream].named
            if newest <= own.waited.get(stream, -1):
                continue
            own.waited[stream] = newest
            for place in sorted(set(positions)):
                if named[place] == named[newest]:
                    back = len(named) - 1 - place
                    names.append(f"{stream}~{back}" if back else stream)
        return tuple(names)

    def operation(self, node: Node, where: str) -> Operation:
        values = node.values
        phase = str(values.get("phase", Phase.STEP))
        common: dict[str, Any] = {
            "phase": Phase(phase) if phase in set(Phase) else Phase.STEP,
            "module": str(values.get("module", "")),
            "layer": _whole(values, "layer"),
            "microbatch": _whole(values, "microbatch"),
            "recompute": bool(values.get("recompute", False)),
            "time_s": node.time_s,
        }
        if node.kind in COMPUTES:
            flops = _whole(values, "flops" if "flops" in values else "num_ops")
            bytes_moved = _whole(
                values, "bytes_moved" if "bytes_moved" in values else "tensor_size"
            )
            if min(flops or 0, bytes_moved or 0) < 0:
                raise ConfigError(
                    f"{where}: num_ops, tensor_size", (flops, bytes_moved), "0 or more"
                )
            name = str(values.get("op", node.name))
            return ComputeOp(
                op=Kernel(name=name, flops=flops, bytes_moved=bytes_moved), **common
            )
        dtype = DType.UINT8
        if "dtype" in values:
            dtype = parse_dtype(str(values["dtype"]), f"{where}: dtype", MESSAGE_DTYPES)
        num_bytes = _whole(values, "comm_size")
        if num_bytes is None or num_bytes < 0:
            raise ConfigError(f"{where}: comm_size", num_bytes, "a number of bytes")
        common |= {"dtype": dtype, "fused": bool(values.get("fused", False))}
        build = self._collective if node.kind is NodeType.COMM_COLL else self._pair
        return build(node, where, num_bytes, common)

    def _pair(self, node: Node, where: str, num_bytes: int, common: dict[str, Any]) -> CommOp:
        sends = node.kind is NodeType.COMM_SEND
        other = _whole(node.values, "comm_dst" if sends else "comm_src")
        if other is None or not 0 <= other < self._world:
            allowed = f"a rank from 0 to {self._world - 1}"
            raise ConfigError(f"{where}: comm_dst or comm_src", other, allowed)
        self._used_groups[WORLD] = Group(digits=((self._world, 1),))
        ranks = tuple(self._ranks.get(str(node.values.get("pg_name", "")), ()))
        if ranks and min(ranks) >= 0 and max(ranks) < self._world:
            self.links[ranks] = None
        return CommOp(
            collective=SEND if sends else RECV,
            count=_parted(num_bytes, common["dtype"].itemsize, where),
            group=WORLD,
            peer=(other - self._rank) % self._world,
            **common,
        )

    def _collective(
        self, node: Node, where: str, num_bytes: int, common: dict[str, Any]
    ) -> CommOp:
        number = _whole(node.values, "comm_type")
        if number not in COLLECTIVE_OF:
            raise ConfigError(f"{where}: comm_type", number, f"from 0 to {max(COLLECTIVE_OF)}")
        kind = Collective(COLLECTIVE_OF[number])
        group = self._group(str(node.values.get("pg_name", "")), where)
        gathers = kind in (Collective.ALL_GATHER, Collective.GATHER)
        parts = 1 if gathers else num_parts(kind, self._used_groups[group].size)
        redop = str(node.values.get("redop", RedOp.NONE))
        return CommOp(
            collective=str(kind),
            count=_parted(num_bytes, parts * common["dtype"].itemsize, where),
            group=group,
            redop=RedOp(redop) if redop in set(RedOp) else RedOp.NONE,
            root=_whole(node.values, "root"),
            **common,
        )

    def _group(self, pg_name: str, where: str) -> str:
        """Return the name of a group; "" and "0" are all ranks, as in ASTRA-sim."""
        if pg_name not in self._group_names:
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
            self._group_names[pg_name], self._used_groups[name] = name, group
        return self._group_names[pg_name]


def _stream(node: Node) -> str:
    stream = node.values.get("stream")
    if isinstance(stream, str) and stream:
        return stream
    if node.kind not in COMPUTES:
        return COMMUNICATION
    return CPU if node.values.get("is_cpu_op", False) else COMPUTE


def _whole(values: Mapping[str, Value], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parted(num_bytes: int, divisor: int, where: str) -> int:
    if num_bytes % divisor:
        raise ConfigError(f"{where}: comm_size", num_bytes, f"a multiple of {divisor} bytes")
    return num_bytes // divisor
