"""What each rank of a job waits in, from its flight-recorder dumps.

A rank waits in its first collective that is not completed, and in transfers of pairs before it.
Calls that must agree between ranks and do not are found first.
"""

from collections.abc import Iterator, Mapping, Sequence

from stepmark.cases.message import RECV, SEND
from stepmark.findings.disagreement import (
    MAX_SIDES,
    Disagreement,
    Sides,
    sides_text,
    suspects_of,
)
from stepmark.findings.wait_graph import Call, Part, WaitGraph, find_behind
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder.groups import GroupDumps, is_done
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
    waits = {r: list(builder.front(r, dump)) for r, dump in dumps.items() if r not in stale}
    fronts = {rank: calls for rank, calls in waits.items() if calls}
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
        if place not in self._calls:
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
            self._calls[place] = _call(shared, title, None, steps, absent, unknown)
        return self._calls[place]


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


_EXCHANGES = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V)
DUMPS = "dumps"


def disagreements(shared: GroupDumps) -> tuple[list[Disagreement], int | None]:
    """Return those of one group, and the first number at which its collectives differ."""
    transfers = list(_transfers(shared))
    differing: list[int] = []
    if len(shared.steps) > 1:
        differing = [n for n in shared.numbers() if _differs(shared.at(n), shared)]
    found = [_collectives(shared, differing)] if differing else []
    first = 0 if transfers else differing[0] if differing else None
    return [*found, *transfers], first


def _collectives(shared: GroupDumps, differing: list[int]) -> Disagreement:
    """Return the first number at which ranks issue different collectives."""
    first = differing[0]
    last = differing[-1]
    by_rank = shared.at(first)
    sides, reason = _differs(by_rank, shared) or ([], "")
    calls = sides_text((ranks, describe(by_rank[ranks[0]])) for ranks in sides)
    span = f"collective {first} of {shared.label} ("
    if first < last:
        span = f"{len(differing)} collectives from {first} to {last} of {shared.label} (first "
    evidence = (
        evidence_of(shared.dumps[ranks[0]], by_rank[ranks[0]][0]) for ranks in sides[:MAX_SIDES]
    )
    return Disagreement(
        source=DUMPS,
        group=shared.label,
        suspects=suspects_of(sides),
        text=f"{span}{calls}{reason})",
        evidence=tuple(evidence),
    )


def _differs(by_rank: dict[int, Step], shared: GroupDumps) -> tuple[Sides, str] | None:
    """Return the sides, and why they disagree if their calls look alike; None if they agree."""
    by_call: dict[tuple[object, ...], list[int]] = {}
    for rank, step in by_rank.items():
        if all(None not in (op.inputs, op.outputs) for op in step):
            # What must agree on all ranks, without what may differ by rank.
            signature = tuple(_agreed(op) for op in step if not op.is_marker)
            by_call.setdefault(signature, []).append(rank)
    if len(by_call) > 1:
        return sorted(map(tuple, by_call.values()), key=len), ""
    parts = {rank: step[0] for rank, step in by_rank.items() if len(step) == 1}
    kinds = {torch_collective(op.kind) for op in parts.values()}
    if not by_call or len(parts) < len(by_rank) or len(kinds) > 1:
        return None
    name = kinds.pop()
    if name in (Collective.GATHER, Collective.SCATTER):
        return _roots(parts, name)
    return _exchange(parts, shared) if name in _EXCHANGES else None


def _roots(parts: dict[int, Operation], name: str) -> tuple[Sides, str] | None:
    """Compare the roots of a gather or scatter: only the root has the tensors of all ranks."""
    is_gather = name == Collective.GATHER
    roots = [
        rank
        for rank, op in parts.items()
        if sum(elements for elements, _ in (op.outputs if is_gather else op.inputs) or ())
    ]
    if len(roots) < 2:
        return None
    return [(rank,) for rank in roots], f"; {ranks_text(roots)} are each the root"


