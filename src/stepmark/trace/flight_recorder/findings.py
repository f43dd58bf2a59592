"""Find what the dumps of several ranks prove together: mismatches, hangs, missing ranks.

States are updated by a watchdog or when the dump is written, never immediately, and the dumps
of two ranks are not written at the same moment. Each text says what remains open.

Over 250 lines: one function per finding.
"""

from collections import Counter
from collections.abc import Sequence

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.message import RECV, SEND
from stepmark.trace.flight_recorder.operations import (
    Dump,
    GroupDumps,
    Operation,
    Step,
    described,
    evidence_of,
    groups_of,
    is_done,
    progress,
    ranks_text,
    signature,
    total,
)

_CAVEAT = (
    "a dump of a running job looks the same: it is a hang if a later dump shows the same number"
)


def findings(dumps: Sequence[Dump]) -> list[Finding]:
    """Return problems first, in the order of groups. One dump alone shows little."""
    known = [dump for dump in dumps if dump.rank is not None]
    groups = groups_of(known)
    unsorted = [
        *(
            one
            for group in groups
            for rule in (_mismatch, _pairs, _hang)
            for one in rule(group)
        ),
        *_missing(groups),
        *(one for rule in (_lost, _watchdog, _versions) for one in rule(dumps)),
    ]
    order = [Severity.PROBLEM, Severity.WARNING, Severity.NOTE]
    return sorted(unsorted, key=lambda one: order.index(one.severity))


def _mismatch(shared: GroupDumps) -> list[Finding]:
    """Report the first number at which ranks issue different collectives."""
    numbers = sorted({number for steps in shared.steps.values() for number in steps})
    for number in numbers:
        by_call: dict[tuple[object, ...], list[int]] = {}
        for rank, steps in shared.steps.items():
            if number in steps:
                by_call.setdefault(signature(steps[number]), []).append(rank)
        if len(by_call) < 2:
            continue
        calls = sorted(by_call.values(), key=len)
        sides = "; ".join(
            f"{ranks_text(ranks)}: {described(shared.steps[ranks[0]][number])}"
            for ranks in calls[:4]
        )
        text = (
            f"{shared.label}: ranks disagree on collective {number}, {sides}. This is the "
            "first such number; the dumps do not show which side is wrong."
        )
        shown = [_evidence(shared, ranks[0], number) for ranks in calls[:4]]
        return [_problem("fr-mismatch", text, shown)]
    return []


def _hang(shared: GroupDumps) -> list[Finding]:
    """Report the first collective that some rank waits for."""
    numbers = sorted({number for steps in shared.steps.values() for number in steps})
    for number in numbers:
        by_rank = {r: steps[number] for r, steps in shared.steps.items() if number in steps}
        waiting = [rank for rank, step in by_rank.items() if not is_done(step)]
        if not waiting:
            continue
        absent = [
            rank
            for rank, last in shared.enqueued.items()
            if last is not None and last < number and rank not in by_rank
        ]
        done = [rank for rank in by_rank if rank not in waiting]
        what = described(by_rank[waiting[0]])
        head = f"{shared.label}: collective {number}, {what}, is not completed on"
        text = f"{head} {ranks_text(waiting)} ({_states(by_rank, waiting)})"
        if absent:
            text += f" and was not enqueued by {ranks_text(absent)}, which it waits for"
        elif done:
            text += f", but is on {ranks_text(done)}"
        else:
            text += "; every rank with a dump has enqueued it"
        gone = set(shared.group.ranks or ()) - shared.steps.keys()
        if gone and not absent:
            text += f"; {ranks_text(gone)}, without a dump, may not have"
        shown = [_evidence(shared, rank, number) for rank in waiting[:3]]
        shown += [_last(shared, rank) for rank in absent[:3]]
        text = f"{text}. {_CAVEAT.capitalize()}."
        if done and not absent:
            # All have arrived and some have completed: the others' states may only be late.
            return [_finding(Severity.WARNING, "fr-not-completed", text, shown)]
        rule = "fr-hang" if absent else "fr-not-completed"
        return [_problem(rule, text, shown)]
    return []


def _states(by_rank: dict[int, Step], waiting: Sequence[int]) -> str:
    """Return the states; without TORCH_NCCL_ENABLE_TIMING nothing records a start."""
    states = Counter(
        next(one.state for one in by_rank[rank] if not one.is_done) or "no state"
        for rank in waiting
    )
    shown = ", ".join(states)
    return f"{shown}: it may have started unrecorded" if set(states) == {"scheduled"} else shown


