"""Messages of a Chakra execution trace, their framing in a file, and the graph of its nodes.

Numbers and names of fields are those of mlcommons/chakra (21585d8),
schema/protobuf/et_def.proto; the messages are made at run time. A file is a GlobalMetadata and
then Nodes, each behind its length as a varint.
"""

import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.packages import missing_package
from stepmark.ground.read_text import read_whole
from stepmark.model.collectives import Collective
from stepmark.workloads.formats import varint

VERSION = "0.0.4"


class NodeType(IntEnum):
    """Type of a node."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COMM_TYPES: dict[str, int] = {
    Collective.ALL_REDUCE: 0,
    Collective.REDUCE: 1,
    Collective.ALL_GATHER: 2,
    Collective.GATHER: 3,
    Collective.SCATTER: 4,
    Collective.BROADCAST: 5,
    Collective.ALL_TO_ALL: 6,
    Collective.REDUCE_SCATTER: 7,
    Collective.BARRIER: 9,
}
# 8 is a reduce-scatter of equal blocks, which ours always are.
COLLECTIVE_OF = {number: name for name, number in COMM_TYPES.items()} | {
    8: Collective.REDUCE_SCATTER
}

# The order gives the numbers in AttributeProto: 3, 5, ... of a value, the next one of its list.
_KINDS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_PACKAGE = "ChakraProtoMsg"
_NODE_TYPE = "NodeType"
_MAX_MESSAGE = 2**26


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    number: int
    kind: str  # of _KINDS, or a message, or _NODE_TYPE
    repeated: bool = False


_MESSAGES: dict[str, tuple[_Field, ...]] = {
    **{f"{kind.title()}List": (_Field("values", 1, kind, True),) for kind in _KINDS},
    "AttributeProto": (
        _Field("name", 1, "string"),
        _Field("doc_string", 2, "string"),
        *(_Field(f"{kind}_val", 3 + 2 * at, kind) for at, kind in enumerate(_KINDS)),
        *(
            _Field(f"{kind}_list", 4 + 2 * at, f"{kind.title()}List")
            for at, kind in enumerate(_KINDS)
        ),
    ),
    "GlobalMetadata": (
        _Field("version", 1, "string"),
        _Field("attr", 2, "AttributeProto", True),
    ),
    "IOInfo": (
        _Field("values", 1, "string"),
        _Field("shapes", 2, "string"),
        _Field("types", 3, "string"),
    ),
    "Node": (
        _Field("id", 1, "uint64"),
        _Field("name", 2, "string"),
        _Field("type", 3, _NODE_TYPE),
        _Field("ctrl_deps", 4, "uint64", True),
        _Field("data_deps", 5, "uint64", True),
        _Field("start_time_micros", 6, "uint64"),
        _Field("duration_micros", 7, "uint64"),
        _Field("inputs", 8, "IOInfo"),
        _Field("outputs", 9, "IOInfo"),
        _Field("attr", 10, "AttributeProto", True),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Message classes of the schema."""

    metadata: Any
    node: Any
    attribute: Any
    decode_error: type[Exception]


@functools.cache
def classes() -> Classes:
    """Return the message classes. Raise ConfigError without protobuf."""
    try:
        from google.protobuf import (  # noqa: PLC0415 - optional
            descriptor_pb2,
            descriptor_pool,
            message,
            message_factory,
        )
    except ImportError:
        raise missing_package("google.protobuf") from None
    file = descriptor_pb2.FileDescriptorProto(
        name="stepmark/chakra.proto", package=_PACKAGE, syntax="proto3"
    )
    types = file.enum_type.add(name=_NODE_TYPE)
    for kind in NodeType:
        types.value.add(name=f"{kind.name}_NODE", number=kind)
    for name, fields in _MESSAGES.items():
        _describe(file.message_type.add(name=name), fields, descriptor_pb2.FieldDescriptorProto)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def message_class(name: str) -> Any:
        descriptor = pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
        return message_factory.GetMessageClass(descriptor)

    return Classes(
        metadata=message_class("GlobalMetadata"),
        node=message_class("Node"),
        attribute=message_class("AttributeProto"),
        decode_error=message.DecodeError,
    )


def _describe(message: Any, fields: tuple[_Field, ...], kinds: Any) -> None:
    is_attribute = message.name == "AttributeProto"
    if is_attribute:
        message.oneof_decl.add(name="value")
    for field in fields:
        descriptor = message.field.add(name=field.name, number=field.number)
        descriptor.label = kinds.LABEL_REPEATED if field.repeated else kinds.LABEL_OPTIONAL
        if field.kind in _KINDS:
            descriptor.type = getattr(kinds, f"TYPE_{field.kind.upper()}")
        else:
            is_enum = field.kind == _NODE_TYPE
            descriptor.type = kinds.TYPE_ENUM if is_enum else kinds.TYPE_MESSAGE
            descriptor.type_name = f".{_PACKAGE}.{field.kind}"
        if is_attribute and field.number > 2:
            descriptor.oneof_index = 0


def framed(data: bytes) -> bytes:
    """Return a message behind its length."""
    length = len(data)
    prefix = bytearray()
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data


