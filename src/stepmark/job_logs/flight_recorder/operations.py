"""The contents of flight-recorder dumps: operations, their messages, dumps side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.cases.message import Histogram, MessageKind, Tally, sized
from stepmark.findings.finding import Evidence
from stepmark.ground.dtypes import message_dtype
from stepmark.ground.units import format_bytes
from stepmark.model.collectives import Collective, torch_collective

MAX_ELEMENTS = 2**60

# (elements, torch's name of the type) per tensor.
Shapes = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group. ranks are those of the world; None where the dump does not say."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


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
    duration_s: float | None
    peers: tuple[int, int] | None  # ranks within the group
    phase: str
    where: str
    created_ns: int | None = None
    timeout_s: float | None = None

    @property
    def is_marker(self) -> bool:
        """The entry of a coalesced group as a whole, which names no tensors."""
        return self.kind.lower().endswith("coalesced") and not self.inputs and not self.outputs

    @property
    def is_done(self) -> bool:
        return self.state == "completed"

    @property
    def step(self) -> tuple[str, bool, int | None]:
        """The key that the parts of a coalesced group share."""
        return self.group, self.is_p2p, self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """One rank's file. `rank` is None where neither name nor content state it.

    watchdog_completed: by group the last collective that the watchdog recorded as completed,
    which lags behind the entries.
    """

    file: str
    rank: int | None
    version: str
    nccl: str
    groups: dict[str, Group]
    watchdog_completed: dict[str, int]
    operations: tuple[Operation, ...]
    backends: frozenset[str] = frozenset()
    latest_ns: int | None = None  # latest time in the file: the dump was written no earlier
    has_unrecorded: bool = False  # sends or receives, of which gloo records the number only

    def group_of(self, operation: Operation) -> Group:
        """Return the group, with its ranks where the dump has them under this name.

        gloo's dumps list their only group under an empty name.
        """
        group = self.groups.get(operation.group)
        if group is None and list(self.groups) == [""]:
            group = self.groups[""]
        return Group(
            name=operation.group,
            description=operation.description or (group.description if group else ""),
            ranks=group.ranks if group else None,
        )

    @property
    def num_lost(self) -> int:
        """Number of operations before the first that is still in the ring buffer."""
        return (self.operations[0].record_id or 0) if self.operations else 0


def parse_integer(value: object) -> int | None:
    """Return a whole number, or one written as text; None for anything else."""
    if isinstance(value, str) and len(value) < 20:
        try:
            return int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 2**63 else None


def num_bytes(shapes: Shapes | None) -> int | None:
    """Return the bytes of all tensors; None where a size or type is unknown."""
    if shapes is None:
        return None
    total = 0
    for elements, name in shapes:
        dtype = message_dtype(name)
        if dtype is None:
            return None
        total += elements * dtype[1]
    return total


def histogram_of(dumps: Sequence[Dump]) -> tuple[Histogram, dict[str, int]]:
    """Return messages of all dumps, and the number of operations left out by reason."""
    tallies: dict[MessageKind, Tally] = {}
    ranks: dict[MessageKind, set[int]] = {}
    uncounted: Counter[str] = Counter()
    for place, dump in enumerate(dumps):
        for operation in dump.operations:
            if operation.is_marker:
                continue
            kind = message_kind(operation, dump.group_of(operation))
            if isinstance(kind, str):
                uncounted[kind] += 1
                continue
            ranks.setdefault(kind, set()).add(place)
            tally = tallies.get(kind, Tally(calls=0, ranks=0))
            seconds = operation.duration_s
            tallies[kind] = Tally(
                calls=tally.calls + 1,
                ranks=len(ranks[kind]),
                timed_calls=tally.timed_calls + (seconds is not None),
                seconds=tally.seconds + (seconds or 0.0),
            )
    if bare := _bare_markers(dumps):
        uncounted["coalesced groups whose parts are not in the dump"] += bare
    return tallies, dict(uncounted)


def _bare_markers(dumps: Sequence[Dump]) -> int:
    """Return the number of groups without parts: before version 2.7 parts left no entry."""
    count = 0
    for dump in dumps:
        with_parts = {op.step for op in dump.operations if not op.is_marker}
        count += sum(op.is_marker and op.step not in with_parts for op in dump.operations)
    return count


def message_kind(operation: Operation, group: Group) -> MessageKind | str:
    """Return the kind of message of an operation, or why it has none."""
    name = torch_collective(operation.kind)
    if not name:
        return f"operations of kind {operation.kind or 'unknown'}"
    sent = num_bytes(operation.inputs)
    received = num_bytes(operation.outputs)
    ranks = len(group.ranks) if group.ranks else None
    if name == Collective.BARRIER:
        sent = received = 0
    if sent is None and received is None:
        return "operations without sizes or types"
    shapes = operation.inputs or operation.outputs or ()
    types = {pair[0] for _, word in shapes if (pair := message_dtype(word))}
    dtype = types.pop() if len(types) == 1 else ""
    sent = sent or 0
    received = received or 0
    is_uneven = ranks is not None and (sent != received or sent % ranks != 0)
    if name == Collective.ALL_TO_ALL and is_uneven:
        name = Collective.ALL_TO_ALL_V.value
    call_bytes, message_bytes = sized(name, sent, received, ranks)
    return MessageKind(
        collective=name,
        dtype=dtype,
        group=f"{group.name} {group.description}".strip(),
        num_ranks=ranks,
        phase=operation.phase,
        call_bytes=call_bytes,
        message_bytes=message_bytes,
    )


Step = tuple[Operation, ...]  # one collective, or all parts of a coalesced group


def describe(step: Step) -> str:
    """Return e.g. 'all_reduce of 1024 Float (4 KiB)'."""
    words = []
    for op in step[:3]:
        sizes = op.inputs or op.outputs or ()
        tensors = ", ".join(f"{elements} {word}" for elements, word in sizes[:3])
        total = num_bytes(op.inputs or op.outputs)
        size = f" ({format_bytes(total)})" if total else ""
        name = torch_collective(op.kind) or op.kind
        words.append(f"{name} of {tensors or 'no tensor'}{size}")
    return " + ".join(words) + (f" + {len(step) - 3} more" if len(step) > 3 else "")


def evidence_of(dump: Dump, op: Operation) -> Evidence:
    number = "" if op.sequence is None else f" {op.sequence}"
    where = f", {op.where}" if op.where else ""
    text = f"rank {dump.rank}:{number} {describe((op,))}, {op.state or 'no state'}{where}"
    return Evidence(file=dump.file, line=0, text=text)
