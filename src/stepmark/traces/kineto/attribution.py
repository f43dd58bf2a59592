"""From work on a GPU to the operation that launched it, and to its module, role and phase.

Around a launch are torch's operations and annotations; the innermost of these tell the module.
In the backward pass an autograd node has the sequence number of the operation of the forward
pass that made it. In a trace without a GPU the host's own operations are the work.
"""

import re
from dataclasses import dataclass

import numpy as np

from stepmark.model.ops import Phase
from stepmark.step.trace_ops import MARK
from stepmark.timeline.trace_columns import NONE, Ints, RankTrace
from stepmark.traces.kineto.host_ops import STACK, HostOps, distinct, nearest
from stepmark.traces.kineto.links import innermost, launches, lookup
from stepmark.traces.kineto.roles import Place, place_of

PHASES = ("", Phase.FWD, Phase.DGRAD, Phase.WGRAD, Phase.BWD, Phase.OPTIM)
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
# Annotations by the phase that they tell: modules are called in the forward pass.
_SPANS = {
    Phase.BWD: re.compile(rf"{MARK}backward$|FSDP::.*backward"),
    Phase.OPTIM: re.compile(rf"{MARK}optimizer$|Optimizer\."),
    Phase.FWD: re.compile(rf"{MARK}(?!data$)|{STACK}|FSDP::.*forward"),
}
_ACTIVATION = re.compile(r"::(?:silu|gelu|relu)")
_COLLECTIVE = re.compile(r"^c10d::\w+_$|^_c10d_functional::(?!wait|_wrap)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Columns by operation. place: of places; phase: of PHASES; product: row of products.

    cause: operation of the forward pass whose gradient it computes, or NONE.
    """

    place: Ints
    phase: Ints
    is_recomputed: Ints
    product: Ints
    cause: Ints
    places: tuple[Place, ...]
    products: Ints  # rows, columns, contracted dimension


def operation_of(trace: RankTrace) -> Ints:
    """Return the innermost operation around each GPU event's launch, or NONE.

    Where the launch is not in the trace it is the operation of the same external id.
    """
    gpu = trace.gpu
    calls = trace.calls
    ops = trace.ops
    call = launches(trace)
    start = np.append(calls.start, NONE)[call]
    thread = np.append(calls.thread, NONE)[call]
    row = innermost(ops.start, ops.end, ops.thread, start, thread)
    missing = np.flatnonzero(row == NONE)
    row[missing] = lookup(ops.external, gpu.external[missing])
    return row


def attribute(host: HostOps, rows: Ints) -> Attribution:
    """Return where each of these operations belongs; NONE is an unknown one."""
    used, index = np.unique(rows, return_inverse=True)
    marker = host.span_of(host.markers, used)
    node = host.node[used]
    # The innermost of annotation and node decides.
    in_node = (node != NONE) & (host.ops.start[node] > host.spans.start[marker])
    cause = np.where(in_node, host.cause[node], NONE)
    is_known = cause != NONE
    source = np.where(is_known, cause, used)
    marker_there = np.where(in_node, NONE, marker)
    marker_there[is_known] = host.span_of(host.markers, cause[is_known])
    place, places = _places(
        host, used, source, marker_there, in_node & host.is_sum[host.ops.name[node]]
    )
    phase = _phases(host, used, node)
    is_recomputed = (node != NONE) & ~in_node & host.is_module[host.spans.name[marker]]
    phase[is_recomputed] = _NUMBER[Phase.FWD]
    product, products = host.products(used)
    gradient = _gradients(host, used, cause, product, products)
    phase = np.where(in_node & (gradient != NONE), gradient, phase)
    return Attribution(
        place=place[index],
        phase=phase[index],
        is_recomputed=is_recomputed.astype(np.int64)[index],
        product=product[index],
        cause=np.where(is_known, host.inner_product[cause], NONE)[index],
        places=places,
        products=products,
    )


def _places(
    host: HostOps, rows: Ints, source: Ints, marker: Ints, in_sum: Ints
) -> tuple[Ints, tuple[Place, ...]]:
    """Return the place of each operation. source: the one of the forward pass, or itself."""
    ops = host.ops
    spans = host.spans
    top = host.outermost(source, spans.start[marker])
    before = host.call_before(marker, ops.start[source])
    is_collective = host.where(_COLLECTIVE.search)[ops.name]
    is_bucket = in_sum & (nearest(host.parent, is_collective)[rows] != NONE)
    stack, paths = host.stack_paths
    columns = (
        *(spans.name[marker], stack[marker], spans.name[before]),
        *(ops.name[top], ops.name[rows], is_bucket.astype(np.int64)),
        _is_activated(host, source, marker),
    )
    first, number = distinct(columns)
    is_gated = any(name.endswith(".gate") or name == "aten::silu" for name in host.names)
    places: dict[Place, int] = {}
    numbers = [
        places.setdefault(
            place_of(
                host.name(mark) if path == NONE else f"{STACK}{paths[path]}",
                before=host.name(last),
                ops=(host.name(op), host.name(own)),
                is_gated=is_gated,
                is_bucket=bool(is_reduced),
                is_activated=bool(is_active),
            ),
            len(places),
        )
        for mark, path, last, op, own, is_reduced, is_active in zip(
            *(column[first].tolist() for column in columns), strict=True
        )
    ]
    return np.array(numbers, np.int64)[number], tuple(places)


def _is_activated(host: HostOps, source: Ints, marker: Ints) -> Ints:
    """Return whether an activation came before each operation in its module's call."""
    ops = host.ops
    activations = np.flatnonzero(host.where(_ACTIVATION.search)[ops.name])
    before = host.last_before(activations, source)
    is_inside = (before != NONE) & (ops.start[before] >= host.spans.start[marker])
    return np.asarray(is_inside, np.int64)


def _phases(host: HostOps, rows: Ints, node: Ints) -> Ints:
    """Return the phase of each operation; 0 where the trace does not tell."""
    ops = host.ops
    spans = host.spans
    phases = np.array([*(_NUMBER[_phase_of_span(name)] for name in host.names), 0], np.int64)
    phase = phases[spans.name[host.span_of(np.flatnonzero(phases[spans.name]), rows)]]
    node_threads = np.unique(ops.thread[host.is_node[ops.name]])
    only_backward = np.setdiff1d(node_threads, spans.thread[host.markers])
    in_backward = (node != NONE) | np.isin(ops.thread[rows], only_backward)
    phase = np.where(in_backward, _NUMBER[Phase.BWD], phase)
    # What made a node was forward.
    is_cause = np.zeros(ops.start.size, bool)
    is_cause[host.cause[host.cause != NONE]] = True
    is_forward = (phase == 0) & (nearest(host.parent, is_cause)[rows] != NONE)
    return np.where(is_forward, _NUMBER[Phase.FWD], phase)


def _phase_of_span(name: str) -> str:
    """Return the phase that an annotation tells, or ""."""
    return next((phase for phase, pattern in _SPANS.items() if pattern.match(name)), "")


def _gradients(host: HostOps, rows: Ints, cause: Ints, product: Ints, products: Ints) -> Ints:
    """Return the phase of products in a node, dgrad or wgrad, by what they contract.

    With as many tokens as outputs the shapes are equal: torch then takes wgrad first.
    NONE: unknown.
    """
    result = np.full(rows.size, NONE, np.int64)
    is_own = (product != NONE) & (cause != NONE) & (host.inner_product[rows] == rows)
    chosen = np.flatnonzero(is_own)
    forward, shapes = host.products(host.inner_product[cause[chosen]])
    chosen = chosen[forward != NONE]
    forward = forward[forward != NONE]
    contracted = products[product[chosen], 2]
    is_wgrad, is_dgrad = (contracted == shapes[forward, part] for part in (0, 1))
    _, first, index, count = np.unique(
        host.node[rows[chosen]], return_index=True, return_inverse=True, return_counts=True
    )
    is_first = first[index] == np.arange(chosen.size)
    is_pair = count[index] == 2
    is_both = is_wgrad & is_dgrad
    result[chosen[is_wgrad & (~is_both | (is_pair & is_first))]] = _NUMBER[Phase.WGRAD]
    result[chosen[is_dgrad & (~is_both | (is_pair & ~is_first))]] = _NUMBER[Phase.DGRAD]
    return result
