"""What came of a case. Raw: samples in seconds, never a rate. Derived figures are report's."""

from dataclasses import dataclass, field

from stepmark.core.case import OpCase
from stepmark.core.comm_case import CommCase
from stepmark.core.train_case import TrainCase
from stepmark.core.training import Training

# 2: collectives (comm cases, launches). 3: training.
SCHEMA = 3

AnyCase = OpCase | CommCase | TrainCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds per call: seconds[rank][sample], each the mean of `calls_per_sample` calls."""

    seconds: tuple[tuple[float, ...], ...]
    method: str  # clock name and version, e.g. "graph-rotate/1"
    calls_per_sample: int = 1
    num_sets: int = 1  # operand sets the calls rotate over
    soak_s: float = 0.0  # work of this case done before the first sample
    wall_s: float = 0.0  # wall time of soak and samples together
    # Set when the samples lie outside this process: a .npy file beside the records.
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of a result with what it should be, on one rank.

    Operators: against a higher-precision reference, max_rel_err = max over compared elements
    of |out - ref| / max(|ref|, rms(ref)). Collectives: against values computed from rank and
    position, max_rel_err = max of |out - ref| / max(|ref|, 1). Training: losses that are not
    finite, and on real text a loss that does not fall, are wrong.
    """

    max_rel_err: float
    tolerance: float
    num_wrong: int  # compared elements over tolerance, or not finite
    num_compared: int
    reference: str  # e.g. "fp64, 64 rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Device state of one rank around one case. None where the device does not tell."""

    sm_clock_hz: float | None = None  # median while the samples ran
    power_w: float | None = None  # median while the samples ran
    temperature_c: float | None = None  # after
    throttle: tuple[str, ...] = ()  # reasons seen while the samples ran
    num_readings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When ranks came and what a call cost their host. By rank, in the order of the samples.

    late_s[rank][batch] is how long after the first rank this rank began a batch; error_s is
    how far clocks of different hosts may be apart (0 on one host, None where unknown).
    """

    late_s: tuple[tuple[float, ...], ...]
    error_s: float | None
    issue_s: tuple[float, ...]  # median host seconds to issue one call
    warmup_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Compute that ran beside a collective: seconds[rank][sample] of one call of it."""

    alone_s: tuple[tuple[float, ...], ...]
    together_s: tuple[tuple[float, ...], ...]
    backend_run: str


class _OfCase:
    """The case of a record by its kind, for readers that know which they have."""

    __slots__ = ()
    case: AnyCase

    @property
    def operator(self) -> OpCase:
        """Raises TypeError for a collective."""
        if not isinstance(self.case, OpCase):
            raise TypeError(f"{self.case.family} is no operator")
        return self.case

    @property
    def comm(self) -> CommCase:
        """Raises TypeError for an operator."""
        if not isinstance(self.case, CommCase):
            raise TypeError(f"{self.case.family} is no collective")
        return self.case

    @property
    def train(self) -> TrainCase:
        """Raises TypeError for what is no training step."""
        if not isinstance(self.case, TrainCase):
            raise TypeError(f"{self.case.family} is no training step")
        return self.case


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(_OfCase):
    """A case that ran on every rank."""

    run_id: str
    case: AnyCase
    samples: Samples
    checks: tuple[Check, ...]  # per rank
    telemetry: tuple[Telemetry, ...]  # per rank
    backend_run: str  # what really ran, e.g. "cudnn" or a kernel name
    peak_memory_bytes: int | None
    started_at: float  # Unix time
    launch: int = 1  # of how many times communicators (and processes) were made anew
    arrivals: Arrivals | None = None  # collectives only
    beside: Beside | None = None
    training: Training | None = None  # training steps only
    schema: int = SCHEMA
    kind: str = "measured"

    @property
    def num_wrong(self) -> int:
        return sum(check.num_wrong for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(_OfCase):
    """A case that cannot run here; every rank derived the same reason before any launch."""

    run_id: str
    case: AnyCase
    reason: str
    needed_bytes: int | None = None
    launch: int = 1
    schema: int = SCHEMA
    kind: str = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_OfCase):
    """A case that broke."""

    run_id: str
    case: AnyCase
    cause: str  # "oom", "error", "timeout", "lost rank"
    message: str
    ranks: tuple[int, ...]
    traceback: str = ""  # or the stacks of ranks that hang
    launch: int = 1
    schema: int = SCHEMA
    kind: str = "failed"


Record = Measured | Skipped | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One accelerator (or the CPU) of one rank, as found."""

    rank: int
    index: int
    name: str  # exact, as the driver says
    uuid: str = ""
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    num_sms: int | None = None
    capability: str = ""
    max_sm_clock_hz: float | None = None
    max_memory_clock_hz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    pcie: str = ""
    host: str = ""
    pid: int = 0  # of the rank; 0 unknown
    bus_id: str = ""  # PCI domain:bus:device, as 0000:0f:00


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything a reader needs to judge a figure; captured once per run."""

    host: str
    os: str
    kernel: str
    cpu: str
    num_cores: int
    memory_bytes: int
    python: str
    torch: str
    versions: dict[str, str]  # cuda, hip, driver, nccl, cudnn, triton, ...; only what is there
    devices: tuple[DeviceInfo, ...]  # by rank
    git_commit: str  # of stepmark; "+dirty" appended when the tree differs; "" unknown
    stepmark: str
    variables: dict[str, str]  # NCCL_*, CUDA_*, TORCH_*, OMP_* ...; secrets redacted
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """run.json: what was asked and where it ran."""

    run_id: str
    created_at: str  # ISO 8601, UTC
    command: str
    environment: Environment
    num_cases: int
    settings: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
