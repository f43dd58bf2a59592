"""What came of a case. Raw: samples in seconds, never a rate. Derived figures are report's."""

from dataclasses import dataclass, field

from stepmark.core.case import Case

SCHEMA = 1


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
    """Comparison of a result with a higher-precision reference, on one rank.

    max_rel_err = max over compared elements of |out - ref| / max(|ref|, rms(ref)).
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
class Measured:
    """A case that ran on every rank."""

    run_id: str
    case: Case
    samples: Samples
    checks: tuple[Check, ...]  # per rank
    telemetry: tuple[Telemetry, ...]  # per rank
    backend_run: str  # what really ran, e.g. "cudnn" or a kernel name
    peak_memory_bytes: int | None
    started_at: float  # Unix time
    schema: int = SCHEMA
    kind: str = "measured"

    @property
    def num_wrong(self) -> int:
        return sum(check.num_wrong for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A case that cannot run here; every rank derived the same reason before any launch."""

    run_id: str
    case: Case
    reason: str
    needed_bytes: int | None = None
    schema: int = SCHEMA
    kind: str = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A case that broke."""

    run_id: str
    case: Case
    cause: str  # "oom", "error", "timeout", "lost rank"
    message: str
    ranks: tuple[int, ...]
    traceback: str = ""
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
