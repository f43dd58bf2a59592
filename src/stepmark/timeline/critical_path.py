"""The critical path of a step, as segments that tile its window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"
COMMUNICATION = "communication"
COPIES = "copies"
HOST = "host"
LAUNCH = "launch latency"
GAP = "gaps"
PEER = "peer"
UNKNOWN = "unknown"
CATEGORIES = (COMPUTE, COMMUNICATION, PEER, COPIES, HOST, LAUNCH, GAP, UNKNOWN)


class Segment(NamedTuple):
    """A part of the path. is_inferred: its cause is known by the times alone."""

    rank: int
    start: int
    end: int
    category: str
    name: str
    is_inferred: bool = False

    @property
    def time(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The path of one step (None: of a trace without steps), on the rank that ends last.

    at_least: how long the step would take at least, ns, if all of a category took no time:
    the longest that remains of this path or of one stream. without_clocks: ranks whose clocks
    no collective sets. absent: ranks of its collectives that have no trace. unmatched: time in
    kernels of communication on the path that cannot be compared over ranks, and so may be
    waiting; uncounted: that of the rank, on the path or not, which at_least takes for 0.
    """

    step: int | None
    rank: int
    window: tuple[int, int]
    segments: tuple[Segment, ...]
    at_least: Mapping[str, int]
    without_clocks: tuple[int, ...]
    absent: tuple[int, ...]
    unmatched: int
    uncounted: int
