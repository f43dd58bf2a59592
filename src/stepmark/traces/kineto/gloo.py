"""Calls of gloo, which torch does not record as record_param_comms (seen in 2.13).

The trace has two events of a call: the operator (c10d::allreduce_), with shapes but, for lists
of tensors, without their type; and an annotation on the thread that does the work (gloo:
all_reduce), with shapes and types of the inputs. gloo does its work in the order of the calls,
so that the nth of a name belong together. Sizes need record_shapes; groups are not recorded.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepmark.ground import json_text
from stepmark.model.collectives import torch_collective
from stepmark.timeline.trace_columns import NONE, CommArgs, Ints
from stepmark.traces.kineto.events import Args

OPERATOR = "c10d::"
WORK = "gloo:"
_SILENT = ("c10d::check_for_nan", "c10d::wait")
# Operators whose first argument is both input and output.
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce", "send", "recv", "barrier"})
# Types of arguments without a type of elements.
_NO_TYPES = frozenset({"", "TensorList", "Scalar", "ScalarList"})


class Signature(NamedTuple):
    """What an event states of its call, which recurs in every step. Arguments are JSON."""

    name: str
    input_dims: bytes
    input_types: bytes
    concrete_inputs: bytes


def signature(name: str, args: Args) -> Signature:
    """Return the signature of an event, apart from the text of the file."""
    texts = (args.input_dims, args.input_types, args.concrete_inputs)
    return Signature(name, *map(bytes, texts))


def gloo_calls(
    times: tuple[Ints, Ints], thread: Ints, signatures: Sequence[Signature], number: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Yield the rows of calls among these events, and the rows of their work, or NONE.

    times: start and end of operators of c10d and annotations of gloo, in the order of their
    starts. number: of their signatures.
    """
    start, end = times
    names = [each.name for each in signatures]
    is_work = np.array([name.startswith(WORK) for name in names], bool)[number]
    is_silent = np.array([name.startswith(_SILENT) for name in names], bool)[number]
    families = [_family(name.removeprefix(WORK).removeprefix(OPERATOR)) for name in names]
    labels = {family: label for label, family in enumerate(families)}
    family = np.array([labels[name] for name in families], np.int64)[number]
    operators = _innermost(start, end, thread, np.flatnonzero(~is_work & ~is_silent))
    works = np.flatnonzero(is_work)
    for label in labels.values():
        rows = operators[family[operators] == label]
        work = works[family[works] == label]
        if not rows.size:  # old versions of torch have no operator
            yield work, work
        elif rows.size == work.size and (start[work] >= start[rows]).all():
            yield rows, work
        else:  # not all of the work is in the trace
            yield rows, np.full(rows.size, NONE, np.int64)


def _innermost(start: Ints, end: Ints, thread: Ints, rows: Ints) -> Ints:
    """Return the rows that contain no other: modes of the dispatcher call one inside itself."""
    rows = rows[np.argsort(thread[rows], kind="stable")]
    before = rows[:-1]
    after = rows[1:]
    is_apart = (thread[before] != thread[after]) | (start[after] >= end[before])
    return np.sort(rows[np.append(is_apart, True)[: rows.size]])


def args_of(event: Signature, work: Signature | None) -> CommArgs:
    """Return the arguments of a call. event: its operator, else its annotation."""
    return _args_of_work(event) if event.name.startswith(WORK) else _args(event, work)


@functools.cache
def _family(name: str) -> str:
    """Return the collective that gloo does: its reduce-scatter is an all-reduce."""
    collective = torch_collective(name)
    return "all_reduce" if collective == "reduce_scatter" else collective


def _args(event: Signature, work: Signature | None) -> CommArgs:
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


def _args_of_work(work: Signature) -> CommArgs:
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


def _dtype(event: Signature) -> str:
    types = (str(kind) for kind in _values(event, "input_types"))
    return next((kind for kind in types if kind not in _NO_TYPES), "")


def _values(event: Signature, field: str) -> list[Any]:
    raw: bytes = getattr(event, field)
    try:
        values = json_text.decode(raw) if raw else []
    except ValueError:
        return []
    return values if isinstance(values, list) else []


def _elements_of(event: Signature, place: int) -> tuple[int, ...]:
    """Return the elements of each tensor of an argument; () if it is none, or not recorded."""
    dims = _values(event, "input_dims")
    types = _values(event, "input_types")
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
        return tuple(json_text.decode(str(text), list[int]))
    except ValueError:
        return ()
