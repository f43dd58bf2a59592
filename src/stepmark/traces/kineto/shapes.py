"""Roles of products by their shapes, which a workload of the step knows."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.step.trace_ops import COARSE
from stepmark.step.workload import ComputeOp, Workload
from stepmark.timeline.trace_columns import NONE, Ints
from stepmark.traces.kineto.attribution import PHASES, Attribution
from stepmark.traces.kineto.roles import Place

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
