"""Case of a replay: a workload on real ranks. Its workload lies in the plan of the run."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from stepmark.cases.case import Label, identity_hash
from stepmark.cases.fields import Role, field_of, identity


class Compute(StrEnum):
    """What a replay does where the workload computes."""

    NONE = "none"  # nothing: messages only
    SLEEP = "sleep"  # the device (on a CPU the rank) is busy for the operation's time
    REAL = "real"  # the operators, as `stepmark op` runs them


class Pace(StrEnum):
    """When a rank issues operations."""

    FREE = "free"  # as soon as it can
    ORIGINAL = "original"  # not before their starts in the trace that the file is of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCase:
    """One workload. digest: SHA-256 of its native file, as it runs."""

    kind: ClassVar[str] = "replay"
    file: str = field_of(None)  # of the workload, as the user named it
    digest: str = field_of(Role.SETTING)
    num_ranks: int = field_of(Role.STRICT)
    device: str = field_of(Role.ELSEWHERE, "cuda")  # or cpu
    compute: Compute = field_of(Role.SETTING, Compute.NONE)
    blocking: bool = field_of(Role.SETTING, False)  # the host waits for each operation
    pace: Pace = field_of(Role.SETTING, Pace.FREE, formerly=Pace.FREE)
    shrunk_from: int = field_of(None, 0)  # ranks of the file; 0: as many as run
    # Source of the times of computation; "": the file.
    compute_from: str = field_of(None, "")
    labels: tuple[Label, ...] = field_of(None, ())

    @property
    def family(self) -> str:
        return "replay"

    @property
    def case_id(self) -> str:
        """SHA-256 of the canonical JSON of what runs and how."""
        return identity_hash({"replay": identity(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay measured beside its iterations.

    spans: file in the run's traces folder, float64 [rank][pass][operation][2] in seconds: start
    since that of the step, and duration; not a number where it was not timed. Passes are
    iterations of their own, in which every operation is timed. blocked_s: by rank and
    iteration, how long the host waited for messages; empty on a GPU. event_s: what the two
    events of an operation add to its time, on a GPU.
    """

    spans: str
    num_passes: int
    blocked_s: tuple[tuple[float, ...], ...] = ()
    event_s: float = 0.0
