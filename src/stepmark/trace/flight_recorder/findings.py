"""Find what the dumps of several ranks prove together: mismatches, hangs, missing ranks.

States are updated by a watchdog or when the dump is written, never immediately, and the dumps
of two ranks are not written at the same moment. Each text says what remains open.

Over 250 lines: one function per finding.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.message import RECV, SEND
from stepmark.trace.flight_recorder.operations import (
    Dump,
    GroupDumps,
    Operation,
    Step,
    describe,
    evidence_of,
    groups_of,
    is_done,
    progress,
    ranks_text,
    signature,
    total,
)

_CAVEAT = (
    "A dump of a running job looks the same: it is a hang if a later dump shows the same number"
)


def findings(dumps: Sequence[Dump]) -> list[Finding]:
    """Return problems first, in the order of groups. One dump alone shows little."""
    groups = groups_of([dump for dump in dumps if dump.rank is not None])
    unsorted: list[Finding] = []
    for group in groups:
        for group_rule in (_mismatch, _pairs, _hang):
            unsorted += group_rule(group)
    unsorted += _missing(groups)
    for rule in (_lost, _watchdog, _versions):
        unsorted += rule(dumps)
    order = [Severity.PROBLEM, Severity.WARNING, Severity.NOTE]
    return sorted(unsorted, key=lambda finding: order.index(finding.severity))


def _mismatch(shared: GroupDumps) -> Iterator[Finding]:
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
            f"{ranks_text(ranks)}: {describe(shared.steps[ranks[0]][number])}"
            for ranks in calls[:4]
        )
        text = (
            f"{shared.label}: ranks disagree on collective {number}, {sides}. This is the "
            "first such number; the dumps do not show which side is wrong."
        )
        yield _finding(
            "fr-mismatch",
            text,
            [_evidence(shared, ranks[0], number) for ranks in calls[:4]],
        )
        return


def _hang(shared: GroupDumps) -> Iterator[Finding]:
    """Report the first collective that is not completed on every rank."""
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
        call = describe(by_rank[waiting[0]])
        head = f"{shared.label}: collective {number}, {call}, is not completed on"
        text = f"{head} {ranks_text(waiting)} ({_states(by_rank, waiting)})"
        if absent:
            text += f" and was not enqueued by {ranks_text(absent)}, which it waits for"
        elif done:
            text += f", but is on {ranks_text(done)}"
        else:
            text += "; every rank with a dump has enqueued it"
        unreported = set(shared.group.ranks or ()) - shared.steps.keys()
        if unreported and not absent:
            text += f"; {ranks_text(unreported)}, without a dump, may not have"
        evidence = [_evidence(shared, rank, number) for rank in waiting[:3]]
        evidence += [_last(shared, rank) for rank in absent[:3]]
        # Where all have enqueued it and some have completed it, states may only be late.
        is_late = done and not absent
        yield _finding(
            "fr-hang" if absent else "fr-not-completed",
            f"{text}. {_CAVEAT}.",
            evidence,
            Severity.WARNING if is_late else Severity.PROBLEM,
        )
        return


def _states(by_rank: dict[int, Step], waiting: Sequence[int]) -> str:
    """Return the states; without TORCH_NCCL_ENABLE_TIMING nothing records a start."""
    states = Counter(
        next(op.state for op in by_rank[rank] if not op.is_done) or "no state"
        for rank in waiting
    )
    names = ", ".join(states)
    return f"{names}: it may have started unrecorded" if set(states) == {"scheduled"} else names


def _pairs(shared: GroupDumps) -> Iterator[Finding]:
    """Compare the n-th send of a pair with the n-th receive, where both dumps are complete."""
    ranks = shared.group.ranks
    if ranks is None:
        return
    sides: dict[tuple[int, int], dict[str, list[Operation]]] = {}
    for dump in shared.dumps.values():
        for op in dump.operations:
            if op.group == shared.group.name and op.kind in (SEND, RECV) and op.peers:
                sides.setdefault(op.peers, {}).setdefault(op.kind, []).append(op)
    for pair, by_kind in sides.items():
        if max(pair) >= len(ranks):
            continue
        source, destination = (shared.dumps.get(ranks[place]) for place in pair)
        if not source or not destination or source.num_lost or destination.num_lost:
            continue
        sends, receives = by_kind.get(SEND, []), by_kind.get(RECV, [])
        yield from _pair(shared.label, source, destination, sends, receives)


def _pair(
    label: str,
    source: Dump,
    destination: Dump,
    sends: Sequence[Operation],
    receives: Sequence[Operation],
) -> Iterator[Finding]:
    way = f"{label}: rank {source.rank} to rank {destination.rank}"
    for index, (sent, received) in enumerate(zip(sends, receives, strict=False), start=1):
        left, right = total(sent.inputs), total(received.outputs)
        if left is not None and right is not None and left != right:
            sizes = f"sent as {_side(sent)}, received as {_side(received)}"
            evidence = [evidence_of(source, sent), evidence_of(destination, received)]
            yield _finding("fr-mismatch", f"{way}: transfer {index} is {sizes}", evidence)
            return
    extra = sends[len(receives) :] or receives[len(sends) :]
    waiting = [op for op in extra if not op.is_done]
    if not waiting:
        return
    is_send = len(sends) > len(receives)
    dump, other = (source, destination) if is_send else (destination, source)
    text = (
        f"{way}: {len(sends)} sends, {len(receives)} receives; rank {dump.rank} waits for "
        f"rank {other.rank}. {_CAVEAT}."
    )
    yield _finding("fr-hang", text, [evidence_of(dump, waiting[0])])


def _side(op: Operation) -> str:
    shapes = op.inputs if op.kind == SEND else op.outputs
    return ", ".join(f"{elements} {word}" for elements, word in (shapes or ())[:3])


def _missing(groups: Sequence[GroupDumps]) -> Iterator[Finding]:
    """Report ranks of the groups without a dump."""
    present = {rank for shared in groups for rank in shared.dumps}
    members = {rank for shared in groups for rank in shared.group.ranks or ()}
    absent = members - present
    if absent:
        count = f"{len(absent)} of {len(members)}"
        text = f"no dump of {ranks_text(absent)}, {count}: their progress is unknown"
        yield _finding("fr-missing-dump", text, (), Severity.NOTE, len(absent))


def _lost(dumps: Sequence[Dump]) -> Iterator[Finding]:
    incomplete = [dump for dump in dumps if dump.num_lost]
    if not incomplete:
        return
    most = max(dump.num_lost for dump in incomplete)
    text = (
        f"the ring buffer of {len(incomplete)} of {len(dumps)} dumps lost its beginning, up to "
        f"{most} operations: counts are not of the whole job (TORCH_FR_BUFFER_SIZE)"
    )
    evidence = [
        Evidence(file=dump.file, line=0, text=f"first record_id {dump.num_lost}")
        for dump in incomplete[:3]
    ]
    yield _finding("fr-wrapped", text, evidence, Severity.WARNING, len(incomplete))


def _watchdog(dumps: Sequence[Dump]) -> Iterator[Finding]:
    """Report where pg_status, which the watchdog updates, is out of date."""
    behind = [
        entry
        for entry in progress(dumps)
        if entry.watchdog_completed is not None
        and entry.last_completed is not None
        and entry.watchdog_completed < entry.last_completed
    ]
    if not behind:
        return
    text = (
        "pg_status lags: its last completed collective is behind the states of the entries, "
        "which were looked up for the dump; stepmark uses the states"
    )
    evidence = [
        Evidence(
            file=entry.file,
            line=0,
            text=f"last_completed_collective {entry.watchdog_completed}, state completed up to "
            f"{entry.last_completed}",
        )
        for entry in behind[:3]
    ]
    yield _finding("fr-status-lags", text, evidence, Severity.NOTE, len(behind))


def _versions(dumps: Sequence[Dump]) -> Iterator[Finding]:
    by_version: dict[str, list[Dump]] = {}
    for dump in dumps:
        if dump.nccl:
            by_version.setdefault(dump.nccl, []).append(dump)
    if len(by_version) > 1:
        text = f"ranks use different NCCL versions: {', '.join(sorted(by_version))}"
        evidence = [
            Evidence(file=users[0].file, line=0, text=f"comm_lib_version {version}")
            for version, users in by_version.items()
        ]
        yield _finding("fr-versions", text, evidence[:4], Severity.WARNING)


def _finding(
    rule: str,
    text: str,
    evidence: Sequence[Evidence],
    severity: Severity = Severity.PROBLEM,
    count: int = 1,
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
