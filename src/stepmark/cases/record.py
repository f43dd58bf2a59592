"""Outcome of a case. Records hold samples in seconds; the report derives rates."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.replay_case import ReplayCase, Replayed
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Training
from stepmark.ground.redaction import redact

# 2: collectives (comm cases, launches). 3: training.
SCHEMA = 3

# Versions of timing methods, by kind of case, at the end of Samples.method. A calibration may
# have any of them; steps are timed by the first. train/1 did not soak, and left out what a host
# does between two samples.
METHOD_VERSIONS = {"op": (1, 2), "comm": (1,), "train": (2, 1), "replay": (1,)}

AnyCase = OpCase | CommCase | TrainCase | ReplayCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds per call as seconds[rank][sample], each the mean of `calls_per_sample` calls."""

    seconds: tuple[tuple[float, ...], ...]
    method: str  # clock name and version, e.g. "graph-rotate/1"
    calls_per_sample: int = 1
    num_sets: int = 1  # operand sets the calls rotate over
    soak_s: float = 0.0  # duration of the soak, or of warm-up calls, before the first sample
    warmup_calls: int = 0  # a fixed number of calls in place of the soak; 0: none
    wall_s: float = 0.0  # wall time of soak and samples together
    # Repeats: samples of each batch, in order. () in older records, and where there are none.
    batches: tuple[int, ...] = ()
    # Set if the samples are in a .npy file next to the records.
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of a result with its expected value, on one rank.

    Operators: against a higher-precision reference, max_rel_err = max over compared elements
    of |out - ref| / max(|ref|, rms(ref)). Collectives: against values computed from rank and
    position, max_rel_err = max of |out - ref| / max(|ref|, 1). Training: a loss that is not
    finite is wrong, and on real text also a loss that does not fall.
    """

    max_rel_err: float
    tolerance: float
    num_wrong: int  # compared elements over tolerance, or not finite
    num_compared: int
    reference: str  # e.g. "fp64, 64 rows"
    # Of operators: root mean square of out - ref over that of ref, beyond what storing the
    # exact result costs. Where it is over its tolerance, all elements are wrong. None: too few
    # elements, one tolerance that the user gave, or a record of an older release.
    rms_err: float | None = None
    rms_tolerance: float | None = None
    remarks: tuple[str, ...] = ()  # on a user's operator, e.g. "result is float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Load of one rank's host during one case. None: /proc does not report it."""

    num_cores: int  # of the host, not only those that this rank may use
    own_threads: int  # with which this rank computes
    runnable_before: int | None = None  # threads, just before the samples
    runnable: float | None = None  # median while the samples ran, own threads included
    steal: float | None = None  # share of the cores' time that a hypervisor took meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Device state of one rank during one case. None: the device does not report it."""

    sm_clock_hz: float | None = None  # median while the samples ran
    mean_clock_hz: float | None = None  # mean of the same readings; None in older records
    power_w: float | None = None  # median while the samples ran
    temperature_c: float | None = None  # after the last sample
    throttle: tuple[str, ...] = ()  # reasons seen while the samples ran
    num_readings: int = 0
    # What the device used in span_s, which ends at the first and the last change of its energy
    # counter while the samples ran.
    energy_j: float | None = None
    span_s: float | None = None
    host: HostLoad | None = None  # None in records of older releases

    @property
    def clock_hz(self) -> float | None:
        """Return the mean clock while samples ran; in older records their median."""
        return self.mean_clock_hz or self.sm_clock_hz

    @property
    def mean_power_w(self) -> float | None:
        """Return the mean power while samples ran, by the energy counter where there is one."""
        if self.energy_j is not None and self.span_s:
            return self.energy_j / self.span_s
        return self.power_w


