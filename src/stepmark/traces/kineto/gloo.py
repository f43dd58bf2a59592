"""Calls of gloo, which torch does not record as record_param_comms (seen in 2.13).

The trace has two events of a call: the operator (c10d::allreduce_), with shapes but, for lists
of tensors, without their type; and an annotation on the thread that does the work (gloo:
all_reduce), with shapes and types of the inputs. gloo does its work in the order of the calls,
so that the nth of a name belong together. Sizes need record_shapes; groups are not recorded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stepmark.model.collectives import torch_collective
from stepmark.timeline.trace_columns import CommArgs
from stepmark.traces.kineto.events import Event

OPERATOR, WORK = "c10d::", "gloo:"
_SILENT = ("c10d::check_for_nan", "c10d::wait")
# Operators whose first argument is both input and output.
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "send", "recv", "barrier"})
_TEXTS = ("input_dims", "input_types", "concrete_inputs")  # arguments as JSON
# Types of arguments without a type of elements.
_NO_TYPES = frozenset({"", "TensorList", "Scalar", "ScalarList"})


@dataclass(frozen=True, slots=True)
class GlooCall:
    """A call, and the start and end of its work in us, if the trace has it."""

    event: Event
    args: CommArgs
    work: tuple[float, float] | None


def gloo_calls(events: Iterable[Event]) -> list[GlooCall]:
    """Return the calls among operators of c10d and annotations of gloo."""
    by_thread: dict[int | str, list[Event]] = defaultdict(list)
    works: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=_span):
        if event.name.startswith(WORK):
            works[_family(event.name.removeprefix(WORK))].append(event)
        elif not event.name.startswith(_SILENT):
            by_thread[event.tid].append(event)
    operators: dict[str, list[Event]] = defaultdict(list)
    for event in itertools.chain.from_iterable(map(_innermost, by_thread.values())):
        operators[_family(event.name.removeprefix(OPERATOR))].append(event)
    args = _ArgsByText()
    calls = []
    for family, own in operators.items():
        own.sort(key=_span)
        done: Sequence[Event | None] = works[family]
        pairs = list(zip(own, works[family], strict=False))
        if len(own) != len(done) or any(_span(w)[0] < _span(e)[0] for e, w in pairs):
            done = [None] * len(own)  # not all of the work is in the trace
        calls += [
            GlooCall(event, args.of(event, work), _span(work) if work else None)
            for event, work in zip(own, done, strict=True)
        ]
    for family in works.keys() - operators.keys():  # old versions of torch have no operator
        calls += [GlooCall(work, args.of(work, None), _span(work)) for work in works[family]]
    return calls


class _ArgsByText:
    """Arguments of calls, decoded once for equal texts: those of a step recur in the others."""

    def __init__(self) -> None:
        self._known: dict[object, CommArgs] = {}

    def of(self, event: Event, work: Event | None) -> CommArgs:
        """Return the arguments of a call. event: its operator, else its annotation."""
        key = tuple(
            (each.name, *(bytes(getattr(each.args, field)) for field in _TEXTS if each.args))
            for each in (event, work)
            if each
        )
        args = self._known.get(key)
        if args is None:
            is_work = event.name.startswith(WORK)
            args = _args_of_work(event) if is_work else _args(event, work)
            self._known[key] = args
        return args


def _span(event: Event) -> tuple[float, float]:
    start = event.ts or 0.0
    return start, start + (event.dur or 0.0)


def _innermost(events: Sequence[Event]) -> Iterator[Event]:
    """Yield operators that contain no other: modes of the dispatcher call one inside itself."""
    for event, following in itertools.zip_longest(events, events[1:]):
        if following is None or _span(following)[0] >= _span(event)[1]:
            yield event


@functools.cache
def _family(name: str) -> str:
    """Return the collective that gloo does: its reduce-scatter is an all-reduce."""
    collective = torch_collective(name)
    return "all_reduce" if collective == "reduce_scatter" else collective


def _args(event: Event, work: Event | None) -> CommArgs:
    name = torch_collective(event.name.removeprefix(OPERATOR))
    outputs, inputs = (_elements_of(event, place) for place in (0, 1))
    concrete = _values(event, "concrete_inputs")
    splits = inputs, outputs
    if event.name == "c10d::alltoall_base_":
        outs, ins = (*concrete[3:5], "", "")[:2]
        splits = _splits(ins), _splits(outs)
    peer = concrete[2] if name in ("send", "recv") and len(concrete) > 2 else ""
    rank = int(peer) if str(peer).isdecimal() else None
    return CommArgs(
        collective=name or event.name.removeprefix(OPERATOR),
        dtype="" if name == "barrier" else _dtype(event) or (_dtype(work) if work else ""),
        in_elements=sum(outputs if name in _IN_PLACE else inputs),
        out_elements=sum(outputs),
        in_splits=splits[0] if name == "all_to_all" else (),
        out_splits=splits[1] if name == "all_to_all" else (),
        source=rank if name == "recv" else None,
        target=rank if name == "send" else None,
    )


def _args_of_work(work: Event) -> CommArgs:
    """Return what an annotation says: the inputs alone."""
    family = _family(work.name.removeprefix(WORK))
    num_inputs = len(_values(work, "input_dims"))
    elements = sum(sum(_elements_of(work, place)) for place in range(num_inputs))
    return CommArgs(
        collective=family or work.name.removeprefix(WORK),
        dtype=_dtype(work),
        in_elements=elements,
        out_elements=elements if family in _IN_PLACE else 0,
    )


def _dtype(event: Event) -> str:
    types = (str(kind) for kind in _values(event, "input_types"))
    return next((kind for kind in types if kind not in _NO_TYPES), "")


def _values(event: Event, field: str) -> list[Any]:
    raw: bytes | msgspec.Raw = getattr(event.args, field) if event.args else b""
    try:
        values = msgspec.json.decode(raw) if raw else []
    except msgspec.DecodeError:
        return []
    return values if isinstance(values, list) else []


def _elements_of(event: Event, place: int) -> tuple[int, ...]:
    """Return the elements of each tensor of an argument; () if it is none, or not recorded."""
    dims, types = _values(event, "input_dims"), _values(event, "input_types")
    if place >= min(len(dims), len(types)) or types[place] in _NO_TYPES - {"TensorList"}:
        return ()
    shapes: Sequence[Any] = dims[place] if types[place] == "TensorList" else [dims[place]]
    return tuple(
        math.prod(shape)
        for shape in shapes
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    )


def _splits(text: object) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(str(text), type=list[int]))
    except msgspec.MsgspecError:
        return ()
