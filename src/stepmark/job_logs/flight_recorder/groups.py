"""The groups of a job, each with its collectives by rank and number, from all dumps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from stepmark.job_logs.flight_recorder.operations import Dump, Group, Step

_DEFAULT = "default_pg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a rank in a group, as numbers of collectives; None where unknown."""

    rank: int | None
    group: str
    operations: int
    first: int | None  # in the buffer
    last_enqueued: int | None
    last_completed: int | None  # by the states of the entries
    watchdog_completed: int | None  # as the watchdog last recorded, which is earlier
    lost: int  # operations of the rank's ring buffer, over all groups
    file: str


@dataclass(frozen=True, slots=True, eq=False)
class GroupDumps:
    """A group and, by rank, its collectives by number."""

    group: Group
    steps: dict[int, dict[int, Step]] = field(default_factory=dict)
    enqueued: dict[int, int | None] = field(default_factory=dict)  # None where unknown
    dumps: dict[int, Dump] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"group {self.group.name} {self.group.description}".strip()

    @property
    def members(self) -> frozenset[int]:
        """Ranks that belong to the group; where the dumps do not list them, those known to."""
        if self.group.ranks is not None:
            return frozenset(self.group.ranks)
        is_default = self.group.description == _DEFAULT
        return frozenset(range(max(self.dumps) + 1) if is_default else self.dumps)

    def numbers(self) -> list[int]:
        return sorted({number for steps in self.steps.values() for number in steps})

    def at(self, number: int) -> dict[int, Step]:
        """Return what each rank issued under a number."""
        return {rank: steps[number] for rank, steps in self.steps.items() if number in steps}


def progress(dumps: Sequence[Dump]) -> list[Progress]:
    """Return one line per rank and group that has entries."""
    lines = []
    for dump in dumps:
        for name in dict.fromkeys(op.group for op in dump.operations):
            operations = [op for op in dump.operations if op.group == name]
            steps = steps_of(dump, name)
            done = [number for number, step in steps.items() if is_done(step)]
            lines.append(
                Progress(
                    rank=dump.rank,
                    group=f"{name} {dump.group_of(operations[0]).description}".strip(),
                    operations=len(operations),
                    first=min(steps, default=None),
                    last_enqueued=max(steps, default=None),
                    last_completed=max(done, default=None),
                    watchdog_completed=dump.watchdog_completed.get(name),
                    lost=dump.num_lost,
                    file=dump.file,
                )
            )
    return lines


def groups_of(dumps: Iterable[Dump]) -> list[GroupDumps]:
    """Return groups by name and ranks: split_group gives disjoint groups one name."""
    by_rank = {dump.rank: dump for dump in dumps if dump.rank is not None}
    listed = [(rank, group) for rank, dump in by_rank.items() for group in _groups(dump)]
    ranks_by_name: dict[str, set[tuple[int, ...]]] = {}
    for _, group in listed:
        if group.ranks is not None:
            ranks_by_name.setdefault(group.name, set()).add(group.ranks)
    by_key: dict[tuple[str, tuple[int, ...] | None], GroupDumps] = {}
    for rank, listing in listed:
        group = listing
        if group.ranks is None:  # torch lists a group once it has made its communicator
            matches = [ranks for ranks in ranks_by_name.get(group.name, ()) if rank in ranks]
            group = replace(group, ranks=matches[0] if len(matches) == 1 else None)
        shared = by_key.setdefault((group.name, group.ranks), GroupDumps(group))
        if rank in (group.ranks or (rank,)):
            _add(shared, by_rank[rank])
    for shared in by_key.values():
        is_default = shared.group.ranks is None and shared.group.description == _DEFAULT
        for rank in by_rank if is_default else shared.members:
            if rank in by_rank and rank not in shared.dumps:
                _add(shared, by_rank[rank])
    return [shared for shared in by_key.values() if shared.dumps]


def _groups(dump: Dump) -> Iterator[Group]:
    """Return the groups of a rank: those it used, then those it only lists."""
    used = {op.group: op for op in dump.operations}
    yield from (dump.group_of(op) for op in used.values())
    yield from (group for name, group in dump.groups.items() if name and name not in used)


def _add(shared: GroupDumps, dump: Dump) -> None:
    assert dump.rank is not None
    steps = steps_of(dump, shared.group.name)
    shared.steps[dump.rank] = steps
    shared.enqueued[dump.rank] = max(steps, default=None if dump.num_lost else 0)
    shared.dumps[dump.rank] = dump


def steps_of(dump: Dump, group: str) -> dict[int, Step]:
    """Return the collectives of a group by number, without transfers of pairs."""
    steps: dict[int, Step] = {}
    for op in dump.operations:
        if op.group == group and op.sequence is not None and not op.is_p2p:
            steps[op.sequence] = (*steps.get(op.sequence, ()), op)
    return steps


def is_done(step: Step) -> bool:
    return all(op.is_done for op in step)
