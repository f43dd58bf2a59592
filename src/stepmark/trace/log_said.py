"""What a collector of a log's facts shares: a line that was said, and who said such lines."""

from dataclasses import dataclass, field
from typing import NamedTuple

from stepmark.core.finding import Evidence
from stepmark.core.log_facts import Seen
from stepmark.trace.log_calls import Handle
from stepmark.trace.log_lines import text_of

MOST_EVIDENCE = 3


class Link(NamedTuple):
    """What a line of a channel says of one connection but its channel's number."""

    kind: str
    source: int
    target: int | None
    gdrdma: bool
    pxn: bool


@dataclass(slots=True)
class Said:
    """One message. `following` is the next line of the file, for lines that were wrapped."""

    process: str  # host:pid, "" unknown
    host: str
    is_main: bool
    device: int | None
    text: str  # the message
    file: str
    number: int
    line: bytes
    following: bytes

    def evidence(self) -> Evidence:
        return Evidence(file=self.file, line=self.number, text=text_of(self.line))

    def unwrapped(self) -> str:
        """With the next line, where that belongs to no message of its own."""
        more = self.following.strip()
        if not more or b"NCCL" in more:
            return self.text
        return f"{self.text.rstrip()} {text_of(more)}"


@dataclass(slots=True)
class Notes:
    """Collects lines that say the same."""

    lines: int = 0
    processes: set[str] = field(default_factory=set)
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, said: Said) -> None:
        self.lines += 1
        if said.process:
            self.processes.add(said.process)
        if len(self.evidence) < MOST_EVIDENCE:
            self.evidence.append(said.evidence())

    def seen(self) -> Seen:
        return Seen(
            lines=self.lines, processes=len(self.processes), evidence=tuple(self.evidence)
        )


class Handles:
    """Communicators by process and pointer; a pointer can come back after its end."""

    def __init__(self) -> None:
        self.listed: list[Handle] = []
        self._live: dict[tuple[str, str], Handle] = {}
        self._owners: dict[str, set[str]] = {}
        self._latest: dict[tuple[str, int | None], Handle] = {}

    def of(self, said: Said, pointer: str) -> Handle:
        """The one that a line names. A line without a process has the pointer's only owner."""
        process = said.process
        owners = self._owners.get(pointer, set())
        if not process and len(owners) == 1:
            (process,) = owners
        handle = self._live.get((process, pointer))
        if handle is None:
            handle = self._new(process, said.host, pointer)
        self._is_latest(said, handle)
        return handle

    def start(self, said: Said, pointer: str, comm_id: str | None) -> Handle:
        """The one that a line of the start names: new where the pointer was in use."""
        old = self._live.get((said.process, pointer))
        if old is not None and (old.completed or old.comm_id not in (None, comm_id)):
            self._new(said.process, said.host, pointer)
        handle = self.of(said, pointer)
        handle.comm_id = comm_id or handle.comm_id
        return handle

    def latest(self, said: Said) -> Handle | None:
        """What the line's process and device named last: lines of transports name none."""
        return self._latest.get((said.process, said.device)) or self._latest.get(
            (said.process, None)
        )

    def with_rank(self, said: Said, rank: int, num_ranks: int) -> Handle | None:
        """The last one of the line's process that has this rank of so many."""
        latest = self.latest(said)
        for handle in ([latest] if latest else []) + self.listed[::-1]:
            if (handle.process, handle.rank, handle.num_ranks) == (
                said.process,
                rank,
                num_ranks,
            ):
                return handle
        return None

    def _new(self, process: str, host: str, pointer: str) -> Handle:
        handle = Handle(process=process, host=host, pointer=pointer, order=len(self.listed))
        self._live[process, pointer] = handle
        self._owners.setdefault(pointer, set()).add(process)
        self.listed.append(handle)
        return handle

    def _is_latest(self, said: Said, handle: Handle) -> None:
        self._latest[said.process, said.device] = handle
        self._latest[said.process, None] = handle
