"""The wait-for graph of a job: which rank waits in which call, and for whom.

A rank waits in its first call that is not completed, and in transfers of pairs before it. Such
a call waits for the members that have not issued it, and for those that have, behind another
call that is not completed. Following these edges ends at a rank that waits for nobody, at one
without a dump, at a call that all have issued, or in a cycle. If all ranks use the groups in
one order, no cycle exists, and a rank that stops is the only one that waits for nobody.

Over 250 lines: the graph and what builds it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepmark.job_logs.flight_recorder.groups import GroupDumps, is_done
from stepmark.job_logs.flight_recorder.mismatch import transfers_of
from stepmark.job_logs.flight_recorder.operations import (
    Dump,
    Operation,
    Step,
    describe,
)
from stepmark.model.collectives import Collective, torch_collective

# A rank completes one of these only after every member has entered it.
_SYNCHRONIZING = {
    *(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    Collective.BARRIER,
}


@dataclass(slots=True, eq=False)
class Call:
    """One collective, or one transfer, with what each member has done of it."""

    shared: GroupDumps
    title: str
    number: int | None  # of a collective; None for a transfer
    steps: dict[int, Step]  # by rank that issued it and still has the entry
    absent: frozenset[int]  # has not issued it
    unknown: frozenset[int]  # no dump, one that is too old, or a buffer that lost its beginning
    behind: dict[int, "Call"] = field(default_factory=dict)  # issued it, waits in another call

    @property
    def is_transfer(self) -> bool:
        return self.number is None

    @property
    def blockers(self) -> frozenset[int]:
        return self.absent | self.behind.keys()

    @property
    def waiting(self) -> list[int]:
        return sorted(rank for rank, step in self.steps.items() if not is_done(step))

    @property
    def done(self) -> list[int]:
        return sorted(self.steps.keys() - set(self.waiting))

    @property
    def is_open(self) -> bool:
        """Whether the dumps do not list the members, so that others may be missing."""
        return self.shared.group.ranks is None


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The calls that each blocked rank waits in, in the order in which it issued them."""

    fronts: dict[int, list[Call]]
    stale: frozenset[int]  # ranks whose dump is older than a call that they have entered since
    dumps: dict[int, Dump]

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
        if len(cycle) > 64:
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


def wait_graph(groups: Sequence[GroupDumps], differing: Mapping[GroupDumps, int]) -> WaitGraph:
    """Build the graph. `differing`: the first number from which a group's calls disagree."""
    dumps = {rank: dump for shared in groups for rank, dump in shared.dumps.items()}
    entered = {shared: _entered(shared, differing.get(shared)) for shared in groups}
    stale = frozenset(
        rank
        for shared, number in entered.items()
        for rank, last in shared.enqueued.items()
        if last is not None and last < number
    )
    builder = _Builder(groups, entered, stale)
    fronts = {}
    for rank, dump in dumps.items():
        if rank not in stale and (calls := list(builder.front(rank, dump))):
            fronts[rank] = calls
    graph = WaitGraph(fronts=fronts, stale=stale, dumps=dumps)
    for call in graph.calls:
        for rank in call.waiting:
            first = next(iter(fronts.get(rank, ())), None)
            has_started = any(op.state == "started" for op in call.steps[rank])
            if first and call not in fronts[rank] and not has_started:
                call.behind[rank] = fronts[rank][-1]
    return graph


def _entered(shared: GroupDumps, differing: int | None) -> int:
    """Return the last number that every member has entered, because one has completed it."""
    return max(
        (
            number
            for steps in shared.steps.values()
            for number, step in steps.items()
            if is_done(step)
            and (differing is None or number < differing)
            and all(op.is_marker or torch_collective(op.kind) in _SYNCHRONIZING for op in step)
        ),
        default=0,
    )