def is_busy(states: Sequence[Telemetry]) -> bool:
    """Return whether more threads wanted to run than a host has cores, or its ranks use.

    states: of all ranks, whose threads are the measurement's own.
    """
    loads = [state.host for state in states if state.host]
    own = sum(load.own_threads for load in loads)
    queues = ((load, load.runnable_before, load.runnable) for load in loads)
    return any((q or 0) > max(load.num_cores, own) for load, *both in queues for q in both)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrival times of ranks and host time per call, by rank in the order of the samples.

    late_s[rank][batch] is the delay of this rank's start of a batch after the first rank.
    error_s bounds the difference between clocks of hosts (0 on one host, None if unknown).
    """

    late_s: tuple[tuple[float, ...], ...]
    error_s: float | None
    issue_s: tuple[float, ...]  # median host seconds to issue one call
    warmup_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Compute that ran concurrently with a collective, as seconds[rank][sample] of one call."""

    alone_s: tuple[tuple[float, ...], ...]
    together_s: tuple[tuple[float, ...], ...]
    backend_run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommMemory:
    """Device memory of a collective, of the rank that uses most: the free memory's decrease.

    What torch allocates counts as buffers only.
    """

    init_bytes: int  # while the communicator was made
    buffer_bytes: int  # while operand sets were allocated, and registered
    call_bytes: int  # from the first call to the last: connections that NCCL makes on demand

    @property
    def total_bytes(self) -> int:
        return self.init_bytes + self.buffer_bytes + self.call_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What a measurement has in common with others, from the outermost level to the innermost.

    Below these are the batches of its samples, and the samples.
    """

    machine: str  # names of its hosts
    process: str  # of rank 0: pid, and when it began
    communicator: int  # number from 1 of the communicators that the process made in turn
    round: int | None = None  # of a sweep


class _OfCase:
    """Typed access to the case of a record."""

    __slots__ = ()
    case: AnyCase
    differs: tuple[str, ...] = ()

    @property
    def operator(self) -> OpCase:
        """Return the case of an operator. Raise TypeError for another kind."""
        if not isinstance(self.case, OpCase):
            raise TypeError(f"{self.case.family} is not an operator")
        return self.case

    @property
    def comm(self) -> CommCase:
        """Return the case of a collective. Raise TypeError for another kind."""
        if not isinstance(self.case, CommCase):
            raise TypeError(f"{self.case.family} is not a collective")
        return self.case

    @property
    def train(self) -> TrainCase:
        """Return the training step that ran. Raise TypeError for another kind.

        It is the planned case, except where torch.compile failed and the step ran without it.
        """
        if not isinstance(self.case, TrainCase):
            raise TypeError(f"{self.case.family} is not a training step")
        training: Training | None = getattr(self, "training", None)  # of a measured one
        if training is None or not training.compile_failed:
            return self.case
        return replace(self.case, compile=CompileScope.NONE, compile_mode="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(_OfCase):
    """A case that ran on every rank."""

    run_id: str
    case: AnyCase
    samples: Samples
    checks: tuple[Check, ...]  # per rank
    telemetry: tuple[Telemetry, ...]  # per rank
    backend_run: str  # the implementation that ran, e.g. "cudnn" or a kernel name
    peak_memory_bytes: int | None
    started_at: float  # Unix time
    launch: int = 1  # number of the launch, which has new communicators (and processes)
    levels: Levels | None = None  # None in records of older releases
    # From the environment of the run, as "NCCL_ALGO: unset -> Tree": resumed with --force.
    differs: tuple[str, ...] = ()
    arrivals: Arrivals | None = None  # collectives only
    beside: Beside | None = None
    comm_memory: CommMemory | None = None  # collectives on GPUs
    training: Training | None = None  # training steps only
    replay: Replayed | None = None  # replays only
    schema: int = SCHEMA
    kind: str = "measured"

    @property
    def num_wrong(self) -> int:
        return sum(check.num_wrong for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(_OfCase):
    """A case that cannot run on this machine; all ranks agreed on it before any launch."""

    run_id: str
    case: AnyCase
    reason: str
    needed_bytes: int | None = None
    launch: int = 1
    schema: int = SCHEMA
    kind: str = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_OfCase):
    """A case that failed."""

    run_id: str
    case: AnyCase
    cause: str  # "oom", "error", "timeout", "lost rank"
    message: str
    ranks: tuple[int, ...]
    traceback: str = ""  # or the stacks of ranks that hang
    launch: int = 1
    schema: int = SCHEMA
    kind: str = "failed"

    def __post_init__(self) -> None:
        # An exception may quote the URL or the header that failed.
        object.__setattr__(self, "message", redact(self.message))
        object.__setattr__(self, "traceback", redact(self.traceback))


Record = Measured | Skipped | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One accelerator (or the CPU) of one rank."""

    rank: int
    index: int
    name: str  # exact name from the driver
    uuid: str = ""
    memory_bytes: int | None = None
    l2_bytes: int | None = None  # of a CPU its largest cache
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
    """Machine and software of a run, captured once per run."""

    host: str
    os: str
    kernel: str
    cpu: str
    num_cores: int
    memory_bytes: int
    python: str
    torch: str
    versions: dict[str, str]  # cuda, hip, driver, nccl, cudnn, triton, ..., if installed
    devices: tuple[DeviceInfo, ...]  # by rank
    git_commit: str  # of stepmark; with "+dirty" if the tree is modified; "" unknown
    stepmark: str
    variables: dict[str, str]  # NCCL_*, CUDA_*, TORCH_*, OMP_* ...; secrets redacted
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """run.json: command, environment and settings of a run."""

    run_id: str
    created_at: str  # ISO 8601, UTC
    command: str
    environment: Environment
    num_cases: int
    settings: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
