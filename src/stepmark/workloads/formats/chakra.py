"""Chakra execution traces (mlcommons/chakra), a file per rank, as ASTRA-sim is fed with them.

Attributes have the names and types that the feeders of mlcommons/chakra (21585d8, src/feeder)
and of ASTRA-sim (518bd51, astra-sim/workload/Workload.cc) read. Order on a stream and `after`
are both data_deps: the older feeder follows no others. comm_size is the bytes of a rank's
input, as ASTRA-sim's collective algorithms take it. Durations are whole microseconds, rounded
so that the sum over a stream is right within one; time_s holds the exact ones.

A graph of nodes per rank is read as operations on streams. Nodes run in the order of their
numbers as far as their dependencies allow; those that neither compute nor communicate are left
out, and what waits for them waits for what they wait for. A trace from elsewhere has no streams
of ours: its computation is one stream, that of the CPU a second, its communication a third,
each in order. Loads and stores are computation too.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from stepmark.cases.message import RECV, SEND
from stepmark.ground import json_text
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
from stepmark.workloads.durations import describe
from stepmark.workloads.formats.chakra_schema import (
    COLLECTIVE_OF,
    COMM_TYPES,
    COMPUTES,
    VERSION,
    WHAT,
    Node,
    NodeType,
    Value,
    classes,
    framed,
    in_order,
    is_task,
    node_of,
    read_file,
    task_deps,
)
from stepmark.workloads.formats.loss import Representable, communication, present, tallied
from stepmark.workloads.formats.ranks import (
    Instances,
    Issued,
    check_rank,
    checked,
    first_rank,
    group_of,
    name_of,
    names_of,
    stages_of,
    transfer,
)
from stepmark.workloads.formats.walk import remarks, walk

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


CPU = "cpu"
COMMUNICATION = "communication"
_CALLERS = (
    "Of {} of {} files the ctrl_deps are left out: they go in a circle or out of the file, as "
    "those of callers do."
)


def read(path: Path) -> Workload:
    """Read a file PREFIX.0.et and those of the other ranks in its folder, or a folder of them.

    comm_groups.json in the folder gives the ranks of each pg_name. Neighbouring ranks with the
    same program become one stage. Raise ConfigError for anything that is no such trace.
    """
    paths = rank_files(path)
    ranks_by_group = groups(paths[0].parent)
    world = len(paths)
    metadata, first_nodes = read_file(paths[0])
    used_groups = _named_groups(metadata)
    names = names_of(used_groups, ranks_by_group, world, first=1)
    used_groups = used_groups if names else {}
    programs: list[list[Operation]] = []
    callers = 0
    for rank, file in enumerate(paths):
        nodes = read_file(file)[1] if rank else first_nodes
        ordered, controlled = in_order(nodes, file.name)
        callers += not controlled
        reader = Reader(file.name, world, rank, ranks_by_group, used_groups, names)
        programs.append(reader.operations(ordered))
    stages, blocks = stages_of(programs)
    return checked(
        Workload(
            name=str(metadata.get("workload") or paths[0].name.rsplit(".", 2)[0]),
            rules="chakra",
            source="mlcommons/chakra, execution trace",
            world_size=world,
            groups=used_groups,
            blocks=blocks,
            stages=stages,
            notes=(_CALLERS.format(callers, world),) if callers else (),
        )
    )


def _named_groups(metadata: Mapping[str, Value]) -> dict[str, Group]:
    """Return the groups that a file of ours names."""
    try:
        text = str(metadata.get("groups", "{}"))
        digits = json_text.decode(text, dict[str, tuple[tuple[int, int], ...]])
        return {name: Group(digits=dims) for name, dims in digits.items()}
    except (ValueError, ConfigError):
        return {}


class Reader:
    """Nodes of one rank as operations; `used_groups` collects the groups of all ranks.

    names: of the groups that it has at first, by pg_name.
    """

    def __init__(
        self,
        file: str,
        world_size: int,
        rank: int,
        ranks: Mapping[str, Sequence[int]],
        used_groups: dict[str, Group],
        names: Mapping[str, str],
    ) -> None:
        self._file = file
        self._world = world_size
        self._rank = rank
        self._ranks = ranks
        self._used_groups = used_groups
        self._names = names
        self._tags = tuple(used_groups) if names else ()  # group of each comm_tag
        self._group_names: dict[str, str] = {}  # by pg_name

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
        counts: Counter[str] = Counter()  # awaited operations by stream
        places: dict[int, int] = {}  # of an awaited operation among those of its stream
        operations = []
        for node in tasks:
            name = streams[node.number]
            deps = (dep for dep in waits[node.number] if streams[dep] != name)
            backs = [(streams[dep], counts[streams[dep]] - 1 - places[dep]) for dep in deps]
            operation = self.operation(node, f"{self._file}: node {node.number}")
            if node.number in awaited:
                places[node.number] = counts[name]
                counts[name] += 1
                operation = replace(operation, name=name)
            after = tuple(f"{other}~{back}" if back else other for other, back in backs)
            operations.append(replace(operation, stream=name, after=after))
        return operations

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
        group = self._group_of_pair(node, other, where)
        members = self._used_groups[group].members(self._rank)
        if other not in members:
            raise ConfigError(f"{where}: comm_dst or comm_src", other, f"a rank of {members}")
        ahead = members.index(other) - members.index(self._rank)
        return CommOp(
            collective=SEND if sends else RECV,
            count=_parted(num_bytes, common["dtype"].itemsize, where),
            group=group,
            peer=ahead % len(members),
            **common,
        )

    def _group_of_pair(self, node: Node, other: int, where: str) -> str:
        """Return the group of a message: by its tag, or its pg_name if that is no pair."""
        tag = _whole(node.values, "comm_tag")
        if tag is not None and 0 <= tag < len(self._tags):
            group = self._tags[tag]
            if other in self._used_groups[group].members(self._rank):
                return group
        pg_name = str(node.values.get("pg_name", ""))
        return self._group(pg_name if len(self._ranks.get(pg_name, ())) > 2 else "", where)

    def _collective(
        self, node: Node, where: str, num_bytes: int, common: dict[str, Any]
    ) -> CommOp:
        number = _whole(node.values, "comm_type")
        if number not in COLLECTIVE_OF:
            raise ConfigError(f"{where}: comm_type", number, f"from 0 to {max(COLLECTIVE_OF)}")
        kind = Collective(COLLECTIVE_OF[number])
        group = self._group(str(node.values.get("pg_name", "")), where)
        parts = 1 if kind in _GATHERED else num_parts(kind, self._used_groups[group].size)
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
            name = self._names.get(pg_name) or name_of(group, self._world)
            self._group_names[pg_name] = name
            self._used_groups.setdefault(name, group)
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


_GATHERED = (Collective.ALL_GATHER, Collective.GATHER)  # whose input is one part
TYPES = COMM_TYPES | {Collective.ALL_TO_ALL_V: COMM_TYPES[Collective.ALL_TO_ALL]}
PAIR = {SEND: NodeType.COMM_SEND, RECV: NodeType.COMM_RECV}


@functools.cache
def _place(name: str, value: int) -> bytes:
    """Serialize a layer or micro-batch as an attribute, to be appended to a node's bytes."""
    schema = classes()
    attribute = schema.attribute(name=name, int32_val=value)
    data: bytes = schema.node(attr=[attribute]).SerializeToString()
    return data


