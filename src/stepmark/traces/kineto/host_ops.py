"""Joins between operations and annotations of one process's host: nesting, causes, products.

Tables end with a row for NONE, so that rows of columns may be NONE.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from stepmark.ground import json_text
from stepmark.model.kernel_groups import GROUPS, OTHER, group_of
from stepmark.step.trace_ops import MARK, PRODUCTS
from stepmark.timeline.trace_columns import NONE, Flags, Ints, OpColumns, RankTrace, SpanColumns
from stepmark.traces.kineto.event_tables import STACK
from stepmark.traces.kineto.links import distinct, innermost, name_flags, parents_by_thread

T = TypeVar("T", OpColumns, SpanColumns)
OPTIMIZER_MARK = re.compile(rf"{MARK}optimizer$|Optimizer\.")
PHASE_MARKS = tuple(MARK + name for name in ("data", "forward", "backward", "optimizer"))
_NODE = "autograd::engine::evaluate_function"
_SUM = f"{_NODE}: torch::autograd::AccumulateGrad"
# Annotations of FSDP2 that name the parameters: of none by the root module's.
FSDP = re.compile(
    r"FSDP::(?:all_gather|pre_forward|post_forward|pre_backward|post_backward)\w*"
    r"(?:$| \[| \(([^),]*))"
)
_MARKER = re.compile(rf"{MARK}|{STACK}|Optimizer\.(?:step|zero_grad)#|{FSDP.pattern}")


class HostOps:
    """Operations and annotations. markers: rows of annotations that tell a place."""

    def __init__(self, trace: RankTrace) -> None:
        self.names = trace.names
        self._shapes = trace.shapes
        self.ops, self.spans = _with_none(trace.ops), _with_none(trace.spans)
        is_marker = self.where(_MARKER.match)
        self.markers = np.flatnonzero(is_marker[self.spans.name])
        self.is_module = self.where(
            lambda name: name.startswith((MARK, STACK)) and name not in PHASE_MARKS
        )
        self.is_sum = self.where(lambda name: name.startswith(_SUM))
        self.is_node = self.where(lambda name: name.startswith(_NODE))
        self.is_product = self.where(PRODUCTS.__contains__)

    def where(self, is_wanted: Callable[[str], Any]) -> Flags:
        """Return whether each name is wanted; NONE is not."""
        return name_flags(self.names, is_wanted)

    def name(self, number: int) -> str:
        return "" if number == NONE else self.names[number]

    @cached_property
    def parent(self) -> Ints:
        """Operation around each, or NONE."""
        return parents_by_thread(self.ops.start, self.ops.end, self.ops.thread)

    @cached_property
    def node(self) -> Ints:
        """Innermost autograd node around each operation, or NONE."""
        ops = self.ops
        is_node = self.is_node[ops.name] | ((ops.forward_thread > 0) & (ops.sequence >= 0))
        return nearest(self.parent, is_node)

    @cached_property
    def inner_product(self) -> Ints:
        """Product inside each that only dispatches it, as of a sharded tensor; else itself."""
        inner = np.arange(self.parent.size)
        above = nearest(self.parent, self.is_product[self.ops.name])
        rows = np.flatnonzero(above == inner)
        outer = above[self.parent[rows]]
        while (found := outer != NONE).any():
            rows = rows[found]
            outer = outer[found]
            inner[outer] = rows
            outer = above[self.parent[outer]]
        return inner

    @cached_property
    def cause(self) -> Ints:
        """Operation of the forward pass that made each node; NONE for other operations.

        Sums into a parameter's gradient have the cause of the node before them.
        """
        ops = self.ops
        cause = np.full(self.parent.size, NONE, np.int64)
        forward = np.flatnonzero((ops.sequence >= 0) & (ops.forward_thread <= 0))
        for number in np.unique(ops.forward_thread[ops.forward_thread > 0]):
            nodes = np.flatnonzero((ops.forward_thread == number) & (ops.sequence >= 0))
            # The profiler numbers threads anew: it is the one with most of these numbers.
            shared = forward[np.isin(ops.sequence[forward], ops.sequence[nodes])]
            if shared.size:
                own = shared[ops.thread[shared] == np.bincount(ops.thread[shared]).argmax()]
                own = own[np.argsort(ops.sequence[own], kind="stable")]
                # Of operations with one number the last made the node: views come before.
                place = np.searchsorted(ops.sequence[own], ops.sequence[nodes], "right") - 1
                is_equal = ops.sequence[own[place]] == ops.sequence[nodes]
                cause[nodes] = np.where((place >= 0) & is_equal, own[place], NONE)
        # A node with hooks has its number only on the operation inside.
        inside = np.flatnonzero(cause != NONE)
        up = self.parent[inside]
        is_empty = (up != NONE) & (cause[up] == NONE) & self.is_node[ops.name[up]]
        cause[up[is_empty]] = cause[inside[is_empty]]
        sums = np.flatnonzero(self.is_sum[ops.name])
        cause[sums] = cause[self.last_before(np.flatnonzero(cause != NONE), sums)]
        return cause

    def last_before(self, known: Ints, rows: Ints) -> Ints:
        """Return the last known operation of the same thread before each, or NONE."""
        result = np.full(rows.size, NONE, np.int64)
        for thread in np.unique(self.ops.thread[rows]):
            chosen = np.flatnonzero(self.ops.thread[rows] == thread)
            own = known[self.ops.thread[known] == thread]
            place = np.searchsorted(self.ops.start[own], self.ops.start[rows[chosen]]) - 1
            result[chosen] = np.where(place >= 0, np.append(own, NONE)[place], NONE)
        return result

    def span_of(self, own: Ints, rows: Ints) -> Ints:
        """Return the innermost of some annotations around each operation, or NONE."""
        spans = self.spans
        ops = self.ops
        columns = spans.start[own], spans.end[own], spans.thread[own]
        return np.append(own, NONE)[innermost(*columns, ops.start[rows], ops.thread[rows])]

    def outermost(self, rows: Ints, since: Ints) -> Ints:
        """Return the outermost operation around each that starts at or after a moment."""
        top = rows.copy()
        pending = np.arange(rows.size)
        while pending.size:
            up = self.parent[top[pending]]
            inside = (up != NONE) & (self.ops.start[up] >= since[pending])
            pending = pending[inside]
            top[pending] = up[inside]
        return top

    def call_before(self, marker: Ints, places: Ints) -> Ints:
        """Return the annotation inside a marker that ended last before each place, or NONE."""
        spans = self.spans
        rows = self.markers
        start = spans.start[rows]
        size = rows.size + 1
        parent = parents_by_thread(start, spans.end[rows], spans.thread[rows])
        inside = np.sort(parent * size + np.arange(rows.size))  # by parent, then by start
        target = np.searchsorted(rows, marker)
        wanted = target * size + np.searchsorted(start, places, "right")
        last = np.append(inside, NONE)[np.searchsorted(inside, wanted) - 1]
        is_child = (marker != NONE) & (last // size == target)
        return np.where(is_child, np.append(rows, NONE)[last % size], NONE)

    @cached_property
    def stack_paths(self) -> tuple[Ints, list[str]]:
        """Path of each annotation of a module stack, the classes around it, and all paths."""
        spans = self.spans
        is_stack = self.where(lambda name: name.startswith(STACK))
        rows = np.flatnonzero(is_stack[spans.name])
        parent = parents_by_thread(spans.start[rows], spans.end[rows], spans.thread[rows])
        paths: dict[str, int] = {}
        own: list[int] = []
        texts: list[str] = []
        for name, up in zip(spans.name[rows].tolist(), parent.tolist(), strict=True):
            path = self.names[name].removeprefix(STACK)
            path = path if up == NONE else f"{texts[own[up]]}.{path}"
            own.append(paths.setdefault(path, len(paths)))
            if len(texts) < len(paths):
                texts.append(path)
        numbers = np.full(spans.start.size, NONE, np.int64)
        numbers[rows] = own
        return numbers, texts

    def products(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of each product's shape, or NONE; and the shapes (m, n, k)."""
        name = self.ops.name[rows]
        shape = self.ops.shapes[rows]
        chosen = np.flatnonzero(self.is_product[name] & (shape != NONE))
        first, place = distinct((name[chosen], shape[chosen]))
        shapes: dict[tuple[int, int, int], int] = {}
        numbers = np.full(first.size, NONE, np.int64)
        for kind, row in enumerate(chosen[first].tolist()):
            found = product_shape(self.names[name[row]], self._shapes[shape[row]])
            if found is not None:
                numbers[kind] = shapes.setdefault(found, len(shapes))
        result = np.full(rows.size, NONE, np.int64)
        result[chosen] = numbers[place]
        return result, np.array(list(shapes), np.int64).reshape(-1, 3)


