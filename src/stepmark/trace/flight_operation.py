"""What a flight-recorder dump says, once its versions are told apart."""

from dataclasses import dataclass

MAX_ELEMENTS = 2**60

# (elements, torch's name of the type) per tensor.
Shapes = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group. ranks are those of the world; None where the dump does not tell."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the watchdog had seen of a group; it lags behind the states of the entries."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry. `sequence` counts collectives, or transfers of pairs, of its group."""

    group: str
    description: str
    kind: str  # torch's name without backend and peers: "_all_gather_base", "send"
    is_p2p: bool
    sequence: int | None
    record_id: int | None
    inputs: Shapes | None
    outputs: Shapes | None
    state: str  # scheduled, started, completed
    created_ns: int | None
    duration_s: float | None
    timeout_s: float | None
    peers: tuple[int, int] | None  # ranks within the group
    phase: str
    where: str
    is_coalesced: bool = False

    @property
    def is_marker(self) -> bool:
        """The entry of a coalesced group as a whole, which names no tensors."""
        return self.kind.lower().endswith("coalesced") and not self.inputs and not self.outputs

    @property
    def is_done(self) -> bool:
        return self.state == "completed"

    @property
    def step(self) -> tuple[str, bool, int | None]:
        """What the parts of a coalesced group share."""
        return self.group, self.is_p2p, self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One rank's file. `rank` is None where neither name nor content tell it."""

    file: str
    rank: int | None
    version: str
    nccl: str
    groups: dict[str, Group]
    status: dict[str, Status]
    operations: tuple[Operation, ...]

    def group_of(self, operation: Operation) -> Group:
        """With the ranks, where the dump has them under this name.

        gloo's dumps list their only group under an empty name.
        """
        found = self.groups.get(operation.group)
        if found is None and list(self.groups) == [""]:
            found = self.groups[""]
        return Group(
            name=operation.group,
            description=operation.description or (found.description if found else ""),
            ranks=found.ranks if found else None,
        )

    @property
    def num_lost(self) -> int:
        """Operations before the first that is still in the ring buffer."""
        return (self.operations[0].record_id or 0) if self.operations else 0


def whole(value: object) -> int | None:
    """A whole number, or one written as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if isinstance(value, str) and len(value) < 20:
        try:
            return int(value)
        except ValueError:
            return None
    return None
