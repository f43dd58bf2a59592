"""From work on a GPU to the operation that launched it, and to its module, role and phase.

Around a launch are torch's operations and annotations; the innermost of these tell the module.
In the backward pass an autograd node has the sequence number of the operation of the forward
pass that made it. In a trace without a GPU the host's own operations are the work. A workload
of the step tells roles of products by their shapes.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.step.trace_ops import COARSE, MARK
from stepmark.step.workload import ComputeOp, Workload
from stepmark.timeline.trace_columns import NONE, Ints, RankTrace
from stepmark.traces.kineto.event_tables import STACK
from stepmark.traces.kineto.host_ops import OPTIMIZER_MARK, HostOps, nearest
from stepmark.traces.kineto.links import distinct, innermost, launches, lookup
from stepmark.traces.kineto.roles import Place, place_of

PHASES = ("", Phase.FWD, Phase.DGRAD, Phase.WGRAD, Phase.BWD, Phase.OPTIM)
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
# Annotations by the phase that they tell: modules are called in the forward pass.
_SPANS = {
    Phase.BWD: re.compile(rf"{MARK}backward$|FSDP::.*backward"),
    Phase.OPTIM: OPTIMIZER_MARK,
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


_BACKWARD = (Phase.DGRAD, Phase.WGRAD, Phase.BWD)
Shape = tuple[int, ...]  # rows, columns, contracted
Candidate = tuple[str, int | None, str]  # role, layer, phase
Known = dict[tuple[str, Shape], list[Candidate]]  # by pass and shape


def by_shape(
    attribution: Attribution,
    op_row: Ints,
    step: Ints,
    workload: Workload,
    rank: int,
    *,
    is_ordered: bool,
    is_own: bool,
) -> tuple[Attribution, tuple[str, ...]]:
    """Return the attribution with roles of products by their shapes, and what did not match.

    A gradient has the role of its forward product. Others of one shape are taken in the order
    of the workload if is_ordered and there are as many; otherwise they have the roles of all
    operations of that shape. The order of compiled graphs is their own. is_own: weights are
    known to lie as in nn.Linear; those of another program may be transposed, and so their
    gradients.
    """
    known = _products_of(workload, min(rank, workload.world_size - 1), is_own)
    coarse = [number for number, place in enumerate(attribution.places) if place.role in COARSE]
    rows, first, index = np.unique(op_row, return_index=True, return_inverse=True)
    is_open = (rows != NONE) & (attribution.product[first] != NONE) & (step[first] != NONE)
    is_open &= np.isin(attribution.place[first], coarse)
    keys = [_key(shape, is_own) for shape in attribution.products.tolist()]
    opened = set(rows[is_open].tolist())
    groups: dict[tuple[int, Shape, int | None, str], list[int]] = defaultdict(list)
    for number in np.flatnonzero(is_open).tolist():
        row = first[number]
        if attribution.cause[row] in opened:
            continue
        phase = PHASES[attribution.phase[row]]
        layer = attribution.places[attribution.place[row]].layer
        when = _pass(phase, bool(attribution.is_recomputed[row])) if phase else ""
        groups[int(step[row]), keys[attribution.product[row]], layer, when].append(number)
    places = {place: number for number, place in enumerate(attribution.places)}
    place = attribution.place[first]
    phases = attribution.phase[first]
    unmatched = 0
    for (_, shape, layer, when), numbers in groups.items():
        candidates = _candidates(known, shape, layer, when)
        unmatched += len(numbers) * (not candidates)
        if candidates and not (is_ordered and len(candidates) == len(numbers)):
            candidates = [_merged(candidates)] * len(numbers)
        for number, (role, its_layer, phase) in zip(numbers, candidates, strict=False):
            old = attribution.places[place[number]]
            new = Place(role, old.module, old.layer if its_layer is None else its_layer)
            place[number] = places.setdefault(new, len(places))
            phases[number] = PHASES.index(phase) if phase else phases[number]
    cause = np.searchsorted(rows, attribution.cause[first])
    inherits = np.flatnonzero(is_open & np.isin(attribution.cause[first], rows[is_open]))
    place[inherits] = place[cause[inherits]]
    is_named = is_open[index]
    attribution = replace(
        attribution,
        place=np.where(is_named, place[index], attribution.place),
        phase=np.where(is_named, phases[index], attribution.phase),
        places=tuple(places),
    )
    text = f"{unmatched} of {is_open.sum()} products have a shape that the workload has not"
    return attribution, (text,) * bool(unmatched)


def _products_of(workload: Workload, rank: int, is_own: bool) -> Known:
    """Return a rank's products by pass and shape, in the order in which they run."""
    known: Known = defaultdict(list)
    for op in workload.expand(workload.stage_of(rank)):
        if not isinstance(op, ComputeOp):
            continue
        if isinstance(op.op, Gemm):
            shape = (op.op.m, op.op.n, op.op.k)
        elif isinstance(op.op, GroupedGemm):
            m = op.op.tokens
            n = op.op.n
            k = op.op.k
            shape = {Phase.DGRAD: (m, k, n), Phase.WGRAD: (n, k, m)}.get(op.phase, (m, n, k))
        else:
            continue
        candidate = (op.module, op.layer, str(op.phase))
        known[_pass(op.phase, op.recompute), _key(shape, is_own)].append(candidate)
    return known


def _pass(phase: str, is_recomputed: bool) -> str:
    return "bwd" if is_recomputed or phase in _BACKWARD else "fwd"


def _key(shape: Sequence[int], is_own: bool) -> Shape:
    m, n, k = shape
    return (m, n, k) if is_own else (min(m, n), max(m, n), k)


def _candidates(known: Known, shape: Shape, layer: int | None, when: str) -> list[Candidate]:
    """Return the operations of this shape, or of its transpose where none has the shape."""
    m, n, k = shape
    for wanted in ((m, n, k), (n, m, k)):
        candidates = [
            candidate
            for name in ([when] if when else ["fwd", "bwd"])
            for candidate in known.get((name, wanted), ())
            if layer in (None, candidate[1])
        ]
        if candidates:
            return candidates
    return []


def _merged(candidates: Sequence[Candidate]) -> Candidate:
    """Return what these have in common; all roles where there are several."""
    names, layers, phases = (
        list(dict.fromkeys(part)) for part in zip(*candidates, strict=True)
    )
    return (
        " | ".join(names),
        layers[0] if len(layers) == 1 else None,
        phases[0] if len(phases) == 1 else "",
    )