class _Builder:
    """Make each call once, whichever rank leads to it."""

    def __init__(
        self,
        groups: Sequence[GroupDumps],
        entered: Mapping[GroupDumps, int],
        stale: frozenset[int],
    ) -> None:
        self._entered, self._stale = entered, stale
        self._calls: dict[tuple[object, ...], Call] = {}
        self._by_rank: dict[tuple[int, str], GroupDumps] = {
            (rank, shared.group.name): shared for shared in groups for rank in shared.dumps
        }
        self._transfers = {shared: transfers_of(shared) for shared in groups}
        self._keys = {
            id(op): (shared, pair, index)
            for shared, by_pair in self._transfers.items()
            for pair, sides in by_pair.items()
            for ops in sides
            for index, op in enumerate(ops or ())
        }

    def front(self, rank: int, dump: Dump) -> Iterator[Call]:
        """Yield the calls that a rank waits in, in the order in which it issued them."""
        channels: set[object] = {
            op.step for op in dump.operations if op.is_p2p and not op.is_marker
        }
        for op in dump.operations:
            shared = self._by_rank.get((rank, op.group))
            if op.is_done or shared is None:
                continue
            if not op.is_p2p:
                if op.sequence is not None:
                    yield self._collective(shared, op.sequence)
                    return
                continue
            # Before version 2.7 the parts of a coalesced group left no entry.
            channel = op.step if op.is_marker else (op.group, op.kind, op.peers)
            if channel not in channels:
                channels.add(channel)
                yield self._transfer(shared, rank, op)

    def _collective(self, shared: GroupDumps, number: int) -> Call:
        key = (shared, number)
        if key not in self._calls:
            steps = shared.at(number)
            absent, unknown = set[int](), set[int]()
            for rank in shared.members - steps.keys():
                last = shared.enqueued.get(rank)
                if number <= self._entered[shared] or (last is not None and last >= number):
                    continue
                is_known = last is not None and rank not in self._stale
                (absent if is_known else unknown).add(rank)
            title = f"collective {number} of {shared.label}"
            call = Call(shared, title, number, steps, frozenset(absent), frozenset(unknown))
            self._calls[key] = call
        return self._calls[key]

    def _transfer(self, shared: GroupDumps, rank: int, op: Operation) -> Call:
        place = self._keys.get(id(op))
        if place is None:  # peers unknown, or a buffer that lost its beginning
            ranks = shared.group.ranks or ()
            peers = {ranks[place] for place in op.peers or () if place < len(ranks)} - {rank}
            others = frozenset(peers or shared.members - {rank})
            title = f"a {op.kind} of {shared.label}"
            return Call(shared, title, None, {rank: (op,)}, frozenset(), others)
        _, pair, index = place
        key = (*place,)
        if key not in self._calls:
            steps: dict[int, Step] = {}
            absent, unknown = set[int](), set[int]()
            for end, ops in zip(pair, self._transfers[shared][pair], strict=True):
                if ops is None or (end in self._stale and index >= len(ops)):
                    unknown.add(end)
                elif index < len(ops):
                    steps[end] = (ops[index],)
                else:
                    absent.add(end)
            title = (
                f"transfer {index + 1} from rank {pair[0]} to rank {pair[1]} of {shared.label}"
            )
            self._calls[key] = Call(
                shared, title, None, steps, frozenset(absent), frozenset(unknown)
            )
        return self._calls[key]


def call_text(call: Call) -> str:
    """Return e.g. 'collective 3 of group 0 default_pg (all_reduce of 1024 Float (4 KiB))'."""
    calls = dict.fromkeys(describe(call.steps[rank]) for rank in call.waiting)
    return f"{call.title} ({' or '.join(list(calls)[:3])})"


def age_s(graph: WaitGraph, ranks: Iterable[int]) -> tuple[float, bool]:
    """Return how long the calls have waited at least, and whether one exceeded its time-out."""
    longest, is_over = 0.0, False
    for rank in ranks:
        dump = graph.dumps[rank]
        for call in graph.fronts.get(rank, ()):
            for op in call.steps[rank]:
                if op.created_ns and dump.latest_ns and not op.is_done:
                    age = (dump.latest_ns - op.created_ns) / 1e9
                    longest = max(longest, age)
                    is_over |= op.timeout_s is not None and age >= op.timeout_s
    return longest, is_over
