"""Chakra execution traces (mlcommons/chakra), a file per rank, as ASTRA-sim is fed with them.

Attributes have the names and types that the feeders of mlcommons/chakra (21585d8, src/feeder)
and of ASTRA-sim (518bd51, astra-sim/workload/Workload.cc) read. Order on a stream and `after`
are both data_deps: the older feeder follows no others. comm_size is the bytes of a rank's
input, as ASTRA-sim's collective algorithms take it. Durations are whole microseconds, rounded
so that the sum over a stream is right within one; time_s holds the exact ones. Reading is in
chakra_reader.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation, Workload
from stepmark.workload.durations import describe, is_wait
from stepmark.workload.formats.chakra_reader import GROUPS_FILE, read
from stepmark.workload.formats.chakra_schema import (
    COMM_TYPES,
    VERSION,
    NodeType,
    classes,
    framed,
)
from stepmark.workload.formats.ranks import Instances, Issued, check_rank, of_a_rank
from stepmark.workload.formats.walk import remarks, walk

_GATHERED = (Collective.ALL_GATHER, Collective.GATHER)  # whose input is one part
TYPES = COMM_TYPES | {Collective.ALL_TO_ALL_V: COMM_TYPES[Collective.ALL_TO_ALL]}
PAIR = {SEND: NodeType.COMM_SEND, RECV: NodeType.COMM_RECV}


class Places:
    """Layers and micro-batches as serialized attributes: two parts of a message are one."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._known: dict[tuple[str, int], bytes] = {}

    def get(self, name: str, value: int) -> bytes:
        found = self._known.get((name, value))
        if found is None:
            one = self._made.attribute(name=name, int32_val=value)
            found = self._known[name, value] = self._made.node(attr=[one]).SerializeToString()
        return found


def constant(
    workload: Workload, rank: int, instances: Instances, made: Any
) -> Callable[[Operation], tuple[Operation, bytes]]:
    """An operation and what of its node is the same wherever it runs; b"" if it has no node."""
    tags = {name: index for index, name in enumerate(workload.groups)}

    def of(one: Operation) -> tuple[Operation, bytes]:
        if isinstance(one, ComputeOp):
            what = one.op.name if isinstance(one.op, Kernel) else describe(one.op)
            kind, values = NodeType.COMP, _computation(one, what)
        elif workload.groups[one.group].size == 1:
            return one, b""
        else:
            kind, what = PAIR.get(one.collective, NodeType.COMM_COLL), one.collective
            values = _communication(one, workload, rank, instances, tags)
        values |= {"phase.string": one.phase, "module.string": one.module}
        values |= {"stream.string": one.stream}
        if one.recompute:
            values["recompute.bool"] = True
        if one.time_s is not None:
            values["time_s.double"] = one.time_s
        name = f"{one.phase}.{one.module}.{what.partition(' ')[0]}"
        node = made.node(name=name, type=int(kind))
        for key, value in values.items():
            label, _, kind_of_value = key.rpartition(".")
            node.attr.append(made.attribute(name=label, **{f"{kind_of_value}_val": value}))
        return one, node.SerializeToString()

    return of


def _computation(one: ComputeOp, what: str) -> dict[str, object]:
    """ASTRA-sim's roofline divides by num_ops and never ends at a tensor_size of 0: not 0."""
    values: dict[str, object] = {"is_cpu_op.bool": False}
    for key, name, value in (
        ("num_ops.int64", "flops", one.op.flops),
        ("tensor_size.uint64", "bytes_moved", one.op.bytes_moved),
    ):
        if value is not None:
            values[key] = value or 1
        if value == 0:
            values[f"{name}.int64"] = 0
    values["op.string"] = what
    return values


def _communication(
    one: CommOp, workload: Workload, rank: int, instances: Instances, tags: dict[str, int]
) -> dict[str, object]:
    group = workload.groups[one.group]
    is_part = one.collective in (*PAIR, *_GATHERED)
    size = one.call_bytes() if is_part else one.message_bytes(group)
    values: dict[str, object] = {"is_cpu_op.bool": False, "comm_size.int64": size}
    if one.peer is None:
        values["comm_type.int64"] = TYPES[one.collective]
        values["pg_name.string"] = str(instances.number(one.group, rank))
        if one.root is not None:
            values["root.int32"] = one.root
        if one.redop != "none":
            values["redop.string"] = one.redop
    else:
        ranks = group.members(rank)
        peer = ranks[(ranks.index(rank) + one.peer) % len(ranks)]
        source, target = (rank, peer) if one.collective == SEND else (peer, rank)
        values |= {"comm_src.int32": source, "comm_dst.int32": target}
        values["comm_tag.int32"] = tags[one.group]
    if one.fused:
        values["fused.bool"] = True
    return values | {"dtype.string": one.dtype}


__all__ = ["beside", "comm_groups", "files", "lost", "read", "write"]

_REFUSED = (Collective.REDUCE, Collective.GATHER, Collective.SCATTER, Collective.BARRIER)


