"""Nodes of a Chakra execution trace: what an operation says wherever it runs, and where."""

from collections.abc import Callable
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.message import RECV, SEND
from stepmark.core.workload import CommOp, ComputeOp, Kernel, Operation, Workload
from stepmark.workload.durations import describe
from stepmark.workload.formats.chakra_schema import COMM_TYPES, NodeType
from stepmark.workload.formats.ranks import Instances

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
        node.attr.extend(_attribute(made, key, value) for key, value in values.items())
        return one, node.SerializeToString()

    return of


def _attribute(made: Any, key: str, value: object) -> Any:
    name, _, kind = key.rpartition(".")
    return made.attribute(name=name, **{f"{kind}_val": value})


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
