"""From work on a GPU to the operation that launched it, and to its module, role and phase.

A place is a moment of a thread at which the host launched something. Around it are torch's
operations and annotations; the innermost of these tell the module. In the backward pass an
autograd node has the sequence number of the operation of the forward pass that made it.
In a trace without a GPU the host's own operations are the work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmark.core.ops import Phase
from stepmark.core.trace_columns import NONE, RankTrace, SpanColumns
from stepmark.core.trace_ops import COARSE, MARK, PRODUCTS
from stepmark.trace.kineto import roles
from stepmark.trace.kineto.links import innermost, launches, lookup, parents

if TYPE_CHECKING:
    import numpy.typing as npt

    from stepmark.core.trace_columns import Ints

_STACK = "nn.Module: "
_PHASES = {
    f"{MARK}data": "",
    f"{MARK}forward": Phase.FWD,
    f"{MARK}backward": Phase.BWD,
    f"{MARK}optimizer": Phase.OPTIM,
}
_NODE = "autograd::engine::evaluate_function"
_ACCUMULATE = f"{_NODE}: torch::autograd::AccumulateGrad"
_UPDATE = re.compile(r"^Optimizer\.(?:step|zero_grad)#")
_ACTIVATION = re.compile(r"::(?:silu|gelu|relu)")
_COLLECTIVE = re.compile(r"^c10d::\w+_$|^_c10d_functional::(?!wait|_wrap)")
GLOO = "gloo:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Columns by place. Texts are indices: op in names, role and module in their own lists.

    op is NONE where no operation was around the launch. product: rows, columns and contracted
    dimension of a product, as a row of products.
    """

    op_row: Ints
    role: Ints
    module: Ints
    layer: Ints  # NONE: no block
    phase: Ints  # index in PHASES
    is_recomputed: Ints
    product: Ints
    roles: list[str]
    modules: tuple[str, ...]
    products: Ints


PHASES = ("", Phase.FWD, Phase.DGRAD, Phase.WGRAD, Phase.BWD, Phase.OPTIM)
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}


def operation_of(trace: RankTrace) -> Ints:
    """Return the innermost operation around each GPU event's launch, or NONE.

    Where the launch is not in the trace it is the operation of the same external id.
    """
    gpu, calls, ops = trace.gpu, trace.calls, trace.ops
    call = launches(trace)
    known = np.flatnonzero(call != NONE)
    row = np.full(gpu.start.size, NONE, np.int64)
    row[known] = innermost(
        *(ops.start, ops.end, ops.thread),
        *(calls.start[call[known]], calls.thread[call[known]]),
    )
    missing = np.flatnonzero(row == NONE)
    row[missing] = lookup(ops.external, gpu.external[missing])
    return row


