"""The graph of a Chakra execution trace: its nodes, in an order that they can run in."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.core.errors import ConfigError
from stepmark.workload.formats.chakra_schema import NodeType, classes, frames
from stepmark.workload.formats.source_file import read_bytes

WHAT = "Chakra trace"
COMPUTES = (NodeType.COMP, NodeType.MEM_LOAD, NodeType.MEM_STORE)
_DONE = (*COMPUTES, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
_TYPES = {int(kind): kind for kind in NodeType}

Value = str | int | float | bool | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is read of a node. `deps` are its data_deps, `controls` its ctrl_deps."""

    number: int
    name: str
    kind: NodeType
    deps: tuple[int, ...]
    controls: tuple[int, ...]
    time_s: float | None
    values: Mapping[str, Value]


def nodes(path: Path) -> list[Node]:
    """The nodes of a file. Raises ConfigError."""
    made = classes()
    found = []
    for index, data in enumerate(frames(read_bytes(path, WHAT), path.name)):
        where = f"{path.name}: message {index}"
        try:
            message = (made.node if index else made.metadata).FromString(data)
        except made.decode_error as error:
            raise ConfigError(where, type(error).__name__, "a Chakra message") from None
        if index:
            found.append(_node(message, where))
    return found


def _node(message: Any, where: str) -> Node:
    values: dict[str, Value] = {}
    for one in message.attr:
        held = one.WhichOneof("value")
        if held is not None and not held.endswith("_list"):
            values[one.name] = getattr(one, held)
    kind = _TYPES.get(message.type)
    if kind is None:
        raise ConfigError(f"{where}: type", message.type, f"from 0 to {max(NodeType)}")
    if values.get("is_cpu_op") and "comm_size" not in values and kind in _DONE:
        kind = NodeType.COMP  # a call of the host that issues a collective, in a real trace
    exact, micros = values.get("time_s"), message.duration_micros
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


def in_order(found: Sequence[Node], file: str) -> tuple[list[Node], bool]:
    """By number as far as dependencies allow, and whether ctrl_deps are among `deps` then.

    They are unless one leads out of the file or into a circle: mlcommons' converter puts a
    node's caller there. Raises ConfigError for a circle or a gap of data_deps.
    """
    known = {one.number for one in found}
    if len(known) != len(found):
        raise ConfigError(file, f"{len(found) - len(known)} nodes", "nodes with different ids")
    for one in found:
        if absent := set(one.deps) - known:
            raise ConfigError(f"{file}: node {one.number}", min(absent), "a node of the file")
    if all(known.issuperset(one.controls) for one in found):
        ordered = _sorted([replace(one, deps=(*one.deps, *one.controls)) for one in found])
        if len(ordered) == len(found):
            return ordered, True
    ordered = _sorted(found)
    if len(ordered) != len(found):
        raise ConfigError(
            file,
            f"{len(found) - len(ordered)} nodes",
            "there must be no circle of dependencies",
        )
    return ordered, False


def _sorted(found: Sequence[Node]) -> list[Node]:
    """Those that can run, the lowest number first."""
    known = {one.number: one for one in found}
    waiting = {one.number: len(set(one.deps)) for one in found}
    children: dict[int, list[int]] = {}
    for one in found:
        for dep in set(one.deps):
            children.setdefault(dep, []).append(one.number)
    ready = [number for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        number = heapq.heappop(ready)
        ordered.append(known[number])
        for child in children.get(number, ()):
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, child)
    return ordered


def is_done(one: Node) -> bool:
    return one.kind in _DONE


def through(ordered: Sequence[Node]) -> dict[int, tuple[int, ...]]:
    """What each node waits for, past nodes that do nothing."""
    done = {one.number: is_done(one) for one in ordered}
    found: dict[int, tuple[int, ...]] = {}
    for one in ordered:
        deps = (((dep,) if done[dep] else found[dep]) for dep in one.deps)
        found[one.number] = tuple(dict.fromkeys(number for some in deps for number in some))
    return found
