"""Constants of a network's collectives, fitted to measured times."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log
from typing import NamedTuple

from stepmark.cases.comm_curve import Curve
from stepmark.ground.errors import ConfigError
from stepmark.model.network import Law, Network, Placement
from stepmark.model.network_options import NetworkChoice, NetworkOptions

_ROUNDS = 50
_LEAST = 1e-3  # relative error below which a point weighs no more
_LEAST_POINTS = 6
_LEAST_SPAN = 256.0  # largest over smallest message


class Point(NamedTuple):
    """A measured time with the terms of its law. weight: of its relative error."""

    latency_s: float
    transfer_s: float
    time_s: float
    weight: float = 1.0


def placement_of(curve: Curve, network: Network) -> Placement | None:
    """Return where the ranks of a curve were; None where the network does not join them.

    Hosts that are not known are full, one after the other.
    """
    ranks: Sequence[int] = range(curve.num_ranks)
    if curve.num_hosts:
        per_host = curve.num_ranks // curve.num_hosts
        if per_host * curve.num_hosts != curve.num_ranks:
            return None
        starts = range(0, curve.num_hosts * network.gpus_per_host, network.gpus_per_host)
        ranks = [start + rank for start in starts for rank in range(per_host)]
    try:
        return network.placement(ranks)
    except ConfigError:
        return None


def with_hosts_of(
    curves: Iterable[Curve], num_ranks: int, options: NetworkOptions | None
) -> NetworkOptions | None:
    """Return the options with the GPUs of a host on which curves over hosts were measured.

    Not where they are given, or the job has one host. A curve of one rank per host says nothing
    of how many a host has.
    """
    if options is not None and options.gpus_per_host:
        return options
    counts = [
        curve.num_ranks // curve.num_hosts
        for curve in curves
        if curve.num_hosts and curve.num_ranks > curve.num_hosts > 1
    ]
    if not counts or num_ranks <= max(counts):
        return options
    return replace(options or NetworkChoice(), gpus_per_host=max(counts))


def fitted_network(network: Network, curves: Iterable[Curve]) -> tuple[Network, frozenset[int]]:
    """Return the network with constants fitted to curves, and the tiers that have some."""
    by_tier: dict[int, list[Point]] = {}
    for curve in curves:
        placement = placement_of(curve, network)
        if placement is None or curve.num_ranks < 2:
            continue
        latency_s = network.latency_s(curve.collective, placement)
        by_tier.setdefault(network.outermost(placement), []).extend(
            Point(latency_s, network.transfer_s(curve.collective, size, placement), time_s)
            for size, time_s in curve.points
        )
    tiers = tuple(
        replace(tier, law=fit(by_tier[index], tier.law)) if index in by_tier else tier
        for index, tier in enumerate(network.tiers)
    )
    return replace(network, tiers=tiers), frozenset(by_tier)


def fit(points: Sequence[Point], start: Law) -> Law:
    """Return the law with the least sum of absolute relative errors.

    The constants are those of a linear model, by iteratively reweighted least squares; none is
    negative. Points that cannot tell them apart scale those of `start`.
    """
    spread = max(p.transfer_s for p in points) / max(min(p.transfer_s for p in points), 1e-12)
    if len(points) < _LEAST_POINTS or spread < _LEAST_SPAN:
        return _scaled(points, start)
    import numpy as np  # noqa: PLC0415 - takes a tenth of a second

    latency = np.array([p.latency_s for p in points])
    transfer = np.array([p.transfer_s for p in points])
    time = np.array([p.time_s for p in points])
    ramp = np.cbrt(latency * latency * transfer)
    terms = np.stack([latency, transfer, ramp], axis=1) / time[:, None]
    own = np.array([p.weight for p in points])
    columns = [0, 1, 2]
    while True:
        weights = own
        for _ in range(_ROUNDS):
            root = np.sqrt(weights)
            solution = np.linalg.lstsq(terms[:, columns] * root[:, None], root, rcond=None)[0]
            errors = np.abs(terms[:, columns] @ solution - 1)
            weights = own / np.maximum(errors, _LEAST)
        if min(solution) >= 0:
            break
        columns.pop(int(np.argmin(solution)))
    constants = dict.fromkeys(range(3), 0.0) | dict(
        zip(columns, map(float, solution), strict=True)
    )
    return replace(start, latency=constants[0], transfer=constants[1], ramp=constants[2])


def _scaled(points: Sequence[Point], start: Law) -> Law:
    """Return the law times the mean factor, as log, by which the times differ from it."""
    logs = [log(p.time_s / start.time_s(p.latency_s, p.transfer_s)) for p in points]
    factor = exp(sum(logs) / len(logs))
    return replace(
        start,
        latency=factor * start.latency,
        transfer=factor * start.transfer,
        ramp=factor * start.ramp,
    )
