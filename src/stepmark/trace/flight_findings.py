"""What the dumps of several ranks prove together: mismatches, hangs, what is missing.

A state is found out by a watchdog or by a look at the time of the dump, never at once, and
the dumps of two ranks are not written at one moment. Each text says what that leaves open.

Over 250 lines: one function per finding.
"""

from collections import Counter
from collections.abc import Sequence

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.message import RECV, SEND
from stepmark.trace.flight_groups import (
    Shared,
    Step,
    described,
    evidence_of,
    is_done,
    progress,
    ranks_text,
    shared_groups,
    signature,
    total,
)
from stepmark.trace.flight_operation import Dump, Operation

_CAVEAT = (
    "a dump of a running job can look alike: it is a hang if a later dump shows the same number"
)


def findings(dumps: Sequence[Dump]) -> list[Finding]:
    """Problems first, in the order of groups. Needs ranks; one dump alone gives little."""
    known = [dump for dump in dumps if dump.rank is not None]
    groups = shared_groups(known)
    found: list[Finding] = []
    for shared in groups:
        found += _mismatch(shared)
        found += _pairs(shared)
        found += _hang(shared)
    found += _missing(groups)
    found += _lost(dumps)
    found += _watchdog(dumps)
    found += _versions(dumps)
    order = [Severity.PROBLEM, Severity.WARNING, Severity.NOTE]
    return sorted(found, key=lambda one: order.index(one.severity))


def _mismatch(shared: Shared) -> list[Finding]:
    """The first number at which ranks call different things; later pairs mean nothing."""
    numbers = sorted({number for steps in shared.steps.values() for number in steps})
    for number in numbers:
        by_call: dict[tuple[object, ...], list[int]] = {}
        for rank, steps in shared.steps.items():
            if number in steps:
                by_call.setdefault(signature(steps[number]), []).append(rank)
        if len(by_call) < 2:
            continue
        calls = sorted(by_call.values(), key=len)
        said = "; ".join(
            f"{ranks_text(ranks)}: {described(shared.steps[ranks[0]][number])}"
            for ranks in calls[:4]
        )
        text = (
            f"{shared.label}: ranks disagree on collective {number}, {said}. The first such "
            "number; which side is wrong, the dumps do not say."
        )
        shown = [_evidence(shared, ranks[0], number) for ranks in calls[:4]]
        return [_problem("fr-mismatch", text, shown)]
    return []


def _hang(shared: Shared) -> list[Finding]:
    """The first collective that some rank waits for."""
    numbers = sorted({number for steps in shared.steps.values() for number in steps})
    for number in numbers:
        held = {rank: steps[number] for rank, steps in shared.steps.items() if number in steps}
        waiting = [rank for rank, step in held.items() if not is_done(step)]
        if not waiting:
            continue
        absent = [
            rank
            for rank, last in shared.enqueued.items()
            if last is not None and last < number and rank not in held
        ]
        done = [rank for rank in held if rank not in waiting]
        what = described(held[waiting[0]])
        head = f"{shared.label}: collective {number}, {what}, is not completed on"
        text = f"{head} {ranks_text(waiting)} ({_states(held, waiting)})"
        if absent:
            text += f" and was not enqueued by {ranks_text(absent)}, which it waits for"
        elif done:
            text += f", and is on {ranks_text(done)}"
        else:
            text += "; every rank with a dump has enqueued it"
        gone = set(shared.group.ranks or ()) - shared.steps.keys()
        if gone and not absent:
            text += f"; {ranks_text(gone)}, without a dump, may not have"
        shown = [_evidence(shared, rank, number) for rank in waiting[:3]]
        shown += [_last(shared, rank) for rank in absent[:3]]
        text = f"{text}. {_CAVEAT.capitalize()}."
        if done and not absent:
            # All have arrived and some are through: the others' states may just be late.
            return [_found(Severity.WARNING, "fr-not-completed", text, shown)]
        rule = "fr-hang" if absent else "fr-not-completed"
        return [_problem(rule, text, shown)]
    return []


def _states(held: dict[int, Step], waiting: Sequence[int]) -> str:
    """Without TORCH_NCCL_ENABLE_TIMING nothing records a start."""
    states = Counter(
        next(one.state for one in held[rank] if not one.is_done) or "no state"
        for rank in waiting
    )
    shown = ", ".join(states)
    return f"{shown}: it may have started unseen" if set(states) == {"scheduled"} else shown


def _pairs(shared: Shared) -> list[Finding]:
    """The n-th send of a pair belongs to the n-th receive; both ends must be whole dumps."""
    ranks = shared.group.ranks
    if ranks is None:
        return []
    sides: dict[tuple[int, int], dict[str, list[Operation]]] = {}
    for dump in shared.dumps.values():
        for one in dump.operations:
            if one.group == shared.group.name and one.kind in (SEND, RECV) and one.peers:
                sides.setdefault(one.peers, {}).setdefault(one.kind, []).append(one)
    found = []
    for pair, held in sides.items():
        if max(pair) >= len(ranks):
            continue
        source, destination = (shared.dumps.get(ranks[place]) for place in pair)
        if not source or not destination or source.num_lost or destination.num_lost:
            continue
        sends, receives = held.get(SEND, []), held.get(RECV, [])
        found += _pair(shared, (source, destination), sends, receives)
    return found