def product_shape(name: str, dims: str) -> tuple[int, int, int] | None:
    """Return rows, columns and contracted dimension of a product by its inputs' shapes."""
    try:
        a, b = json_text.decode(dims)["add" in name :][:2]
        return int(a[-2]), int(b[-1]), int(a[-1])
    except (ValueError, IndexError, TypeError, KeyError):
        return None


def nearest(parent: Ints, flag: Flags) -> Ints:
    """Return the nearest row at or above each that has the flag, or NONE."""
    found = np.arange(parent.size)
    while (pending := np.flatnonzero((found != NONE) & ~flag[found])).size:
        found[pending] = parent[found[pending]]
    return found


def _with_none(table: T) -> T:
    """Return the table with a row for NONE, the last one, before all times."""
    columns = {each.name: np.append(getattr(table, each.name), NONE) for each in fields(table)}
    columns["start"][-1] = columns["end"][-1] = np.iinfo(np.int64).min
    return type(table)(**columns)


class WorkGroups:
    """Groups of kernels and operations: by name, or the optimizer's inside its annotations."""

    names = (*GROUPS, OTHER)

    def __init__(self, trace: RankTrace) -> None:
        """Find the annotations, and the group of each name outside and inside them."""
        self.trace = trace
        self.marks = np.flatnonzero(
            name_flags(trace.names, OPTIMIZER_MARK.match)[trace.spans.name]
        )
        sides = (False, True) if self.marks.size else (None, None)
        self.of_name = np.array(
            [[self.names.index(group_of(n, side)) for n in trace.names] for side in sides],
            np.int8,
        )

    def of(self, name: Ints, start: Ints, thread: Ints) -> Ints:
        """Return the place among `names` of work that the host begins here."""
        spans = self.trace.spans
        marks = (spans.start[self.marks], spans.end[self.marks], spans.thread[self.marks])
        mark = innermost(*marks, start, thread)
        return np.asarray(self.of_name[(mark != NONE).astype(np.int8), name], np.int64)

    def of_kernels(self, rows: Ints, call: Ints) -> Ints:
        """Return the places among `names` of GPU events. call: what launched each, or NONE."""
        calls = self.trace.calls
        start, thread = (np.append(each, NONE)[call] for each in (calls.start, calls.thread))
        return self.of(self.trace.gpu.name[rows], start, thread)
