"""Chakra execution traces (mlcommons/chakra), a file per rank, as ASTRA-sim is fed with them.

Attributes have the names and types that the feeders of mlcommons/chakra (21585d8, src/feeder)
and of ASTRA-sim (518bd51, astra-sim/workload/Workload.cc) read. Order on a stream and `after`
are both data_deps: the older feeder follows no others. comm_size is the bytes of a rank's
input, as ASTRA-sim's collective algorithms take it. Durations are whole microseconds, rounded
so that the sum over a stream is right within one; time_s holds the exact ones. Reading is in
chakra_reader.py.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.step.workload import CommOp, ComputeOp, Group, Kernel, Operation, Workload
from stepmark.workloads.durations import describe
from stepmark.workloads.formats.chakra_reader import GROUPS_FILE, Reader, read
from stepmark.workloads.formats.chakra_schema import (
    COMM_TYPES,
    VERSION,
    NodeType,
    classes,
    framed,
    node_of,
)
from stepmark.workloads.formats.loss import Kept, communication, present, tallied
from stepmark.workloads.formats.ranks import (
    Instances,
    Issued,
    check_rank,
    first_rank,
    transfer,
)
from stepmark.workloads.formats.walk import remarks, walk

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
            kind, values = NodeType.COMP, _computation(op, what)
        elif workload.groups[op.group].size == 1:
            return op, b""
        else:
            kind, what = PAIR.get(op.collective, NodeType.COMM_COLL), op.collective
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
        values["pg_name.string"] = str(instances.of_pair(source, target))
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
    rounded = any(not math.isclose(time, round(time)) for time in micros)
    uneven, broadcast = (
        Collective.ALL_TO_ALL_V in collectives,
        Collective.BROADCAST in collectives,
    )
    refused = ", ".join(sorted(collectives & set(_REFUSED)))
    shapes = any(not isinstance(op.op, Kernel) for op in computes)
    lines = present(workload, "model", "settings", "notes", "the number of micro-batches")
    lines += present(workload, "start times")
    return lines + remarks(
        (shapes, "operators' shapes (only FLOPs, bytes and a name)"),
        (untimed, f"{untimed} computations without a time: ASTRA-sim takes 1 ns"),
        (costless, f"{costless} computations without FLOPs or bytes: no roofline in ASTRA-sim"),
        (rounded, "durations below a microsecond: rounded, exact in the attribute time_s"),
        (uneven, "uneven parts of an all_to_all_v: written as an all-to-all"),
        (refused, f"{refused}: in the file, but ASTRA-sim refuses them"),
        (broadcast, "broadcast: in the file, but ASTRA-sim gives it its duration or 1 ns"),
    )


def kept(workload: Workload, stage: int) -> Kept:
    """Return the messages of the file of a stage's first rank: its nodes, read back."""
    rank = first_rank(workload, stage)
    check_rank(workload, rank, (*TYPES, *PAIR))
    instances, schema = Instances(workload, first=1), classes()
    serialize = _constant_part(workload, rank, instances, schema)
    ranks = {str(number): members for number, _, members in instances.members()}
    groups: dict[str, Group] = {}
    reader = Reader(f"{workload.name}.{rank}.et", workload.world_size, rank, ranks, groups)
    result = Kept()
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
            self.before, self.newest = self.newest, [number]
        return self.before

    def spend(self, time_s: float) -> int:
        began = round(self.elapsed_us)
        self.elapsed_us += time_s * 1e6
        return round(self.elapsed_us) - began


def _file(workload: Workload, rank: int, instances: Instances) -> Iterator[bytes]:
    schema = classes()
    label = schema.attribute(name="workload", string_val=workload.name)
    yield framed(schema.metadata(version=VERSION, attr=[label]).SerializeToString())
    issued, streams = Issued(workload), dict[str, _Stream]()
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