def _pair(
    shared: Shared,
    ends: tuple[Dump, Dump],
    sends: Sequence[Operation],
    receives: Sequence[Operation],
) -> list[Finding]:
    source, destination = ends
    way = f"{shared.label}: rank {source.rank} to rank {destination.rank}"
    for index, (sent, received) in enumerate(zip(sends, receives, strict=False), start=1):
        left, right = total(sent.inputs), total(received.outputs)
        if left is not None and right is not None and left != right:
            said = f"sent as {_side(sent)}, received as {_side(received)}"
            text = f"{way}: transfer {index} is {said}"
            shown = [evidence_of(source, sent), evidence_of(destination, received)]
            return [_problem("fr-mismatch", text, shown)]
    extra = sends[len(receives) :] or receives[len(sends) :]
    waiting = [one for one in extra if not one.is_done]
    if not waiting:
        return []
    is_send = len(sends) > len(receives)
    dump, other = (source, destination) if is_send else (destination, source)
    text = (
        f"{way}: {len(sends)} sends, {len(receives)} receives; rank {dump.rank} waits for "
        f"rank {other.rank}. {_CAVEAT.capitalize()}."
    )
    return [_problem("fr-hang", text, [evidence_of(dump, waiting[0])])]


def _side(one: Operation) -> str:
    shapes = one.inputs if one.kind == SEND else one.outputs
    return ", ".join(f"{elements} {word}" for elements, word in (shapes or ())[:3])


def _missing(groups: Sequence[Shared]) -> list[Finding]:
    """Ranks of the groups that no dump was given of."""
    present = {rank for shared in groups for rank in shared.dumps}
    wanted = {rank for shared in groups for rank in shared.group.ranks or ()}
    gone = wanted - present
    if not gone:
        return []
    many = f"{len(gone)} of {len(wanted)}"
    text = f"no dump of {ranks_text(gone)}, {many}: unknown how far they were"
    return [_found(Severity.NOTE, "fr-missing-dump", text, (), len(gone))]


def _lost(dumps: Sequence[Dump]) -> list[Finding]:
    short = [dump for dump in dumps if dump.num_lost]
    if not short:
        return []
    most = max(dump.num_lost for dump in short)
    text = (
        f"the ring buffer of {len(short)} of {len(dumps)} dumps lost its beginning, up to "
        f"{most} operations: counts are not of the whole job (TORCH_FR_BUFFER_SIZE)"
    )
    shown = tuple(
        Evidence(file=dump.file, line=0, text=f"first record_id {dump.num_lost}")
        for dump in short[:3]
    )
    return [_found(Severity.WARNING, "fr-wrapped", text, shown, len(short))]


def _watchdog(dumps: Sequence[Dump]) -> list[Finding]:
    """pg_status counts what the watchdog has seen, which people take for the truth."""
    behind = [
        one
        for one in progress(dumps)
        if one.watchdog_completed is not None
        and one.completed is not None
        and one.watchdog_completed < one.completed
    ]
    if not behind:
        return []
    text = (
        "pg_status lags: its last completed collective is behind the states of the entries, "
        "which were looked up for the dump; stepmark goes by the states"
    )
    shown = tuple(
        Evidence(
            file=one.file,
            line=0,
            text=f"last_completed_collective {one.watchdog_completed}, state completed up to "
            f"{one.completed}",
        )
        for one in behind[:3]
    )
    return [_found(Severity.NOTE, "fr-status-lags", text, shown, len(behind))]


def _versions(dumps: Sequence[Dump]) -> list[Finding]:
    by_version: dict[str, list[Dump]] = {}
    for dump in dumps:
        if dump.nccl:
            by_version.setdefault(dump.nccl, []).append(dump)
    if len(by_version) < 2:
        return []
    text = f"ranks run different NCCL versions: {', '.join(sorted(by_version))}"
    shown = tuple(
        Evidence(file=held[0].file, line=0, text=f"comm_lib_version {version}")
        for version, held in by_version.items()
    )
    return [_found(Severity.WARNING, "fr-versions", text, shown[:4])]


def _problem(rule: str, text: str, evidence: Sequence[Evidence]) -> Finding:
    return _found(Severity.PROBLEM, rule, text, evidence)


def _found(
    severity: Severity, rule: str, text: str, evidence: Sequence[Evidence], count: int = 1
) -> Finding:
    return Finding(
        rule=rule, severity=severity, text=text, evidence=tuple(evidence), count=count
    )


def _evidence(shared: Shared, rank: int, number: int) -> Evidence:
    return evidence_of(shared.dumps[rank], shared.steps[rank][number][0])


def _last(shared: Shared, rank: int) -> Evidence:
    """Where a rank that did not come was last seen."""
    steps, dump = shared.steps[rank], shared.dumps[rank]
    if not steps:
        text = f"rank {rank}: no collective of this group"
        return Evidence(file=dump.file, line=0, text=text)
    return evidence_of(dump, steps[max(steps)][0])