def _constant_part(
    workload: Workload, rank: int, instances: Instances, schema: Any
) -> Callable[[Operation], tuple[Operation, bytes]]:
    """Return a function from an operation to it and the constant part of its node.

    The part is the same wherever the operation runs, and b"" if it has no node.
    """
    tags = {name: index for index, name in enumerate(workload.groups)}

    def serialize(op: Operation) -> tuple[Operation, bytes]:
        if isinstance(op, ComputeOp):
            what = op.op.name if isinstance(op.op, Kernel) else describe(op.op)
            kind = NodeType.COMP
            values = _computation(op, what)
        elif workload.groups[op.group].size == 1:
            return op, b""
        else:
            kind = PAIR.get(op.collective, NodeType.COMM_COLL)
            what = op.collective if op.peer else COLLECTIVE_OF[TYPES[op.collective]]
            values = _communication(op, workload, rank, instances, tags)
        values |= {"phase.string": op.phase, "module.string": op.module}
        values |= {"stream.string": op.stream}
        if op.recompute:
            values["recompute.bool"] = True
        if op.time_s is not None:
            values["time_s.double"] = op.time_s
        name = f"{op.phase}.{op.module}.{what.partition(' ')[0]}"
        node = schema.node(name=name, type=int(kind))
        for key, value in values.items():
            label, _, kind_of_value = key.rpartition(".")
            node.attr.append(schema.attribute(name=label, **{f"{kind_of_value}_val": value}))
        return op, node.SerializeToString()

    return serialize


