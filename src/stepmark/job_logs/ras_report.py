"""Reports of NCCL's RAS subsystem: what ncclras (or nc to port 28028) prints, text or JSON.

The formats are those of src/ras/client_support.cc in the sources of NCCL, 2.24 to 2.31, and of
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html.
"""

from dataclasses import dataclass

from stepmark.findings.finding import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcess:
    """A process as a report names it. `rank` is that of the communicator, not of the job.

    rank: None where processes of the job are listed. pid, node, gpus: None and "" where RAS has
    no information. gpus: CUDA devices as printed, such as "0,1" or "0 (NVML 4)".
    """

    rank: int | None
    pid: int | None
    node: str
    gpus: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcesses:
    """Processes of the job in one condition. `processes` is empty where RAS lists none."""

    count: int
    processes: tuple[RasProcess, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class RasSide:
    """Ranks of a communicator in one condition.

    value: operations launched, a status word, or the text of an error; "missing" for ranks
    without data. ranks: ranks within the communicator, () unknown: RAS lists those of small
    sides only. is_computed: ranks are all the others of the communicator, not listed ones.
    processes: the listed ones.
    """

    value: int | str
    count: int
    ranks: tuple[int, ...]
    is_computed: bool
    processes: tuple[RasProcess, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class RasStatement:
    """One statement on a communicator.

    kind: MISMATCH, INCOMPLETE or ERROR. subject: "status", the collective whose operations are
    counted ("AllGather"; "collective" for all kinds together, before 2.26), "data" of missing
    ranks, "initialization" or "asynchronous" error, "" where the lines below the heading are
    missing. communicator: "#0-1" (group 0), "" in JSON. size: ranks, None unknown.
    sides: in the order of the report, largest first. Counts of a job that runs differ between
    ranks for a moment: only a second report shows whether they move.
    """

    communicator: str
    hash: str  # 16 hexadecimal digits, as NCCL's log names it
    group: int | None
    size: int | None
    kind: str
    subject: str
    sides: tuple[RasSide, ...]
    evidence: Evidence  # the line that states it


@dataclass(frozen=True, slots=True, kw_only=True)
class RasGroup:
    """A row of the table: communicators alike in size, nodes, status and errors.

    status: the last of NOCOMM, INIT, RUNNING, FINALIZE, ABORT that any rank has (UNKNOWN for
    NOCOMM before 2.26). errors: () for OK. ranks_per_node: such as "8" or "7-8". In JSON, which
    has no groups, each communicator is a group, and nodes are those of ranks with data.
    """

    number: int
    num_communicators: int
    num_nodes: int
    ranks_per_node: str
    size: int  # ranks per communicator
    num_ranks: int  # distinct ranks (GPUs) in the group that sent data
    status: str
    errors: tuple[str, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class RasReport:
    """The answer to one query. Numbers are None where the report does not state them.

    missing: processes without data in this query; they may be slow, stopped or dead. dead:
    processes that RAS gave up (no contact for 60 s). num_timeouts: while data was gathered.
    JSON names processes by communicators only, so `missing` and `dead` are there those of
    `missing_ranks`. is_whole: the last section was read, and each communicator that the table
    counts under an error has its statement; else more may be wrong than `statements` has.
    """

    file: str
    version: str  # of NCCL, such as "2.26.2"; "" unknown
    num_nodes: int | None
    num_processes: int | None
    num_gpus: int | None
    groups: tuple[RasGroup, ...]
    statements: tuple[RasStatement, ...]
    missing: RasProcesses | None
    dead: RasProcesses | None
    num_timeouts: int | None
    timeouts: Evidence | None
    is_whole: bool
    evidence: Evidence  # its first line

    @property
    def is_ok(self) -> bool:
        """Whether the whole report was read, has a table, and states no error and no warning."""
        raise NotImplementedError


def looks_like_ras(head: bytes) -> bool:
    """Return whether a file that begins so has a RAS report, text or JSON."""
    raise NotImplementedError


def read_ras(text: str, file: str) -> tuple[RasReport, ...]:
    """Return the reports of a file in its order, one per query. Raises ConfigError."""
    raise NotImplementedError
