"""A training step over time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stepmark.timeline.ledger import Ledger, Work

LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An operation in the timeline of a predicted step. Spans of one stream do not overlap.

    kind: of Work; COMMUNICATION; WAITING, of a call of communication; or LEFT_OUT: repetitions
    that were not simulated one by one.
    """

    stage: int
    stream: str  # COMPUTE, or a stream of communication
    kind: str
    name: str  # of the module, or of the collective
    module: str = ""
    phase: str = ""
    layer: int | None = None
    microbatch: int | None = None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One steady step of all pipeline stages that was simulated.

    slowest: the stage that computes the longest. busy_s: its compute by kind of work,
    contention included. contention_s: the part of it that communication adds. bubble_s: time
    in which it waits for another stage.
    """

    step_s: float
    ledgers: tuple[Ledger, ...]  # by stage
    slowest: int
    busy_s: Mapping[Work, float]
    contention_s: float
    comm_s: float  # communication of the slowest stage, exposed or not
    exposed_s: float
    bubble_s: float
    num_kernels: float
    is_host_bound: bool
    spans: Callable[[], Iterator[Span]]  # of all stages, in any order
