"""Prediction of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepmark.core.ledger import Ledger, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work in the timeline of a predicted step, for its figure and its Perfetto file."""

    stage: int
    stream: str  # COMPUTE, "host", or a stream of communication
    name: str  # of the module, or of the collective
    phase: str
    layer: int | None
    microbatch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One steady step of all pipeline stages that was simulated.

    busy_s: compute of the slowest stage by kind of work, contention included.
    contention_s: the part of it that communication adds. bubble_s: time in which the slowest
    stage waits for another stage.
    """

    step_s: float
    ledgers: tuple[Ledger, ...]  # by stage
    busy_s: Mapping[Work, float]
    contention_s: float
    comm_s: float  # communication of the slowest stage, exposed or not
    exposed_s: float
    bubble_s: float
    num_kernels: float
    is_host_bound: bool
    spans: tuple[Span, ...]
