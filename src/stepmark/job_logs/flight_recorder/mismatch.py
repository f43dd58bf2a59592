"""Calls of dumps that must agree between ranks and do not: which, and from which number on."""

from collections.abc import Iterator

from stepmark.cases.message import RECV, SEND
from stepmark.findings.disagreement import (
    MAX_SIDES,
    Disagreement,
    Sides,
    sides_text,
    suspects_of,
)
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder.groups import GroupDumps
from stepmark.job_logs.flight_recorder.operations import (
    Operation,
    Step,
    describe,
    evidence_of,
)
from stepmark.model.collectives import Collective, torch_collective

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