def write(workload: Workload, rank: int = 0) -> Iterator[bytes]:
    """One step of one rank; ASTRA-sim wants `{name}.{rank}.et` of every rank.

    Raises ConfigError for an unknown rank, for a collective that Chakra has not, and where
    protobuf is not installed.
    """
    return _checked(workload, rank, Instances(workload, first=1))


def _checked(workload: Workload, rank: int, instances: Instances) -> Iterator[bytes]:
    check_rank(workload, rank)
    for block in workload.blocks.values():
        for item in block:
            if isinstance(item, CommOp) and item.collective not in (*TYPES, *PAIR):
                allowed = f"one of {', '.join((*TYPES, *PAIR))}"
                raise ConfigError("collective", item.collective, allowed)
    classes()
    return _file(workload, rank, instances)


def comm_groups(workload: Workload) -> Iterator[str]:
    """ASTRA-sim's --comm-group-configuration: the ranks of each group that pg_name names."""
    separator = "{\n"
    for number, _, ranks in Instances(workload, first=1).members():
        yield f'{separator}"{number}": [{", ".join(map(str, ranks))}]'
        separator = ",\n"
    yield "{}\n" if separator == "{\n" else "\n}\n"


def files(
    workload: Workload, ranks: Iterable[int] | None = None, name: str = "workload"
) -> Iterator[tuple[str, Iterator[str] | Iterator[bytes]]]:
    """Names and contents of what ASTRA-sim needs of a workload."""
    yield GROUPS_FILE, comm_groups(workload)
    instances = Instances(workload, first=1)
    for rank in range(workload.world_size) if ranks is None else ranks:
        yield f"{name}.{rank}.et", _checked(workload, rank, instances)


def beside(
    workload: Workload, path: Path, rank: int = 0
) -> Iterator[tuple[Path, Iterator[str]]]:
    """What a file of one rank needs beside it to be read.

    Raises ConfigError for a name that no reader takes as that rank's.
    """
    if not re.fullmatch(rf".+\.{rank}\.et", path.name):
        raise ConfigError("out", path, f"a file PREFIX.{rank}.et, or a folder/ for all ranks")
    yield path.with_name(GROUPS_FILE), comm_groups(workload)


def lost(workload: Workload) -> list[str]:
    """What of this workload the format cannot say, or what ASTRA-sim does not take."""
    ops = {one for stage in range(len(workload.stages)) for one in workload.tally(stage)}
    computes = [one for one in ops if isinstance(one, ComputeOp)]
    comms = [one for one in ops if isinstance(one, CommOp)]
    used = {one.collective for one in comms}
    untimed = sum(one.time_s is None and not is_wait(one) for one in computes)
    costless = sum(None in (one.op.flops, one.op.bytes_moved) for one in computes)
    micros = [one.time_s * 1e6 for one in ops if one.time_s is not None]
    rounded = any(not math.isclose(time, round(time)) for time in micros)
    uneven, broadcast = Collective.ALL_TO_ALL_V in used, Collective.BROADCAST in used
    refused = ", ".join(sorted(used & set(_REFUSED)))
    return remarks(
        (True, "operators' shapes (only FLOPs, bytes and a name)"),
        (True, "model, settings, notes and the number of micro-batches"),
        (untimed, f"{untimed} computations without a time: ASTRA-sim takes 1 ns"),
        (
            costless,
            f"{costless} computations without FLOPs or bytes: no roofline in ASTRA-sim",
        ),
        (rounded, "durations below a microsecond: rounded, exact in the attribute time_s"),
        (uneven, "uneven parts of an all_to_all_v: written as an all-to-all"),
        (refused, f"{refused}: in the file, but ASTRA-sim refuses them"),
        (broadcast, "broadcast: in the file, but ASTRA-sim gives it its duration or 1 ns"),
        *of_a_rank(workload, comms),
    )


@dataclass(slots=True)
class _Stream:
    """Where a stream stands. Parts of one call start after what its first part does."""

    before: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    elapsed_us: float = 0.0

    def follow(self, number: int, *, fused: bool) -> list[int]:
        """Adds an operation; which ones it starts after."""
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
    made = classes()
    label = made.attribute(name="workload", string_val=workload.name)
    yield framed(made.metadata(version=VERSION, attr=[label]).SerializeToString())
    issued, streams = Issued(workload), dict[str, _Stream]()
    places = Places(made)
    number = 0
    make = constant(workload, rank, instances, made)
    parts = walk(workload, workload.stage_of(rank), make)
    for operations, layer, microbatch in parts:
        chunk = []
        for (one, said), own_layer, own_microbatch in operations:
            if not said:
                continue
            stream = streams.setdefault(one.stream, _Stream())
            fused = isinstance(one, CommOp) and one.fused
            deps = stream.follow(number, fused=fused)
            if one.after:
                deps = sorted({*deps, *issued.find(one.after)})
            node = made.node(id=number, data_deps=deps)
            if one.time_s is not None:
                node.duration_micros = stream.spend(one.time_s)
            data = said + node.SerializeToString()
            if own_layer is not None:
                data += places.get("layer", own_layer + layer)
            if own_microbatch is not None:
                data += places.get("microbatch", own_microbatch + microbatch)
            chunk.append(framed(data))
            issued.note(one.name, number)
            number += 1
        yield b"".join(chunk)