def frames(data: bytes, where: str) -> Iterator[bytes]:
    """Yield the messages of a file. Raise ConfigError where one is cut off or absurdly long."""
    at = 0
    while at < len(data):
        length, begin = varint(data, at)
        end = begin + length
        if end > len(data) or length > _MAX_MESSAGE:
            raise ConfigError(where, f"byte {at}", "a whole Chakra message; it is cut off")
        yield data[begin:end]
        at = end


WHAT = "Chakra trace"
COMPUTES = (NodeType.COMP, NodeType.MEM_LOAD, NodeType.MEM_STORE)
_TASKS = (*COMPUTES, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
_TYPES = {int(kind): kind for kind in NodeType}

Value = str | int | float | bool | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Content of a node. `deps` are its data_deps, `controls` its ctrl_deps."""

    number: int
    name: str
    kind: NodeType
    deps: tuple[int, ...]
    controls: tuple[int, ...]
    time_s: float | None
    values: Mapping[str, Value]


def read_file(path: Path) -> tuple[Mapping[str, Value], list[Node]]:
    """Return the attributes of a file's metadata, and its nodes. Raise ConfigError."""
    schema = classes()
    metadata: Mapping[str, Value] = {}
    nodes = []
    for index, data in enumerate(frames(read_whole(path, WHAT), path.name)):
        where = f"{path.name}: message {index}"
        try:
            message = (schema.node if index else schema.metadata).FromString(data)
        except schema.decode_error as error:
            raise ConfigError(where, type(error).__name__, "a Chakra message") from None
        if index:
            nodes.append(node_of(message, where))
        else:
            metadata = _values(message)
    return metadata, nodes


def _values(message: Any) -> dict[str, Value]:
    """Return the attributes of a message that are no lists."""
    values: dict[str, Value] = {}
    for attribute in message.attr:
        field = attribute.WhichOneof("value")
        if field is not None and not field.endswith("_list"):
            values[attribute.name] = getattr(attribute, field)
    return values


def node_of(message: Any, where: str) -> Node:
    """Return the content of a decoded node. Raise ConfigError."""
    values = _values(message)
    kind = _TYPES.get(message.type)
    if kind is None:
        raise ConfigError(f"{where}: type", message.type, f"from 0 to {max(NodeType)}")
    if values.get("is_cpu_op") and "comm_size" not in values and kind in _TASKS:
        kind = NodeType.COMP  # a call of the host that issues a collective, in a real trace
    exact = values.get("time_s")
    micros = message.duration_micros
    time_s = exact if isinstance(exact, float) else micros / 1e6 if micros else None
    if time_s is not None and not 0 <= time_s < math.inf:
        raise ConfigError(f"{where}: time_s", time_s, "seconds")
    return Node(
        number=message.id,
        name=message.name,
        kind=kind,
        deps=tuple(message.data_deps),
        controls=tuple(message.ctrl_deps),
        time_s=time_s,
        values=values,
    )


def in_order(nodes: Sequence[Node], file: str) -> tuple[list[Node], bool]:
    """Sort by number as far as dependencies allow. Return also whether ctrl_deps are in `deps`.

    They are unless one leads out of the file or into a circle: mlcommons' converter puts a
    node's caller there. Raise ConfigError for a circle or a gap of data_deps.
    """
    numbers = {node.number for node in nodes}
    if len(numbers) != len(nodes):
        raise ConfigError(
            file, f"{len(nodes) - len(numbers)} nodes", "nodes with different ids"
        )
    for node in nodes:
        if absent := set(node.deps) - numbers:
            raise ConfigError(f"{file}: node {node.number}", min(absent), "a node of the file")
    if all(numbers.issuperset(node.controls) for node in nodes):
        ordered = _sorted([replace(node, deps=(*node.deps, *node.controls)) for node in nodes])
        if len(ordered) == len(nodes):
            return ordered, True
    ordered = _sorted(nodes)
    if len(ordered) != len(nodes):
        raise ConfigError(
            file,
            f"{len(nodes) - len(ordered)} nodes",
            "there must be no circle of dependencies",
        )
    return ordered, False


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that can run, the lowest number first."""
    by_number = {node.number: node for node in nodes}
    waiting = {node.number: len(set(node.deps)) for node in nodes}
    children: dict[int, list[int]] = {}
    for node in nodes:
        for dep in set(node.deps):
            children.setdefault(dep, []).append(node.number)
    ready = [number for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        number = heapq.heappop(ready)
        ordered.append(by_number[number])
        for child in children.get(number, ()):
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, child)
    return ordered


def is_task(node: Node) -> bool:
    """Return whether a node computes or communicates."""
    return node.kind in _TASKS


def task_deps(ordered: Sequence[Node]) -> dict[int, tuple[int, ...]]:
    """Return the tasks that each node waits for, directly or through nodes that do nothing."""
    tasks = {node.number for node in ordered if is_task(node)}
    waits: dict[int, tuple[int, ...]] = {}
    for node in ordered:
        deps = (((dep,) if dep in tasks else waits[dep]) for dep in node.deps)
        waits[node.number] = tuple(dict.fromkeys(number for chain in deps for number in chain))
    return waits
