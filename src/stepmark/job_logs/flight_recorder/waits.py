"""What each rank of a job waits in, from its flight-recorder dumps.

A rank waits in its first collective that is not completed, and in transfers of pairs before it.
"""

from collections.abc import Iterator, Mapping, Sequence

from stepmark.findings.disagreement import Disagreement
from stepmark.findings.wait_graph import Call, Part, WaitGraph, find_behind
from stepmark.job_logs.flight_recorder.groups import GroupDumps, is_done
from stepmark.job_logs.flight_recorder.mismatch import disagreements, transfers_of
from stepmark.job_logs.flight_recorder.operations import (
    Dump,
    Operation,
    Step,
    describe,
    evidence_of,
)
from stepmark.model.collectives import Collective, torch_collective

# A rank completes one of these only after every member has entered it.
_SYNCHRONIZING = {
    *(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    Collective.BARRIER,
}
_ROOTED = (Collective.BROADCAST, Collective.REDUCE)


def shown_by(groups: Sequence[GroupDumps]) -> tuple[WaitGraph, list[Disagreement]]:
    """Return what the dumps show: who waits for whom, and calls that differ."""
    found: list[Disagreement] = []
    differing: dict[GroupDumps, int] = {}
    for shared in groups:
        own, first = disagreements(shared)
        found += own
        if first is not None:
            differing[shared] = first
    return _wait_graph(groups, differing), found


def _wait_graph(groups: Sequence[GroupDumps], differing: Mapping[GroupDumps, int]) -> WaitGraph:
    """Build the graph. `differing`: the first number from which a group's calls disagree."""
    dumps = {rank: dump for shared in groups for rank, dump in shared.dumps.items()}
    entered = {shared: _entered(shared, differing.get(shared)) for shared in groups}
    # Ranks whose dump is older than a call that they have entered since.
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
    find_behind(fronts)
    return WaitGraph(
        fronts=fronts,
        free=frozenset(dumps.keys() - fronts.keys() - stale),
        last={
            rank: evidence_of(dump, dump.operations[-1])
            for rank, dump in dumps.items()
            if dump.operations
        },
        hides_transfers=any("gloo" in dump.backends for dump in dumps.values()),
        has_transfers=any(dump.has_unrecorded for dump in dumps.values()),
    )


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
        self._entered = entered
        self._stale = stale
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
            absent = set[int]()
            unknown = set[int]()
            for rank in shared.members - steps.keys():
                last = shared.enqueued.get(rank)
                if number <= self._entered[shared] or (last is not None and last >= number):
                    continue
                is_known = last is not None and rank not in self._stale
                (absent if is_known else unknown).add(rank)
            title = f"collective {number} of {shared.label}"
            self._calls[key] = _call(shared, title, number, steps, absent, unknown)
        return self._calls[key]

    def _transfer(self, shared: GroupDumps, rank: int, op: Operation) -> Call:
        place = self._keys.get(id(op))
        if place is None:  # peers unknown, or a buffer that lost its beginning
            ranks = shared.group.ranks or ()
            peers = {ranks[place] for place in op.peers or () if place < len(ranks)} - {rank}
            others = set(peers or shared.members - {rank})
            title = f"a {op.kind} of {shared.label}"
            return _call(shared, title, None, {rank: (op,)}, set(), others)
        _, pair, index = place
        key = (*place,)
        if key not in self._calls:
            steps: dict[int, Step] = {}
            absent = set[int]()
            unknown = set[int]()
            for end, ops in zip(pair, self._transfers[shared][pair], strict=True):
                if ops is None or (end in self._stale and index >= len(ops)):
                    unknown.add(end)
                elif index < len(ops):
                    steps[end] = (ops[index],)
                else:
                    absent.add(end)
            ends = f"from rank {pair[0]} to rank {pair[1]}"
            title = f"transfer {index + 1} {ends} of {shared.label}"
            self._calls[key] = _call(shared, title, None, steps, absent, unknown)
        return self._calls[key]


def _call(
    shared: GroupDumps,
    title: str,
    number: int | None,
    steps: Mapping[int, Step],
    absent: set[int],
    unknown: set[int],
) -> Call:
    return Call(
        group=shared.label,
        name=shared.group.name,
        number=number,
        title=title,
        parts={rank: _part(shared.dumps[rank], step) for rank, step in steps.items()},
        absent=dict.fromkeys(sorted(absent)),
        unknown={r: "" if r in shared.dumps else "without a dump" for r in sorted(unknown)},
        is_open=shared.group.ranks is None,
        remark=_rooted(shared, number),
    )


def _part(dump: Dump, step: Step) -> Part:
    """Return a rank's part; it waits from its issue to the latest time in the dump."""
    waiting = [op for op in step if not op.is_done]
    first = waiting[0] if waiting else step[0]
    ages = [
        ((dump.latest_ns - op.created_ns) / 1e9, op.timeout_s)
        for op in waiting
        if op.created_ns and dump.latest_ns
    ]
    return Part(
        text=describe(step),
        state="started" if any(op.state == "started" for op in step) else first.state,
        is_done=not waiting,
        evidence=(evidence_of(dump, step[0]),),
        seconds=max((age for age, _ in ages), default=0.0),
        is_over=any(limit is not None and age >= limit for age, limit in ages),
    )


def _rooted(shared: GroupDumps, number: int | None) -> str:
    """Name the call or the one before if ranks may have different roots in it."""
    for place in (number - 1, number) if number else ():
        for step in shared.at(place).values():
            name = torch_collective(step[0].kind)
            if name in _ROOTED:
                return f"Collective {place} is a {name}, whose root is not recorded"
    return ""
