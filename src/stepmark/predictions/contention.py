"""Contention: how much longer work takes while communication runs, from profiled steps.

Work that takes a seconds alone takes a / (1 - q f) if it is beside other work for the share f
of this time, which slows it by 1 / (1 - q). Equal work with different shares tells q.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from stepmark.step.trace_ops import COMPUTE, MeasuredOp, OpTable
from stepmark.timeline.ledger import Work, work_of

_SPREAD = 0.25  # of the shares of equal work, from which its contention is known
_LEAST, _MOST = -0.2, 0.9  # q; below 0 it is noise, and the mean over all work is about 0
_KNOWN = 0.1  # of overlapped time: if less of it is known, the mean is not


class Sample(NamedTuple):
    """Work that was measured. equal: what is the same of all work that takes as long alone."""

    equal: Hashable
    time: float
    overlapped: float  # part of the time that is beside other work


def fit(samples: Iterable[Sample]) -> dict[Hashable, float]:
    """Return q of the equal work whose shares differ enough."""
    by_key: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for equal, time, overlapped in samples:
        if time > 0:
            by_key[equal].append((min(1.0, overlapped / time), 1 / time))
    found = {}
    for key, points in by_key.items():
        shares = [share for share, _ in points]
        least, spread = min(shares), max(shares) - min(shares)
        if spread < _SPREAD:
            continue
        ends = (
            [point for point in points if point[0] <= least + spread / 3],
            [point for point in points if point[0] >= least + spread * 2 / 3],
        )
        (low, fast), (high, slow) = (map(median, zip(*end, strict=True)) for end in ends)
        found[key] = min(_MOST, max(_LEAST, (fast - slow) / (fast * high - slow * low)))
    return found


def slowdown(samples: Iterable[Sample], found: Mapping[Hashable, float]) -> float | None:
    """Return the slowdown of all overlapped time; None where it is known of too little."""
    total = known = added = 0.0
    for equal, _, overlapped in samples:
        total += overlapped
        if equal in found:
            known += overlapped
            added += found[equal] * overlapped
    return 1 / (1 - max(0.0, added / known)) if known > _KNOWN * total else None


@dataclass(frozen=True, slots=True)
class Contention:
    """Contention of computation. slowdown: while communication runs, where it is known."""

    found: Mapping[Hashable, float]
    slowdown: Mapping[Work, float]

    def alone(self, table: OpTable) -> OpTable:
        """Return the table with times as without communication, where contention is known."""
        ops = []
        for op in table.ops:
            if op.key.kind == COMPUTE:
                mean = 1 - 1 / self.slowdown.get(_work(op), 1.0)
                added_ns = round(op.overlapped_ns * self.found.get(_equal(op), mean))
                ops.append(replace(op, time_ns=op.time_ns - added_ns))
            else:
                ops.append(op)
        return replace(table, ops=tuple(ops))


def contention(tables: Iterable[OpTable]) -> Contention:
    """Return the contention in profiled steps of ranks that do the same.

    Equal are kernels of one name, operation, role and phase, as often in a layer of a step.
    """
    samples: dict[Work, list[Sample]] = defaultdict(list)
    for op in (op for table in tables for op in table.ops if op.key.kind == COMPUTE):
        samples[_work(op)].append(Sample(_equal(op), op.time_ns, op.overlapped_ns))
    found = fit(sample for own in samples.values() for sample in own)
    factors = {work: slowdown(own, found) for work, own in samples.items()}
    return Contention(found, {work: each for work, each in factors.items() if each})


def _work(op: MeasuredOp) -> Work:
    return work_of(op.key.name, op.key.role, op.key.phase)


def _equal(op: MeasuredOp) -> Hashable:
    return op.key._replace(module="", layer=None), op.kernels
