"""Prediction of a training step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stepmark.timeline.ledger import Ledger, Work
from stepmark.timeline.step_cost import Source

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A predicted step of every stage.

    slowdown: of attention, as log; 0 at full clock. clock_hz, power_w: means over the step of
    one device; None where no power was measured. sources: seconds of compute by origin.
    is_lower_bound: some operations or links have no known cost.
    """

    timeline: Timeline
    slowdown: float = 0.0
    clock_hz: float | None = None
    power_w: float | None = None
    sources: Mapping[Source, float]
    is_lower_bound: bool = False

    @property
    def step_s(self) -> float:
        return self.timeline.step_s

    @property
    def energy_j(self) -> float | None:
        """Return the energy of one device."""
        return None if self.power_w is None else self.power_w * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Predicted memory of the fullest rank.

    verdict: fits, runs out of memory, uncertain, or unknown for a device of unknown size.
    fitting: options with which a step fits that runs out of memory, "" where none is known.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int | None
    verdict: str
    fitting: str