class Host:
    """Joins of one process's operations and annotations on the host."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace, self._ops = trace, trace.ops
        self._spans = _with_sentinel(trace.spans)
        names = trace.names
        self._node_names = _numbers(names, lambda name: name.startswith(_NODE))
        self._markers = np.flatnonzero(np.isin(self._spans.name, self._marker_names()))
        self.is_gated = any(name.endswith(".gate") or name == "aten::silu" for name in names)

    def _marker_names(self) -> list[int]:
        return _numbers(
            self._trace.names,
            lambda name: (
                name not in _PHASES
                and (
                    name.startswith((MARK, _STACK))
                    or _UPDATE.match(name) is not None
                    or roles.sharded_module(name) is not None
                )
            ),
        )

    @cached_property
    def parent(self) -> Ints:
        """Operation around each operation, or NONE."""
        return _parents_by_thread(self._ops.start, self._ops.end, self._ops.thread)

    @cached_property
    def _node(self) -> Ints:
        """Innermost autograd node around each operation, or NONE."""
        ops = self._ops
        is_node = np.isin(ops.name, self._node_names)
        is_node |= (ops.forward_thread > 0) & (ops.sequence >= 0)
        return nearest(self.parent, is_node)

    @cached_property
    def inner_product(self) -> Ints:
        """Product inside each that only dispatches it, as of a sharded tensor; else itself."""
        inner = np.arange(self._ops.start.size)
        names = _numbers(self._trace.names, PRODUCTS.__contains__)
        is_product = np.isin(self._ops.name, names)
        rows = np.flatnonzero(is_product & (self.parent != NONE))
        above = nearest(self.parent, is_product)[self.parent[rows]]
        while (found := above != NONE).any():
            rows, above = rows[found], above[found]
            inner[above] = rows
            up = self.parent[above]
            above = np.where(up == NONE, NONE, nearest(self.parent, is_product)[up])
        return inner

    @cached_property
    def _cause(self) -> Ints:
        """Operation of the forward pass that made each node; NONE for other operations.

        Sums into a parameter's gradient have the cause of the node before them.
        """
        ops = self._ops
        cause = np.full(ops.start.size, NONE, np.int64)
        forward = np.flatnonzero((ops.sequence >= 0) & (ops.forward_thread <= 0))
        for number in np.unique(ops.forward_thread[ops.forward_thread > 0]):
            nodes = np.flatnonzero((ops.forward_thread == number) & (ops.sequence >= 0))
            thread = self._forward_thread(forward, nodes)
            rows = forward[ops.thread[forward] == thread]
            order = np.argsort(ops.sequence[rows], kind="stable")
            # Of operations with one number the last made the node: views inside come after.
            last = np.searchsorted(ops.sequence[rows][order], ops.sequence[nodes], "right") - 1
            found = rows[order[np.maximum(last, 0)]] if rows.size else np.full(nodes.size, 0)
            is_found = (last >= 0) & (ops.sequence[found] == ops.sequence[nodes])
            cause[nodes] = np.where(is_found, found, NONE)
        # A node with hooks has its number only on the operation inside.
        up = self.parent[cause != NONE]
        of = cause[cause != NONE]
        is_node = (up != NONE) & (cause[up] == NONE) & np.isin(ops.name[up], self._node_names)
        cause[up[is_node]] = of[is_node]
        accumulate = _numbers(self._trace.names, lambda name: name.startswith(_ACCUMULATE))
        sums = np.flatnonzero(np.isin(ops.name, accumulate))
        known = np.flatnonzero(cause != NONE)
        for thread in np.unique(ops.thread[sums]):
            own, before = sums[ops.thread[sums] == thread], known[ops.thread[known] == thread]
            place = np.searchsorted(ops.start[before], ops.start[own]) - 1
            cause[own] = np.where(
                place >= 0, cause[before[np.maximum(place, 0)]] if before.size else NONE, NONE
            )
        return cause

    def _forward_thread(self, forward: Ints, nodes: Ints) -> int:
        """Return the thread with most of these sequence numbers: the profiler renumbers it."""
        ops = self._ops
        shared = forward[np.isin(ops.sequence[forward], ops.sequence[nodes])]
        threads, counts = np.unique(ops.thread[shared], return_counts=True)
        return int(threads[counts.argmax()]) if threads.size else NONE

    def attribute(self, row: Ints) -> Attribution:
        """Return where the work of these operations belongs. row: of ops, or NONE."""
        ops, spans = self._ops, self._spans
        used, place = np.unique(row, return_inverse=True)
        if not ops.start.size:
            return _nothing(row)
        is_op = used != NONE
        safe = np.where(is_op, used, 0)
        marker = self._marker_of(safe)
        node = self._node[safe]
        # The innermost of annotation and node decides.
        in_node = (node != NONE) & (ops.start[node] > spans.start[marker])
        cause = np.where(in_node, self._cause[np.maximum(node, 0)], NONE)
        source = np.where(cause != NONE, cause, safe)
        source_marker = np.where(in_node, NONE, marker)
        known = np.flatnonzero(cause != NONE)
        source_marker[known] = self._marker_of(cause[known])
        role, module, layer, kind = self._roles(source, source_marker, safe, node, in_node)
        phase = self._phases(safe, node)
        is_recomputed = (node != NONE) & ~in_node & self._is_module(marker)
        phase[is_recomputed] = _NUMBER[Phase.FWD]
        product, products = self._products(safe)
        gradients = self._gradients(safe, cause, product, products)
        phase = np.where(in_node & (gradients != NONE), gradients, phase)

        def spread(values: Ints, otherwise: int) -> Ints:
            return np.where(is_op, values, otherwise)[place]

        texts, paths = {"": 0}, {"": 0}
        return Attribution(
            op_row=row,
            role=spread(_indices(role, texts)[kind], 0),
            module=spread(_indices(module, paths)[kind], 0),
            layer=spread(np.array(layer, np.int64)[kind], NONE),
            phase=spread(phase, 0),
            is_recomputed=spread(is_recomputed.astype(np.int64), 0),
            product=spread(product, NONE),
            roles=list(texts),
            modules=tuple(paths),
            products=products,
        )

    def _marker_of(self, rows: Ints) -> Ints:
        """Return the innermost annotation of a module, of FSDP or of the optimizer."""
        return self._span_of(self._markers, rows)

    def _is_module(self, marker: Ints) -> Ints:
        names = self._trace.names
        modules = _numbers(names, lambda name: name.startswith((MARK, _STACK)))
        return np.asarray((marker != NONE) & np.isin(self._spans.name[marker], modules))

    def _roles(
        self, source: Ints, marker: Ints, rows: Ints, node: Ints, in_node: Ints
    ) -> tuple[list[str], list[str], list[int], Ints]:
        """Return role, module and layer of each kind of place, and the kind of each place."""
        _, ops, spans, names = self._trace, self._ops, self._spans, self._trace.names
        top = self._outermost(source, spans.start[marker])
        before = self._call_before(marker, ops.start[source])
        activated = self._is_activated(source, marker)
        in_sum = in_node & np.isin(
            ops.name[np.maximum(node, 0)],
            _numbers(names, lambda name: name.startswith(_ACCUMULATE)),
        )
        own_top = self._outermost(rows, np.where(node == NONE, NONE, ops.start[node]))
        is_known = ~in_node | (source != rows)
        phase_role = self._roles_of_phase(source, (marker == NONE) & is_known)
        stack, paths = self._stack_paths()
        columns = (
            *(spans.name[marker], stack[marker], ops.name[top], ops.name[rows]),
            spans.name[before],
            *(activated, np.where(in_sum, ops.name[own_top], NONE), phase_role),
        )
        first, place = distinct(columns)
        kinds = [
            self._role(
                names[mark] if mark != NONE else "",
                paths[path] if path != NONE else "",
                (names[own_op], names[op]),
                names[before] if before != NONE else "",
                is_activated=bool(is_activated),
                is_bucket=summed != NONE and _COLLECTIVE.search(names[summed]) is not None,
                otherwise=_OTHERWISE[otherwise],
            )
            for mark, path, op, own_op, before, is_activated, summed, otherwise in zip(
                *(column[first].tolist() for column in columns), strict=True
            )
        ]
        role, module, layer = zip(*kinds, strict=True)
        return list(role), list(module), list(layer), place

    def _role(
        self,
        text: str,
        path: str,
        ops: tuple[str, str],
        before: str,
        *,
        is_activated: bool,
        is_bucket: bool,
        otherwise: str,
    ) -> tuple[str, str, int]:
        """Return role, module and layer of one kind of place.

        ops: the innermost operation, and the outermost one in its module's call.
        """
        by_name = roles.role_by_op(ops[0]) or roles.role_by_op(ops[1])
        if (sharded := roles.sharded_module(text)) is not None:
            return roles.role_of_sharded(sharded), sharded, _or_none(roles.layer_of(sharded))
        if text.startswith(MARK):
            path = text.removeprefix(MARK)
            layer = _or_none(roles.layer_of(path))
            if is_bucket:
                return roles.role_of_bucket(path), path, layer
            role = roles.role_of_call(
                *(path, before.removeprefix(MARK), ops[1]),
                is_gated=self.is_gated,
                is_activated=is_activated,
            )
            return (by_name or role if role in COARSE else role), path, layer
        if _UPDATE.match(text):
            return "update", "", NONE
        return otherwise or by_name, path, _stack_layer(path)

    def _roles_of_phase(self, rows: Ints, is_outside: Ints) -> Ints:
        """Return what is known of work outside modules, as an index in _OTHERWISE."""
        trace, ops, spans = self._trace, self._ops, self._spans
        own = _numbers(trace.names, _PHASES.__contains__)
        phase = self._span_of(np.flatnonzero(np.isin(spans.name, own)), rows)
        name = spans.name[phase]
        of = {text: _numbers(trace.names, text.__eq__) for text in _PHASES}
        outside = is_outside & (phase != NONE)
        steps = np.flatnonzero(
            np.isin(spans.name, _numbers(trace.names, lambda n: bool(_UPDATE.match(n))))
        )
        place = np.searchsorted(spans.start[steps], ops.start[rows]) - 1
        has_stepped = (place >= 0) & (phase != NONE)
        if steps.size:
            has_stepped &= spans.start[steps[np.maximum(place, 0)]] >= spans.start[phase]
        is_loss = np.isin(
            ops.name[self._outermost(rows, spans.start[phase])],
            _numbers(trace.names, lambda n: n in ("aten::div", "aten::ones_like")),
        )
        result = np.zeros(rows.size, np.int64)
        in_backward = outside & np.isin(name, of[f"{MARK}backward"])
        result[in_backward] = np.where(is_loss[in_backward], 3, 4)
        result[outside & np.isin(name, of[f"{MARK}data"])] = 5
        in_update = outside & np.isin(name, of[f"{MARK}optimizer"])
        result[in_update] = np.where(has_stepped[in_update], 2, 1)
        return result

    def _phases(self, rows: Ints, node: Ints) -> Ints:
        """Return the phase of each operation; 0 where the trace does not tell."""
        ops, spans, names = self._ops, self._spans, self._trace.names
        phases = np.array([*(_NUMBER[_phase_of_span(name)] for name in names), 0], np.int64)
        span = self._span_of(np.flatnonzero(phases[spans.name]), rows)
        phase = phases[spans.name[span]]
        forward_threads = np.unique(spans.thread[self._markers])
        node_threads = np.unique(ops.thread[np.isin(ops.name, self._node_names)])
        in_backward = (node != NONE) | np.isin(
            ops.thread[rows], np.setdiff1d(node_threads, forward_threads)
        )
        phase = np.where(in_backward, _NUMBER[Phase.BWD], phase)
        # What made a node was forward.
        is_cause = np.zeros(ops.start.size, bool)
        is_cause[self._cause[self._cause != NONE]] = True
        is_forward = (phase == 0) & (nearest(self.parent, is_cause)[rows] != NONE)
        return np.where(is_forward, _NUMBER[Phase.FWD], phase)

    def _span_of(self, own: Ints, rows: Ints) -> Ints:
        """Return the innermost of some annotations around each operation, or NONE."""
        spans, ops = self._spans, self._ops
        found = innermost(
            *(spans.start[own], spans.end[own], spans.thread[own]),
            *(ops.start[rows], ops.thread[rows]),
        )
        return np.where(found == NONE, NONE, own[found]) if own.size else found

    def _outermost(self, rows: Ints, since: Ints) -> Ints:
        """Return the outermost operation around each that starts at or after a moment."""
        start, top = self._ops.start, rows.copy()
        pending = np.arange(rows.size)
        while pending.size:
            up = self.parent[top[pending]]
            inside = (up != NONE) & (start[up] >= since[pending])
            pending, up = pending[inside], up[inside]
            top[pending] = up
        return top

    def _call_before(self, marker: Ints, places: Ints) -> Ints:
        """Return the annotation inside a marker that ended last before each place, or NONE."""
        spans, own = self._spans, self._markers
        result = np.full(marker.size, NONE, np.int64)
        for thread in np.unique(spans.thread[own]):
            rows = own[spans.thread[own] == thread]
            parent = parents(spans.start[rows], spans.end[rows])
            chosen = np.flatnonzero((marker != NONE) & (spans.thread[marker] == thread))
            target = np.searchsorted(rows, marker[chosen])
            last = np.searchsorted(spans.start[rows], places[chosen], "right") - 1
            pending = np.flatnonzero(last > target)
            while pending.size:
                up = parent[last[pending]]
                is_child = up == target[pending]
                hits = pending[is_child]
                result[chosen[hits]] = rows[last[hits]]
                keep = ~is_child & (up > target[pending])
                last[pending] = up
                pending = pending[keep]
        return result

    def _is_activated(self, source: Ints, marker: Ints) -> Ints:
        """Return whether an activation came before each operation in its module's call."""
        ops, spans = self._ops, self._spans
        names = _numbers(self._trace.names, lambda name: bool(_ACTIVATION.search(name)))
        rows = np.flatnonzero(np.isin(ops.name, names))
        place = np.searchsorted(ops.start[rows], ops.start[source]) - 1
        if not rows.size:
            return np.zeros(source.size, np.int64)
        before = rows[np.maximum(place, 0)]
        inside = (place >= 0) & (marker != NONE) & (ops.thread[before] == ops.thread[source])
        return np.asarray(inside & (ops.start[before] >= spans.start[marker])).astype(np.int64)

    def _stack_paths(self) -> tuple[Ints, list[str]]:
        """Return the path of each span of a module stack, the classes around it; else NONE."""
        spans, names = self._spans, self._trace.names
        stack = _numbers(names, lambda name: name.startswith(_STACK))
        rows = np.flatnonzero(np.isin(spans.name, stack))
        parent = _parents_by_thread(spans.start[rows], spans.end[rows], spans.thread[rows])
        texts: dict[str, int] = {}
        paths: list[str] = []
        numbers = np.full(spans.start.size, NONE, np.int64)
        for row, up in zip(rows.tolist(), parent.tolist(), strict=True):
            own = names[spans.name[row]].removeprefix(_STACK)
            path = f"{paths[numbers[rows[up]]]}.{own}" if up != NONE else own
            numbers[row] = texts.setdefault(path, len(texts))
            if len(texts) > len(paths):
                paths.append(path)
        return numbers, paths

    def _products(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of each product's shape, or NONE; and the shapes (m, n, k)."""
        ops, trace = self._ops, self._trace
        products = _numbers(trace.names, PRODUCTS.__contains__)
        chosen = np.flatnonzero(np.isin(ops.name[rows], products) & (ops.shapes[rows] != NONE))
        first, place = distinct((ops.name[rows[chosen]], ops.shapes[rows[chosen]]))
        found: dict[tuple[int, int, int], int] = {}
        numbers = np.full(first.size, NONE, np.int64)
        for kind, row in enumerate(rows[chosen[first]].tolist()):
            shape = product_shape(trace.names[ops.name[row]], trace.shapes[ops.shapes[row]])
            if shape is not None:
                numbers[kind] = found.setdefault(shape, len(found))
        result = np.full(rows.size, NONE, np.int64)
        result[chosen] = numbers[place]
        return result, np.array(list(found), np.int64).reshape(-1, 3)

    def _gradients(self, rows: Ints, cause: Ints, product: Ints, products: Ints) -> Ints:
        """Return the phase of products in a node, dgrad or wgrad, by what they contract.

        With as many tokens as outputs the shapes are equal: torch then takes wgrad first.
        NONE: unknown.
        """
        result = np.full(rows.size, NONE, np.int64)
        is_own = self.inner_product[rows] == rows
        chosen = np.flatnonzero((product != NONE) & (cause != NONE) & is_own)
        forward, shapes = self._products(self.inner_product[cause[chosen]])
        chosen, forward = chosen[forward != NONE], forward[forward != NONE]
        if not chosen.size:
            return result
        m, n = shapes[forward, 0], shapes[forward, 1]
        contracted = products[product[chosen], 2]
        is_wgrad, is_dgrad = contracted == m, contracted == n
        _, first, place, count = np.unique(
            self._node[rows[chosen]], return_index=True, return_inverse=True, return_counts=True
        )
        is_both = is_wgrad & is_dgrad
        is_first = first[place] == np.arange(chosen.size)
        is_pair = count[place] == 2
        is_wgrad = np.where(is_both, is_pair & is_first, is_wgrad)
        is_dgrad = np.where(is_both, is_pair & ~is_first, is_dgrad)
        result[chosen[is_wgrad]] = _NUMBER[Phase.WGRAD]
        result[chosen[is_dgrad]] = _NUMBER[Phase.DGRAD]
        return result


def _phase_of_span(name: str) -> str:
    """Return the phase that an annotation tells, or ""."""
    if name.startswith("FSDP::"):
        is_forward, is_backward = "forward" in name, "backward" in name
        return Phase.BWD if is_backward else Phase.FWD if is_forward else ""
    if _UPDATE.match(name):
        return Phase.OPTIM
    module = Phase.FWD if name.startswith((MARK, _STACK)) else ""
    return _PHASES.get(name, module)


_OTHERWISE = ("", "clip", "update", "loss", "gradients", "data")


def _with_sentinel(spans: SpanColumns) -> SpanColumns:
    """Return annotations with a row for NONE, the last one, before all times."""
    columns = {
        field: np.append(getattr(spans, field), NONE)
        for field in SpanColumns.__dataclass_fields__
    }
    columns["start"][-1] = columns["end"][-1] = np.iinfo(np.int64).min
    return SpanColumns(**columns)


def _nothing(row: Ints) -> Attribution:
    zero, none = np.zeros(row.size, np.int64), np.full(row.size, NONE, np.int64)
    return Attribution(
        op_row=row,
        role=zero,
        module=zero,
        layer=none,
        phase=zero,
        is_recomputed=zero,
        product=none,
        roles=[""],
        modules=("",),
        products=np.empty((0, 3), np.int64),
    )


def product_shape(name: str, dims: str) -> tuple[int, int, int] | None:
    """Return rows, columns and contracted dimension of a product by its inputs' shapes."""
    try:
        inputs = json.loads(dims)
        first = 1 if "add" in name else 0
        a, b = inputs[first], inputs[first + 1]
        return int(a[-2]), int(b[-1]), int(a[-1])
    except (ValueError, IndexError, TypeError, KeyError):
        return None


def distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return a row of each distinct combination of non-negative or NONE, and that of each row.

    The second column has the index of the first one's row.
    """
    code = np.zeros(columns[0].size, np.int64)
    for column in columns:
        size = int(column.max(initial=NONE)) + 2
        _, code = np.unique(code, return_inverse=True)  # so that it cannot overflow
        code = code * size + column + 1
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return first, place


def _indices(texts: Sequence[str], numbers: dict[str, int]) -> Ints:
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)


def nearest(parent: Ints, flag: npt.NDArray[np.bool_]) -> Ints:
    """Return the nearest row at or above each that has the flag, or NONE."""
    found = np.arange(parent.size)
    pending = np.flatnonzero(~flag)
    while pending.size:
        found[pending] = parent[found[pending]]
        up = found[pending]
        pending = pending[(up != NONE) & ~flag[up]]
    return found


def _parents_by_thread(start: Ints, end: Ints, thread: Ints) -> Ints:
    parent = np.full(start.size, NONE, np.int64)
    for number in np.unique(thread):
        rows = np.flatnonzero(thread == number)
        up = parents(start[rows], end[rows])
        parent[rows] = np.where(up == NONE, NONE, rows[up])
    return parent


def _numbers(names: Sequence[str], is_wanted: Callable[[str], Any]) -> list[int]:
    return [number for number, name in enumerate(names) if is_wanted(name)]


def _or_none(layer: int | None) -> int:
    return NONE if layer is None else layer


_LAYER = re.compile(r"(?:^|\.)\w*(?:Block|Layer)_(\d+)(?:\.|$)")


def _stack_layer(path: str) -> int:
    """Return the layer of a module stack: the number of the outermost block's class."""
    match = _LAYER.search(path)
    return int(match[1]) if match else NONE
