"""Messages of a Chakra execution trace, made at run time, and how they follow in a file.

Numbers and names of fields are those of mlcommons/chakra (21585d8),
schema/protobuf/et_def.proto. A file is a GlobalMetadata and then Nodes, each behind its length
as a varint.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stepmark.core.collectives import Collective
from stepmark.core.errors import ConfigError

VERSION = "0.0.4"


class NodeType(IntEnum):
    """What a node does."""

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

# In this order a kind's value has number 3, 5, ... of AttributeProto, and its list the next.
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
    """Raises ConfigError where protobuf is not installed."""
    try:
        from google.protobuf import (  # noqa: PLC0415
            descriptor_pb2,
            descriptor_pool,
            message,
            message_factory,
        )
    except ImportError:
        allowed = "an installed package: pip install 'stepmark[chakra]'"
        raise ConfigError("format", "chakra", allowed) from None
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

    def made(name: str) -> Any:
        found = pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
        return message_factory.GetMessageClass(found)

    return Classes(
        metadata=made("GlobalMetadata"),
        node=made("Node"),
        attribute=made("AttributeProto"),
        decode_error=message.DecodeError,
    )


def _describe(made: Any, fields: tuple[_Field, ...], kinds: Any) -> None:
    is_attribute = made.name == "AttributeProto"
    if is_attribute:
        made.oneof_decl.add(name="value")
    for field in fields:
        one = made.field.add(name=field.name, number=field.number)
        one.label = kinds.LABEL_REPEATED if field.repeated else kinds.LABEL_OPTIONAL
        if field.kind in _KINDS:
            one.type = getattr(kinds, f"TYPE_{field.kind.upper()}")
        else:
            is_enum = field.kind == _NODE_TYPE
            one.type = kinds.TYPE_ENUM if is_enum else kinds.TYPE_MESSAGE
            one.type_name = f".{_PACKAGE}.{field.kind}"
        if is_attribute and field.number > 2:
            one.oneof_index = 0


def framed(data: bytes) -> bytes:
    """A message behind its length."""
    length, prefix = len(data), bytearray()
    while length > 127:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data


def frames(data: bytes, where: str) -> Iterator[bytes]:
    """The messages of a file. Raises ConfigError where one is cut off or absurdly long."""
    at = 0
    while at < len(data):
        begin, length, shift = at, data[at] & 127, 7
        while data[at] > 127 and at + 1 < len(data) and shift < 35:
            at += 1
            length |= (data[at] & 127) << shift
            shift += 7
        if data[at] > 127 or length > min(len(data) - at - 1, _MAX_MESSAGE):
            raise ConfigError(where, f"byte {begin}", "a whole Chakra message; it is cut off")
        yield data[at + 1 : at + 1 + length]
        at += 1 + length
