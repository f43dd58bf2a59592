"""Contention: how much longer work takes while other work runs, from profiled steps.

Work that takes a seconds alone takes a / (1 - q f) if it is beside other work for the share f
of this time, which slows it by 1 / (1 - q). Equal work with different shares tells q.

By data sheet, slowdowns on the devices of a profiled one's units are those of
data/contention.toml; others have none that is known.
"""

import tomllib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from stepmark.cases.comm_curve import Curve
from stepmark.model.device import DeviceSpec
from stepmark.step.trace_ops import COMPUTE, MeasuredOp, OpTable
from stepmark.timeline.ledger import Work, work_of_key

if TYPE_CHECKING:
    from stepmark.timeline.trace_columns import RankInfo
    from stepmark.traces.kineto.arrivals import RankParts

_SPREAD = 0.25  # of the shares of equal work, from which its contention is known
# q; below 0 it is noise, and the mean over all work is about 0
_LEAST = -0.2
_MOST = 0.9
_KNOWN = 0.1  # of overlapped time: if less of it is known, the mean is not
# Names in contention.toml, which has one slowdown for all work that memory bounds.
KINDS = {
    Work.MATMUL: "products",
    Work.ATTENTION: "attention",
    Work.ELEMENTWISE: "memory-bound",
    Work.LOSS: "memory-bound",
    Work.OPTIMIZER: "memory-bound",
}
COMM = "communication"
_PROFILED = "nvidia", (9, 0)  # vendor and compute capability of the profiled devices


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
        least = min(shares)
        spread = max(shares) - min(shares)
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

    def alone(self, table: OpTable, group: int = 0) -> OpTable:
        """Return the table with times as without communication, where contention is known."""
        ops = []
        for op in table.ops:
            if op.key.kind == COMPUTE:
                mean = 1 - 1 / self.slowdown.get(work_of_key(op.key), 1.0)
                added_ns = round(op.overlapped_ns * self.found.get(_equal(op, group), mean))
                ops.append(replace(op, time_ns=op.time_ns - added_ns))
            else:
                ops.append(op)
        return replace(table, ops=tuple(ops))


def contention(*groups: Iterable[OpTable]) -> Contention:
    """Return the contention in profiled steps of ranks that do the same.

    groups: of steps at different clocks, so that only kernels of one are equal.

    Equal are kernels of one name, operation, role and phase, as often in a layer of a step.
    """
    samples: dict[Work, list[Sample]] = defaultdict(list)
    for group, tables in enumerate(groups):
        for op in (op for table in tables for op in table.ops if op.key.kind == COMPUTE):
            sample = Sample(_equal(op, group), op.time_ns, op.overlapped_ns)
            samples[work_of_key(op.key)].append(sample)
    found = fit(sample for own in samples.values() for sample in own)
    factors = {work: slowdown(own, found) for work, own in samples.items()}
    return Contention(found, {work: each for work, each in factors.items() if each})


def _equal(op: MeasuredOp, group: int) -> Hashable:
    return op.key._replace(module="", layer=None), op.kernels, group


def comm_slowdown(
    by_rank: "Mapping[int, tuple[RankInfo, RankParts]]", curves: Iterable[Curve]
) -> float | None:
    """Return what transfers take longer while computation runs; None: it is not known.

    Counted is the computation of the rank that arrived last. Messages of one collective are
    equal work in multiples of its curve, which are 1 alone; without a curve, those of one size.
    """
    from stepmark.traces.kineto.arrivals import matched  # noqa: PLC0415 - numpy
    from stepmark.traces.kineto.intervals import clip  # noqa: PLC0415 - numpy

    by_name: dict[tuple[str, int | None], Curve] = {
        (each.collective, each.num_ranks): each for each in curves
    }
    samples = list[Sample]()
    scaled = list[Sample]()
    alone = set[Sample]()
    for rank, own in matched(by_rank, lambda _number: True).ranks.items():
        exposed = by_rank[rank][1].exposed
        for kind, start, end in own.transfers:
            name = (kind.collective, kind.num_ranks)
            size = kind.message_bytes or 0
            times = end - start, end - start - clip(exposed, start, end).total
            if curve := by_name.get(name):
                alone_ns = 1e9 * curve.time_s(size)[0]
                samples.append(Sample(name, *times))
                scaled.append(Sample(name, *(time / alone_ns for time in times)))
                alone.add(Sample(name, 1.0, 0.0))
            else:
                samples.append(Sample((*name, size), *times))
                scaled.append(samples[-1])
    return slowdown(samples, fit([*scaled, *alone]))


@dataclass(frozen=True, slots=True)
class SheetSlowdowns:
    """Slowdowns where no step was profiled, by their names in contention.toml."""

    by_kind: Mapping[str, float]

    @property
    def compute(self) -> Mapping[Work, float]:
        return {work: self.by_kind[kind] for work, kind in KINDS.items()}

    @property
    def comm(self) -> float:
        return self.by_kind[COMM]

    def note(self, *, spans_hosts: bool) -> str:
        """Return what takes longer, and where this was measured."""
        factors = {**self.by_kind, COMM: 1.0 if spans_hosts else self.comm}
        times = ", ".join(f"{kind} {factor:g}" for kind, factor in factors.items())
        text = "computation and communication that overlap take longer by factors of profiles"
        text += f" on H100 and H200 ({times})"
        if spans_hosts:
            text += "; communication between hosts counts as not slowed"
        return text


def is_profiled(device: DeviceSpec) -> bool:
    """Return whether a device like it was profiled."""
    return (device.vendor, device.capability) == _PROFILED


@cache
def sheet_slowdowns() -> SheetSlowdowns:
    """Return the slowdowns of profiles on H100 and H200."""
    text = files("stepmark").joinpath("data", "contention.toml").read_text(encoding="utf-8")
    slowdown = tomllib.loads(text)["slowdown"]
    return SheetSlowdowns({kind: slowdown[kind] for kind in (*KINDS.values(), COMM)})
