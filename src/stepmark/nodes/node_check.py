"""Results of a node check: rates by place, failures, and what was not tested.

A place is a host ("node1") or one of its devices ("node1/0").
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

NODE_CHECK_SCHEMA = 1


def host_of(place: str) -> str:
    return place.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One rate, by launch. Figures of equal name, unit and device are comparable.

    `where` is the place that has the rate, or the two places of a pair: source, destination.
    """

    name: str  # e.g. "gemm 8192x8192x8192 bf16"; its first word is the family
    unit: str  # "FLOP/s" or "B/s"
    values: tuple[float, ...]
    where: tuple[str, ...]
    device: str  # exact name
    peak: float | None = None  # of the data sheet

    @property
    def value(self) -> float | None:
        """Return the geometric mean over launches; None without a finite rate in each."""
        if not self.values or not all(math.isfinite(v) and v > 0 for v in self.values):
            return None
        return math.exp(fmean(map(math.log, self.values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence about a place."""

    where: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """The check of one host, or of one of its devices until they are merged.

    num_devices: accelerators of the host. failures: wrong data, hangs, new errors. unclear:
    tests that were tried and have no result. not_tested: tests that do not apply here, with
    the reason. stage: the test in progress; "" at the end.
    """

    host: str
    checked_at: str  # ISO 8601, UTC
    num_devices: int = 0
    figures: tuple[Figure, ...] = ()
    failures: tuple[Remark, ...] = ()
    unclear: tuple[Remark, ...] = ()
    not_tested: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()
    stage: str = ""
    schema: int = NODE_CHECK_SCHEMA


def merged(first: NodeCheck, others: Iterable[NodeCheck]) -> NodeCheck:
    """Return the first check with the results of the others added."""
    for other in others:
        first = replace(
            first,
            num_devices=first.num_devices + other.num_devices,
            figures=first.figures + other.figures,
            failures=first.failures + other.failures,
            unclear=first.unclear + other.unclear,
            not_tested=first.not_tested + other.not_tested,
            notes=first.notes + other.notes,
        )
    return first