def _pairs(shared: GroupDumps) -> list[Finding]:
    """Compare the n-th send of a pair with the n-th receive, where both dumps are complete."""
    ranks = shared.group.ranks
    if ranks is None:
        return []
    sides: dict[tuple[int, int], dict[str, list[Operation]]] = {}
    for dump in shared.dumps.values():
        for one in dump.operations:
            if one.group == shared.group.name and one.kind in (SEND, RECV) and one.peers:
                sides.setdefault(one.peers, {}).setdefault(one.kind, []).append(one)
    findings = []
    for pair, by_kind in sides.items():
        if max(pair) >= len(ranks):
            continue
        source, destination = (shared.dumps.get(ranks[place]) for place in pair)
        if not source or not destination or source.num_lost or destination.num_lost:
            continue
        sends, receives = by_kind.get(SEND, []), by_kind.get(RECV, [])
        findings += _pair(shared, (source, destination), sends, receives)
    return findings


def _pair(
    shared: GroupDumps,
    ends: tuple[Dump, Dump],
    sends: Sequence[Operation],
    receives: Sequence[Operation],
) -> list[Finding]:
    source, destination = ends
    way = f"{shared.label}: rank {source.rank} to rank {destination.rank}"
    for index, (sent, received) in enumerate(zip(sends, receives, strict=False), start=1):
        left, right = total(sent.inputs), total(received.outputs)
        if left is not None and right is not None and left != right:
            sizes = f"sent as {_side(sent)}, received as {_side(received)}"
            text = f"{way}: transfer {index} is {sizes}"
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


def _missing(groups: Sequence[GroupDumps]) -> list[Finding]:
    """Report ranks of the groups without a dump."""
    present = {rank for shared in groups for rank in shared.dumps}
    wanted = {rank for shared in groups for rank in shared.group.ranks or ()}
    gone = wanted - present
    if not gone:
        return []
    many = f"{len(gone)} of {len(wanted)}"
    text = f"no dump of {ranks_text(gone)}, {many}: their progress is unknown"
    return [_finding(Severity.NOTE, "fr-missing-dump", text, (), len(gone))]


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
    return [_finding(Severity.WARNING, "fr-wrapped", text, shown, len(short))]


def _watchdog(dumps: Sequence[Dump]) -> list[Finding]:
    """Report where pg_status, which holds what the watchdog knew, is out of date."""
    behind = [
        one
        for one in progress(dumps)
        if one.watchdog_completed is not None
        and one.last_completed is not None
        and one.watchdog_completed < one.last_completed
    ]
    if not behind:
        return []
    text = (
        "pg_status lags: its last completed collective is behind the states of the entries, "
        "which were looked up for the dump; stepmark uses the states"
    )
    shown = tuple(
        Evidence(
            file=one.file,
            line=0,
            text=f"last_completed_collective {one.watchdog_completed}, state completed up to "
            f"{one.last_completed}",
        )
        for one in behind[:3]
    )
    return [_finding(Severity.NOTE, "fr-status-lags", text, shown, len(behind))]


def _versions(dumps: Sequence[Dump]) -> list[Finding]:
    by_version: dict[str, list[Dump]] = {}
    for dump in dumps:
        if dump.nccl:
            by_version.setdefault(dump.nccl, []).append(dump)
    if len(by_version) < 2:
        return []
    text = f"ranks use different NCCL versions: {', '.join(sorted(by_version))}"
    shown = tuple(
        Evidence(file=users[0].file, line=0, text=f"comm_lib_version {version}")
        for version, users in by_version.items()
    )
    return [_finding(Severity.WARNING, "fr-versions", text, shown[:4])]


def _problem(rule: str, text: str, evidence: Sequence[Evidence]) -> Finding:
    return _finding(Severity.PROBLEM, rule, text, evidence)


def _finding(
    severity: Severity, rule: str, text: str, evidence: Sequence[Evidence], count: int = 1
) -> Finding:
    return Finding(
        rule=rule, severity=severity, text=text, evidence=tuple(evidence), count=count
    )


def _evidence(shared: GroupDumps, rank: int, number: int) -> Evidence:
    return evidence_of(shared.dumps[rank], shared.steps[rank][number][0])


def _last(shared: GroupDumps, rank: int) -> Evidence:
    """Return the last known collective of a rank that did not arrive."""
    steps, dump = shared.steps[rank], shared.dumps[rank]
    if not steps:
        text = f"rank {rank}: no collective of this group"
        return Evidence(file=dump.file, line=0, text=text)
    return evidence_of(dump, steps[max(steps)][0])