def _computation(op: ComputeOp, what: str) -> dict[str, object]:
    """Return the attributes of computation; sizes of 0 are 1.

    ASTRA-sim's roofline divides by num_ops and never ends at a tensor_size of 0.
    """
    values: dict[str, object] = {"is_cpu_op.bool": False}
    for key, name, value in (
        ("num_ops.int64", "flops", op.op.flops),
        ("tensor_size.uint64", "bytes_moved", op.op.bytes_moved),
    ):
        if value is not None:
            values[key] = value or 1
        if value == 0:
            values[f"{name}.int64"] = 0
    values["op.string"] = what
    return values


def _communication(
    op: CommOp, workload: Workload, rank: int, instances: Instances, tags: dict[str, int]
) -> dict[str, object]:
    group = workload.groups[op.group]
    is_part = op.collective in (*PAIR, *_GATHERED)
    size = op.call_bytes() if is_part else op.message_bytes(group)
    values: dict[str, object] = {"is_cpu_op.bool": False, "comm_size.int64": size}
    if op.peer is None:
        values["comm_type.int64"] = TYPES[op.collective]
        values["pg_name.string"] = str(instances.number(op.group, rank))
        if op.root is not None:
            values["root.int32"] = op.root
        if op.redop != "none":
            values["redop.string"] = op.redop
    else:
        source, target = transfer(op, group.members(rank), rank)
        values |= {"comm_src.int32": source, "comm_dst.int32": target}
        values["pg_name.string"] = str(instances.of_pair(op.group, source, target))
        values["comm_tag.int32"] = tags[op.group]
    if op.fused:
        values["fused.bool"] = True
    return values | {"dtype.string": op.dtype}


__all__ = ["comm_groups", "companions", "files", "kept", "omissions", "read", "write"]

_REFUSED = (Collective.REDUCE, Collective.GATHER, Collective.SCATTER, Collective.BARRIER)


def write(workload: Workload, rank: int = 0) -> Iterator[bytes]:
    """Yield the file of one rank's step; ASTRA-sim wants `{name}.{rank}.et` of every rank.

    Raise ConfigError for an unknown rank, for a collective that Chakra lacks, and without
    protobuf.
    """
    return _checked(workload, rank, Instances(workload, first=1))


def _checked(workload: Workload, rank: int, instances: Instances) -> Iterator[bytes]:
    check_rank(workload, rank, (*TYPES, *PAIR))
    classes()  # raises here and not when the file is already open
    return _file(workload, rank, instances)


def comm_groups(workload: Workload) -> Iterator[str]:
    """Yield ASTRA-sim's --comm-group-configuration: the ranks of each pg_name."""
    separator = "{\n"
    for number, _, ranks in Instances(workload, first=1).members():
        yield f'{separator}"{number}": [{", ".join(map(str, ranks))}]'
        separator = ",\n"
    yield "{}\n" if separator == "{\n" else "\n}\n"


def files(
    workload: Workload, ranks: Iterable[int] | None = None, name: str = "workload"
) -> Iterator[tuple[str, Iterator[str] | Iterator[bytes]]]:
    """Yield names and contents of the files that ASTRA-sim needs of a workload."""
    yield GROUPS_FILE, comm_groups(workload)
    instances = Instances(workload, first=1)
    for rank in range(workload.world_size) if ranks is None else ranks:
        yield f"{name}.{rank}.et", _checked(workload, rank, instances)