def _exchange(parts: dict[int, Operation], shared: GroupDumps) -> tuple[Sides, str] | None:
    """Compare what is sent and received in an all-to-all, where all members have a dump."""
    ranks = shared.group.ranks
    if ranks is None or set(ranks) != set(parts):
        return None
    sent = {rank: op.inputs or () for rank, op in parts.items()}
    received = {rank: op.outputs or () for rank, op in parts.items()}
    if all(len(sent[rank]) == len(received[rank]) == len(ranks) > 1 for rank in ranks):
        for i, source in enumerate(ranks):
            for j, target in enumerate(ranks):
                left = sent[source][j][0]
                right = received[target][i][0]
                if left != right:
                    sizes = f"sends {left} elements to rank {target}, which expects {right}"
                    return [(source,), (target,)], f"; rank {source} {sizes}"
        return None
    totals = [sum(n for shapes in s.values() for n, _ in shapes) for s in (sent, received)]
    if totals[0] == totals[1]:
        return None
    sizes = f"; the ranks send {totals[0]} elements in all and receive {totals[1]}"
    return [(rank,) for rank in ranks], sizes


def _agreed(op: Operation) -> tuple[object, ...]:
    name = torch_collective(op.kind) or op.kind
    inputs = op.inputs or None
    outputs = op.outputs or None
    if name in _EXCHANGES:
        return Collective.ALL_TO_ALL, tuple(sorted({w for _, w in (inputs or outputs or ())}))
    if name in (Collective.GATHER, Collective.REDUCE):
        return name, inputs
    if name in (Collective.SCATTER, Collective.BROADCAST):
        return name, outputs
    if op.kind.endswith("_v"):  # each rank's part has its own size
        return name, _total(outputs if name == Collective.ALL_GATHER else inputs)
    if op.kind.endswith("_coalesced"):
        return name, inputs, outputs
    # NCCL sees elements, not shapes: [2, 3] and [3, 2] are the same message to it.
    return name, _total(inputs), _total(outputs)


def _total(shapes: object) -> object:
    if not isinstance(shapes, tuple):
        return None
    words = {word for _, word in shapes}
    return sum(elements for elements, _ in shapes), tuple(sorted(words))


def _transfers(shared: GroupDumps) -> Iterator[Disagreement]:
    """Compare the n-th send of a pair with the n-th receive, where both dumps are complete."""
    for (source, target), (sends, receives) in transfers_of(shared).items():
        for index, (sent, received) in enumerate(
            zip(sends or (), receives or (), strict=False), start=1
        ):
            left = _total(sent.inputs)
            right = _total(received.outputs)
            if None in (left, right) or left == right:
                continue
            ends = f"transfer {index} from rank {source} to rank {target} of {shared.label}"
            sizes = f"sent as {_size(sent.inputs)}, received as {_size(received.outputs)}"
            yield Disagreement(
                source=DUMPS,
                group=shared.label,
                suspects=frozenset((source, target)),
                text=f"{ends} ({sizes})",
                evidence=(
                    evidence_of(shared.dumps[source], sent),
                    evidence_of(shared.dumps[target], received),
                ),
            )
            break


Transfers = dict[tuple[int, int], tuple[list[Operation] | None, list[Operation] | None]]


def transfers_of(shared: GroupDumps) -> Transfers:
    """Return sends and receives by (source, target), as ranks of the world.

    None for the side of a rank whose operations are unknown: it has no dump, or the buffer
    lost its beginning, so that the first one left may belong to any transfer.
    """
    ranks = shared.group.ranks
    by_pair: dict[tuple[int, int], dict[str, list[Operation]]] = {}
    for rank, dump in shared.dumps.items():
        for op in dump.operations:
            if op.group != shared.group.name or op.kind not in (SEND, RECV) or not op.peers:
                continue
            if ranks is None or max(op.peers) >= len(ranks):
                continue
            pair = (ranks[op.peers[0]], ranks[op.peers[1]])
            if rank == pair[op.kind == RECV]:
                by_pair.setdefault(pair, {}).setdefault(op.kind, []).append(op)
    return {
        pair: (
            _known(shared, pair[0], by_kind.get(SEND, [])),
            _known(shared, pair[1], by_kind.get(RECV, [])),
        )
        for pair, by_kind in by_pair.items()
    }


def _known(shared: GroupDumps, rank: int, ops: list[Operation]) -> list[Operation] | None:
    dump = shared.dumps.get(rank)
    return None if dump is None or dump.num_lost else ops


def _size(shapes: object) -> str:
    pairs = shapes[:3] if isinstance(shapes, tuple) else ()
    return ", ".join(f"{elements} {word}" for elements, word in pairs)
