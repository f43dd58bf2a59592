"""Facts of a debug log of NCCL or RCCL, each with the lines that state it."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from stepmark.cases.message import Histogram
from stepmark.findings.finding import Evidence, Finding

# More than any job has: a larger number of ranks was misprinted or mangled.
MAX_RANKS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrences:
    """Number of lines that state a fact, of their processes, and the first of them."""

    lines: int
    processes: int  # 0 where the lines name none
    hosts: tuple[str, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitTime:
    """Start-up time of a communicator on one rank; parts as NCCL names them."""

    total_s: float
    parts_s: tuple[tuple[str, float], ...]
    evidence: Evidence


@dataclass(slots=True, kw_only=True)
class Member:
    """One rank of a communicator. `pointer` names the communicator inside its process."""

    process: str  # host:pid
    host: str
    pointer: str
    rank: int | None = None
    local_rank: int | None = None
    device: int | None = None
    bus_id: str | None = None
    started: Evidence | None = None
    completed: bool = False
    destroyed: Evidence | None = None
    init: InitTime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCounts:
    """The line "24 coll channels, ..." of a communicator; None: not in that version's line."""

    coll: int
    nvls: int | None
    p2p: int
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """`key`: the commId, or host:pid:pointer where no line gives it."""

    key: str
    num_ranks: int | None
    num_nodes: int | None
    local_ranks: int | None  # most on one node
    members: tuple[Member, ...]
    rings: tuple[tuple[tuple[int, ...], int], ...] = ()  # order of ranks -> channels
    num_trees: int | None = None
    channels: ChannelCounts | None = None
    over_nvlink: bool = False  # a ring, a tree or the like uses it inside a node


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedAdapter:
    """An end of a connection at which a rank stages channels in host memory."""

    rank: int
    device: int
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The connection from one rank to another, and its number of channels.

    kind: "P2P/CUMEM", "P2P/IPC", "P2P/direct pointer", "P2P/indirect", "SHM", "NET/IB",
    "NET/AWS Libfabric", "COLLNET/SHARP", ...; same_host None: unknown. gdrdma_channels: those
    with GPUDirect RDMA on both ranks; `staged` names the adapters of the others.
    """

    communicator: str
    kind: str
    source: int
    target: int | None  # None: the network (COLLNET)
    same_host: bool | None
    channels: int
    gdrdma_channels: int
    pxn: bool
    evidence: Evidence
    staged: tuple[StagedAdapter, ...] = ()

    @property
    def gdrdma(self) -> bool:
        """Whether all channels have GPUDirect RDMA."""
        return self.gdrdma_channels == self.channels

    @property
    def is_net(self) -> bool:
        return self.kind.startswith(("NET/", "COLLNET/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NicUse:
    """A network device that connections of a rank use; the index counts per host."""

    communicator: str
    rank: int
    host: str
    device: int
    evidence: Evidence


class Plugin(NamedTuple):
    """One event of a plugin of one kind (NET, COLLNET, TUNER, PROFILER, ENV).

    event: "asked" (requested by a variable), "missing" (no such library), "symbol" (an API
    version it lacks), "loaded", "internal" (NCCL's own instead), "failed" (did not start).
    """

    kind: str
    event: str
    name: str
    api: int | None


class Interface(NamedTuple):
    """A network interface or adapter. role: "bootstrap", "socket", "ib", "oob"."""

    role: str
    name: str
    address: str  # "" for adapters


class GpuDirect(NamedTuple):
    """Use of GPUDirect RDMA by an adapter. distance and level: of the path, or None."""

    enabled: bool
    net: str  # "" where the line does not name it
    device: str
    distance: str | None
    level: str | None


# Types of paths as NCCL orders them, near ones first. PHB: over the CPU; SYS: between CPUs.
PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")


class AdapterSpeed(NamedTuple):
    """Speed of a network adapter. name: of its device, else of its node ("NET/0-c")."""

    host: str
    name: str
    device: int | None  # None: NCCL's number of it is unknown
    gbit_per_s: float


class NicPath(NamedTuple):
    """Path from a GPU to its nearest adapter; gpu "": the worst that the host's rings use.

    path: one of PATHS.
    """

    host: str
    gpu: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """NCCL's own prediction of an algorithm, one cell of its table."""

    communicator: str
    collective: str
    algorithm: str
    protocol: str
    latency_s: float
    algbw_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """NCCL's choice for calls of a size. collective "": the version's line does not name it.

    printed_bytes is the line's figure: per rank for all-gather and reduce-scatter from 2.24
    on. message_bytes counts as nccl-tests; None where the number of ranks is unknown.
    """

    collective: str
    printed_bytes: int
    message_bytes: int | None
    algorithm: str
    protocol: str
    channels: int | None
    time_s: float | None  # NCCL's prediction, versions 2.21 to 2.23
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCall:
    """A call that one rank issued at a place in its communicator's sequence."""

    rank: int | None
    process: str
    call: str
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first place (from 0) where ranks of a communicator issued different collectives.

    `sides`: one rank of each kind of call, the most frequent first; `issuers`: all that issued
    it, as (process, rank). certain False: that the ranks form one communicator is inferred, for
    want of lines of its start.
    """

    communicator: str
    position: int
    sides: tuple[IssuedCall, ...]
    issuers: tuple[tuple[tuple[str, int | None], ...], ...]
    certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDifference:
    """What one rank sent to another, and what that one received, where they differ.

    Calls are compared without their order: `sent` and `received` are calls of one side alone.
    """

    communicator: str
    source: int
    target: int
    num_sent: int
    num_received: int
    sent: tuple[str, ...]
    received: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggingRank:
    """A rank that issued fewer collectives than another one, as far as the log goes."""

    communicator: str
    issued: int
    most: int
    last: IssuedCall | None  # its own
    missing: IssuedCall  # what a rank ahead issued next
    rank: int | None
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCalls:
    """Calls that the log of a rank lacks between others, while its peers have them.

    certain: opCount counts on over the gap; else the rank may also have issued fewer calls.
    """

    communicator: str
    rank: int | None
    process: str
    lines: int  # at least
    before: IssuedCall  # the first that a rank lacks, as another one issued it
    certain: bool


class Role(IntEnum):
    """Rank of a failure among those of one job: the lowest is the cause of the others."""

    HARDWARE = 0  # of the machine: GPU, node, host memory
    CAUSE = 1
    SIGNAL = 2  # a process died of a signal; a cause above says why
    VAGUE = 3  # an error that does not say its cause
    WAIT = 4  # a rank waited for others in vain
    ENDED = 5  # ended from outside: scheduler, user, time limit
    CONSEQUENCE = 6  # another process was gone, or this one was told to stop
    REMARK = 7  # usual after a failure, and no failure by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure of one process as its output states it.

    text: what it means; detail: the line's own words, e.g. "ValueError: bad shape"; place: the
    innermost line of the user's code, e.g. "train.py:12 in step", with its evidence.
    """

    rule: str
    role: Role
    text: str
    action: str
    rank: int | None
    process: str  # host:pid or pid; "" unknown
    time_s: float | None  # of its day or year, to order lines of several files
    file_index: int
    evidence: Evidence
    lines: int = 1
    detail: str = ""
    place: str = ""
    place_evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """State of a process group on one rank, as ProcessGroupNCCL printed it.

    rank: in the job, or in the group where the line does not say it. waits_in: number of the
    collective that timed out.
    """

    group: str
    group_rank: int
    rank: int
    enqueued: int | None
    completed: int | None
    waits_in: int | None
    call: str
    seconds: float | None
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentRank:
    """A rank that, by the report of another one, did not join a collective of a group."""

    group: str
    rank: int
    reporter: int
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """All facts of the files of one job.

    versions: (what, value) with what in nccl, rccl, cuda, cuda_driver, hip, rocm.
    environment: (variable, value). networks: the one in use. nvls: support by True/False.
    warnings, harmless and p2p_disabled: the first of lines that differ in numbers alone.
    """

    files: tuple[str, ...]
    num_lines: int
    hosts: tuple[str, ...]
    processes: tuple[str, ...]
    versions: dict[tuple[str, str], Occurrences]
    environment: dict[tuple[str, str], Occurrences]
    networks: dict[str, Occurrences]
    nvls: dict[bool, Occurrences]
    communicators: tuple[Communicator, ...]
    transports: tuple[Transport, ...]
    nics: tuple[NicUse, ...]
    plugins: dict[Plugin, Occurrences]
    interfaces: dict[Interface, Occurrences]
    gpudirect: dict[GpuDirect, Occurrences]
    predictions: tuple[Prediction, ...]
    choices: tuple[Choice, ...]
    warnings: dict[str, Occurrences]
    harmless: dict[str, Occurrences]
    p2p_disabled: dict[str, Occurrences]
    messages: Histogram
    mismatches: tuple[Mismatch, ...]
    behind: tuple[LaggingRank, ...]
    peers: tuple[PeerDifference, ...] = ()
    lost: tuple[LostCalls, ...] = ()
    failures: tuple[Failure, ...] = ()
    progress: tuple[GroupProgress, ...] = ()
    absent: tuple[AbsentRank, ...] = ()
    adapter_speeds: dict[AdapterSpeed, Occurrences] = field(default_factory=dict)
    nic_paths: dict[NicPath, Occurrences] = field(default_factory=dict)
    endings: tuple[Evidence, ...] = ()  # lines by which the job says that it ended well
    aborted: tuple[Evidence, ...] = ()  # lines of communicators that were aborted
    has_steps: bool = False  # whether a file has steps of training
    stopped: tuple[Finding, ...] = ()  # outputs of benchmarks that end before their last row
    after_ends: tuple[Evidence, ...] = ()  # the first line after an end that takes it back
    torn: tuple[Evidence, ...] = ()  # first line of each process that only torn lines name
    torn_lines: int = 0  # lines left out for this
    has_messages: bool = True  # whether any line is of NCCL or RCCL
    unread_calls: int = 0  # lines of calls cut before their count or type
    rounded_calls: int = 0  # counted at the next power of two, for want of memory

    @property
    def has_failed(self) -> bool:
        """Whether a line states that a process failed or was ended."""
        return any(failure.role < Role.REMARK for failure in self.failures)