def companions(
    workload: Workload, path: Path, rank: int = 0
) -> Iterator[tuple[Path, Iterator[str]]]:
    """Yield paths and contents of the files that a reader of one rank's file needs.

    Raise ConfigError for a name that no reader takes as that rank's.
    """
    if not re.fullmatch(rf".+\.{rank}\.et", path.name):
        raise ConfigError("out", path, f"a file PREFIX.{rank}.et, or a folder/ for all ranks")
    yield path.with_name(GROUPS_FILE), comm_groups(workload)


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what the format cannot express of this workload, or ASTRA-sim does not take."""
    ops = tallied(workload, stages)
    computes = {op: times for op, times in ops.items() if isinstance(op, ComputeOp)}
    comms = [op for op in ops if isinstance(op, CommOp)]
    collectives = {op.collective for op in comms}
    untimed = sum(computes[op] for op in computes if op.time_s is None and not op.is_wait)
    costless = sum(computes[op] for op in computes if None in (op.op.flops, op.op.bytes_moved))
    micros = [op.time_s * 1e6 for op in ops if op.time_s is not None]
    refused = ", ".join(sorted(collectives & set(_REFUSED)))
    lacking = remarks(
        (
            any(not isinstance(op.op, Kernel) for op in computes),
            "operators' shapes (only FLOPs, bytes and a name)",
        ),
        (untimed, f"{untimed} computations without a time: ASTRA-sim takes 1 ns"),
        (costless, f"{costless} computations without FLOPs or bytes: no roofline in ASTRA-sim"),
        (
            any(not math.isclose(time, round(time)) for time in micros),
            "durations below a microsecond: rounded, exact in the attribute time_s",
        ),
        (
            Collective.ALL_TO_ALL_V in collectives,
            "uneven parts of an all_to_all_v: written as an all-to-all",
        ),
        (refused, f"{refused}: in the file, but ASTRA-sim refuses them"),
        (
            Collective.BROADCAST in collectives,
            "broadcast: in the file, but ASTRA-sim gives it its duration or 1 ns",
        ),
    )
    return [
        *present(workload, "model", "settings", "notes", "the number of micro-batches"),
        *present(workload, "start times"),
        *lacking,
    ]


def kept(workload: Workload, stage: int) -> Representable:
    """Return the messages of the file of a stage's first rank: its nodes, read back."""
    rank = first_rank(workload, stage)
    check_rank(workload, rank, (*TYPES, *PAIR))
    instances = Instances(workload, first=1)
    schema = classes()
    serialize = _constant_part(workload, rank, instances, schema)
    ranks = {str(number): members for number, _, members in instances.members()}
    groups: dict[str, Group] = {}
    reader = Reader(f"{workload.name}.{rank}.et", workload.world_size, rank, ranks, groups, {})
    result = Representable()
    for op, times, setup in communication(workload, stage):
        if not setup and (data := serialize(op)[1]):
            node = node_of(schema.node.FromString(data), op.module)
            read_back = reader.operation(node, op.module)
            assert isinstance(read_back, CommOp)
            result.add(read_back, groups[read_back.group], times, label=op.group)
    return result


@dataclass(slots=True)
class _Stream:
    """Progress of a stream. Parts of one call wait for the same as its first part."""

    before: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    elapsed_us: float = 0.0

    def follow(self, number: int, *, fused: bool) -> list[int]:
        """Add an operation. Return those of its stream that it starts after."""
        if fused:
            self.newest.append(number)
        else:
            self.before = self.newest
            self.newest = [number]
        return self.before

    def spend(self, time_s: float) -> int:
        began = round(self.elapsed_us)
        self.elapsed_us += time_s * 1e6
        return round(self.elapsed_us) - began


def _file(workload: Workload, rank: int, instances: Instances) -> Iterator[bytes]:
    schema = classes()
    digits = {name: group.digits for name, group in workload.groups.items()}
    attributes = [
        schema.attribute(name="workload", string_val=workload.name),
        schema.attribute(name="groups", string_val=msgspec.json.encode(digits).decode()),
    ]
    yield framed(schema.metadata(version=VERSION, attr=attributes).SerializeToString())
    issued = Issued(workload)
    streams = dict[str, _Stream]()
    number = 0
    serialize = _constant_part(workload, rank, instances, schema)
    for operations, layer, microbatch in walk(workload, workload.stage_of(rank), serialize):
        chunk = []
        for (op, constant_part), own_layer, own_microbatch in operations:
            if not constant_part:
                continue
            stream = streams.setdefault(op.stream, _Stream())
            fused = isinstance(op, CommOp) and op.fused
            deps = stream.follow(number, fused=fused)
            if op.after:
                deps = sorted({*deps, *issued.find(op.after)})
            node = schema.node(id=number, data_deps=deps)
            if op.time_s is not None:
                node.duration_micros = stream.spend(op.time_s)
            data = constant_part + node.SerializeToString()
            if own_layer is not None:
                data += _place("layer", own_layer + layer)
            if own_microbatch is not None:
                data += _place("microbatch", own_microbatch + microbatch)
            chunk.append(framed(data))
            issued.note(op.name, number)
            number += 1
        yield b"".join(chunk)
