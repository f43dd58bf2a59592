"""The wait-for graph of a job: which rank waits in which call, and for whom.

Dumps, time-outs of a watchdog and reports fill it, each with what it knows: a rank's part of
a call may be issued, completed or unknown. A call waits for the members that have not issued
it, and for those that have, behind another call that is not completed. Following these edges
ends at a rank that waits for nobody, at one that is unknown, at a call that all have issued, or
in a cycle. If all ranks use the groups in one order, no cycle exists, and a rank that stops is
the only one that waits for nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stepmark.findings.finding import Evidence
from stepmark.ground.grouping import group_by

_MAX_BREAKERS = 64


class Part(NamedTuple):
    """What one rank has done of a call, as a source shows it.

    text: e.g. 'all_reduce of 1024 Float (4 KiB)'; "" unknown. state: the source's word.
    seconds: how long it waits, at least. is_over: longer than its time-out.
    """

    text: str
    state: str
    is_done: bool
    evidence: tuple[Evidence, ...]
    seconds: float = 0.0
    is_over: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One collective, or one transfer, with what each member has done of it.

    absent: ranks that have not issued it, with the line that shows it. unknown: ranks of which
    no source says it, with what is lacking (e.g. "without a dump"). is_open: the members are
    not listed, so that others may be missing. remark: what no source shows of it.
    """

    group: str  # its label
    name: str  # of the group, by which sources agree; "" unknown
    number: int | None  # of a collective; None for a transfer
    title: str
    parts: dict[int, Part]
    absent: dict[int, Evidence | None] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)
    is_open: bool = False
    remark: str = ""
    behind: dict[int, "Call"] = field(default_factory=dict)  # issued it, waits in another call

    @property
    def is_transfer(self) -> bool:
        return self.number is None

    @property
    def blockers(self) -> frozenset[int]:
        return frozenset(self.absent) | self.behind.keys()

    @property
    def waiting(self) -> list[int]:
        return sorted(rank for rank, part in self.parts.items() if not part.is_done)

    @property
    def done(self) -> list[int]:
        return sorted(self.parts.keys() - set(self.waiting))

    @property
    def is_over(self) -> bool:
        """Whether a rank has waited longer than the time-out."""
        return any(part.is_over for part in self.parts.values() if not part.is_done)

    @property
    def is_split(self) -> bool:
        """Whether it ended on some ranks, and others waited for it until their time-out."""
        return bool(self.done) and self.is_over

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that a source names in it."""
        return frozenset((*self.parts, *self.absent, *self.unknown))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """The calls that each blocked rank waits in, in the order in which it issued them.

    free: ranks whose progress is known and that wait in no call. last: the last operation of a
    rank. hides_transfers: sends and receives are not recorded (gloo); has_transfers: there were
    some. doubt: a sentence on sources that contradict each other.
    """

    fronts: dict[int, list[Call]]
    free: frozenset[int] = frozenset()
    last: Mapping[int, Evidence] = field(default_factory=dict)
    hides_transfers: bool = False
    has_transfers: bool = False
    doubt: str = ""

    @property
    def calls(self) -> list[Call]:
        return list(dict.fromkeys(call for calls in self.fronts.values() for call in calls))

    @property
    def idle(self) -> frozenset[int]:
        """Ranks that others wait for and that wait for nobody."""
        return frozenset(
            rank for call in self.calls for rank in call.absent if rank not in self.fronts
        )

    def cycle(self, collectives_only: bool) -> dict[int, list[Call]]:
        """Return the ranks on cycles, each with its calls that wait for another of them."""
        edges = {
            rank: [call for call in calls if not (collectives_only and call.is_transfer)]
            for rank, calls in self.fronts.items()
        }
        return _core(edges, frozenset())

    def breakers(self, cycle: Mapping[int, list[Call]]) -> frozenset[int]:
        """Return the ranks without which no cycle is left."""
        if len(cycle) > _MAX_BREAKERS:
            return frozenset(cycle)
        return frozenset(rank for rank in cycle if not _core(cycle, frozenset({rank})))


def _core(
    edges: Mapping[int, Sequence[Call]], removed: frozenset[int]
) -> dict[int, list[Call]]:
    """Remove ranks that wait for none of the others, or that none waits for, until all do."""
    core = {rank: list(calls) for rank, calls in edges.items() if rank not in removed}
    while True:
        kept = {
            rank: [call for call in calls if call.blockers & core.keys() - {rank}]
            for rank, calls in core.items()
        }
        awaited = {rank for calls in kept.values() for call in calls for rank in call.blockers}
        kept = {rank: calls for rank, calls in kept.items() if calls and rank in awaited}
        if len(kept) == len(core):
            return kept
        core = kept


def find_behind(fronts: Mapping[int, Sequence[Call]]) -> None:
    """Set in each call the ranks that have issued it behind another call they wait in."""
    for call in dict.fromkeys(call for calls in fronts.values() for call in calls):
        call.behind.clear()
        for rank in call.waiting:
            calls = fronts.get(rank, ())
            if calls and call not in calls and call.parts[rank].state != "started":
                call.behind[rank] = calls[-1]


def merged(first: WaitGraph, second: WaitGraph) -> WaitGraph:
    """Return what two sources show of one job. `first` has the better words for a call.

    Calls are one if group and number are: what either source knows of a rank is known.
    """
    same: dict[Call, Call] = {}
    named = [call for call in first.calls if call.name and not call.is_transfer]
    known = group_by(named, lambda call: (call.name, call.number))
    for call in second.calls:
        for other in known.get((call.name, call.number), ()):
            if not other.ranks & call.ranks:
                continue
            same[call] = same[other] = _merged_call(other, call)
    fronts: dict[int, list[Call]] = {}
    for graph in (first, second):
        for rank, calls in graph.fronts.items():
            own = [*fronts.get(rank, ()), *(same.get(call, call) for call in calls)]
            fronts[rank] = list(dict.fromkeys(own))
    find_behind(fronts)
    torn = sorted((first.free & second.fronts.keys()) | (second.free & first.fronts.keys()))
    free = (first.free | second.free) - fronts.keys()
    return replace(
        first,
        fronts=fronts,
        free=free,
        last={**second.last, **first.last},
        hides_transfers=first.hides_transfers or second.hides_transfers,
        has_transfers=first.has_transfers or second.has_transfers,
        doubt=_doubt(torn),
    )


def _doubt(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:8]))
    return (
        f"Time-outs and dumps contradict each other on rank {names}: one shows it waiting, the "
        "other does not. They are of different times, or of different jobs"
    )


def _merged_call(first: Call, second: Call) -> Call:
    parts = dict(second.parts)
    for rank, part in first.parts.items():
        other = parts.get(rank, part)
        parts[rank] = part._replace(
            text=part.text or other.text,
            evidence=tuple(dict.fromkeys((*other.evidence, *part.evidence))),
            is_done=part.is_done and other.is_done,
            seconds=max(part.seconds, other.seconds),
            is_over=part.is_over or other.is_over,
        )
    absent = {
        rank: line
        for rank, line in {**first.absent, **second.absent}.items()
        if rank not in parts
    }
    unknown = {
        rank: why
        for rank, why in {**second.unknown, **first.unknown}.items()
        if rank not in parts and rank not in absent
    }
    return replace(
        first,
        parts=parts,
        absent=absent,
        unknown=unknown,
        is_open=first.is_open and second.is_open,
        remark=first.remark or second.remark,
        behind={},
    )
