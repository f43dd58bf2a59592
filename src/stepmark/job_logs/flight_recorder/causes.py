"""Why a job does not go on, from its dumps: the cause, the ranks that wait, the evidence.

Each cause is one finding. What follows from it is part of it, not another problem.

Over 250 lines: one function per kind of cause, and the words that they share.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.findings.finding import Evidence, Severity
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder.groups import GroupDumps
from stepmark.job_logs.flight_recorder.mismatch import Mismatch, mismatches
from stepmark.job_logs.flight_recorder.operations import (
    Dump,
    evidence_of,
)
from stepmark.job_logs.flight_recorder.waits import (
    Call,
    WaitGraph,
    age_s,
    call_text,
    wait_graph,
)
from stepmark.model.collectives import Collective, torch_collective

_MAX_SHOWN = 3  # calls in a text, ranks in its evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`ranks` are the cause; if `is_likely`, `suspects` may be the cause instead.

    Without `ranks` one of `suspects` is the cause, unless `text` says what else may be: by the
    rule fr-unknown, or where gloo does not record what a rank waits in.
    """

    rule: str
    ranks: frozenset[int]
    suspects: frozenset[int] = frozenset()
    is_likely: bool = False
    victims: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()  # labels
    text: str
    evidence: tuple[Evidence, ...]
    severity: Severity = Severity.PROBLEM
    is_over: bool = False  # a call waits longer than its time-out


def causes(groups: Sequence[GroupDumps]) -> list[Cause]:
    """Return mismatches, each with the waits that follow from it, then all other waits."""
    merged = mismatches(groups)
    differing = {one.shared: one.first or 0 for parts in merged for one in parts}
    graph = wait_graph(groups, differing)
    waits = list(_waits(graph))
    explained = []
    for parts in merged:
        cause = _mismatch(parts)
        related = [wait for wait in waits if _follows(wait, cause)]
        waits = [wait for wait in waits if wait not in related]
        explained.append(_with_consequences(cause, related, graph))
    return explained + waits


def _follows(wait: Cause, mismatch: Cause) -> bool:
    suspects = mismatch.ranks | mismatch.suspects
    return bool(wait.groups & mismatch.groups or (wait.ranks | wait.suspects) & suspects)


def _mismatch(parts: Sequence[Mismatch]) -> Cause:
    suspects = parts[0].suspects.intersection(*(part.suspects for part in parts))
    text = f"ranks disagree on {'; on '.join(part.text for part in parts[:_MAX_SHOWN])}"
    if len(parts) > _MAX_SHOWN:
        text += f"; and in {len(parts) - _MAX_SHOWN} more groups or pairs"
    if len(suspects) == 1:
        verb = "takes part in each of these" if len(parts) > 1 else "differs from all others"
        text += f". {ranks_text(suspects).capitalize()} {verb}"
        named, rest = suspects, frozenset[int]()
    else:
        text += ". The dumps do not show which side is wrong"
        named, rest = frozenset[int](), suspects
    return Cause(
        rule="fr-mismatch",
        ranks=named,
        suspects=rest,
        groups=frozenset(part.shared.label for part in parts),
        text=text,
        evidence=tuple(line for part in parts[:_MAX_SHOWN] for line in part.evidence),
    )


def _with_consequences(cause: Cause, related: Sequence[Cause], graph: WaitGraph) -> Cause:
    """Tell which ranks wait since a mismatch, instead of a second problem."""
    if not related:
        return cause
    calls = [call for call in graph.calls if call.shared.label in cause.groups] or graph.calls
    victims = frozenset(graph.fronts) - cause.ranks - cause.suspects
    text = f"{cause.text}. Calls that wait, likely as a consequence: "
    text += _waiting_text(calls[:_MAX_SHOWN]) + _victims_text(victims)
    is_over = any(wait.is_over for wait in related)
    return replace(cause, text=text, victims=frozenset(graph.fronts), is_over=is_over)


def _waits(graph: WaitGraph) -> Iterator[Cause]:
    """Yield a cycle or ranks that wait for nobody, else what else calls wait for."""
    cycle, idle = graph.cycle(collectives_only=True), graph.idle
    calls = graph.calls
    ends = [call for call in calls if not call.blockers]
    unknown = [call for call in ends if call.unknown or call.is_open]
    if cycle:
        yield _deadlock(graph, cycle)
    elif idle:
        yield _stopped(graph, idle)
    elif unknown:
        yield _unknown(graph, unknown)
    elif all(call.done for call in ends) and (cycle := graph.cycle(collectives_only=False)):
        yield _deadlock(graph, cycle)
    else:
        yield from _arrived(graph, ends)


def _stopped(graph: WaitGraph, idle: frozenset[int]) -> Cause:
    """Name ranks that others wait for and that wait for nobody."""
    calls = [call for call in graph.calls if call.absent & idle]
    direct = frozenset(rank for call in calls for rank in call.waiting)
    texts = [
        f"{ranks_text(call.absent & idle)} {_has(call.absent & idle)} not issued "
        f"{call_text(call)}, in which {ranks_text(call.waiting)} {_s(call.waiting, 'wait')} "
        f"({_states(call)})"
        for call in calls[:_MAX_SHOWN]
    ]
    more = f"; nor {len(calls) - _MAX_SHOWN} more calls" if len(calls) > _MAX_SHOWN else ""
    # One rank alone in a call looks the same if it is the one that should not be there.
    alone = direct if len(direct) == 1 else frozenset[int]()
    dumps = graph.dumps.values()
    is_gloo = any("gloo" in dump.backends for dump in dumps)
    has_transfers = any(dump.has_unrecorded for dump in dumps)
    is_unclear = len(idle) > 1 and bool(is_gloo or alone)
    is_unknown = (is_gloo and (has_transfers or bool(alone))) or is_unclear
    doubt = "maybe " if is_unknown else "likely " if is_gloo or alone else ""
    text = (
        f"{ranks_text(idle)} {'is' if len(idle) == 1 else 'are'} {doubt}the cause, waiting for "
        f"no other rank: {'; '.join(texts)}{more}"
    )
    if is_gloo:
        which = "it waits" if len(idle) == 1 else "one of them waits"
        text += f", unless {which} in a send or receive, which gloo does not record"
    if alone:
        text += f", unless {ranks_text(alone)}, alone in it, makes a call too many"
    if is_unknown:
        return _cause(graph, "fr-unknown", frozenset(), text, calls, suspects=idle | alone)
    if is_gloo:
        return _cause(graph, "fr-hang", frozenset(), text, calls, suspects=idle)
    cause = _cause(graph, "fr-hang", idle, text, calls, suspects=alone)
    return replace(cause, is_likely=bool(doubt))


def _deadlock(graph: WaitGraph, cycle: dict[int, list[Call]]) -> Cause:
    edges = [(rank, call) for rank, calls in cycle.items() for call in calls]
    texts = [
        f"rank {rank} waits in {call_text(call)}, which "
        + " and which ".join(_blocked_text(call, cycle.keys()))
        for rank, call in edges[: _MAX_SHOWN + 1]
    ]
    text = f"{ranks_text(cycle)} wait for each other, a deadlock: {'; '.join(texts)}"
    if any(call.is_transfer for _, call in edges):
        text += "; if transfers do not block, one of them is stopped elsewhere instead"
    elif len({call.shared for _, call in edges}) > 1:
        text += ". They do not make these calls in the same order"
    breakers = graph.breakers(cycle)
    named = breakers if len(breakers) == 1 else frozenset(cycle)
    if len(named) < len(cycle):
        text += f"; all cycles lead through {ranks_text(named)}"
    calls = list(dict.fromkeys(call for _, call in edges))
    one_named = named if len(named) == 1 else frozenset[int]()
    return _cause(graph, "fr-deadlock", one_named, text, calls, suspects=named - one_named)


def _blocked_text(call: Call, ranks: Iterable[int]) -> Iterator[str]:
    """Say for whom of these ranks a call waits."""
    if absent := call.absent & set(ranks):
        yield f"{ranks_text(absent)} {_has(absent)} not issued"
    for rank in sorted(call.behind.keys() & set(ranks))[:_MAX_SHOWN]:
        yield f"rank {rank} has issued behind {call.behind[rank].title}"


def _unknown(graph: WaitGraph, calls: Sequence[Call]) -> Cause:
    """Name the ranks that may be the cause where the dumps do not show it."""
    listed = [call.unknown for call in calls if call.unknown]
    common = frozenset.intersection(*listed) if listed else frozenset[int]()
    maybe = common or frozenset(rank for ranks in listed for rank in ranks)
    free = graph.dumps.keys() - graph.fronts.keys() - graph.stale
    is_open = any(call.is_open for call in calls)
    shown = calls[:_MAX_SHOWN]
    text = (
        f"{_waiting_text(shown)}; every rank that the dumps show to be a member has issued it"
    )
    if maybe:
        how = "its" if len(maybe) == 1 else "their"
        text += f". {ranks_text(maybe)} may be the cause or a victim: {how} progress is unknown"
        without = maybe - graph.dumps.keys()
        text += f" ({ranks_text(without)} without a dump)" if without else ""
    if is_open:
        text += ". The dumps do not list the members of the group: another rank may be missing"
        outside = free - frozenset(rank for call in calls for rank in call.steps)
        if outside:
            text += f", such as {ranks_text(outside)}, which {_s(outside, 'wait')} for nobody"
    return _cause(graph, "fr-unknown", frozenset(), text, calls, suspects=maybe)


def _arrived(graph: WaitGraph, calls: Sequence[Call]) -> Iterator[Cause]:
    """Report calls that every member has issued and that are not completed."""
    for call in calls:
        # Where some have completed it, states may only be late.
        is_late = bool(call.done)
        text = f"{_waiting_text([call])}; " + (
            f"{ranks_text(call.done)} {_has(call.done)} completed it: the state may be late"
            if is_late
            else f"every member has issued it, so no rank is missing{_rooted(call)}"
        )
        cause = _cause(graph, "fr-not-completed", frozenset(), text, [call])
        is_harmless = is_late and cause.victims <= set(call.waiting)
        yield replace(cause, severity=Severity.WARNING if is_harmless else Severity.PROBLEM)


def _rooted(call: Call) -> str:
    """Name the call before if ranks may have different roots in it."""
    before = (call.number - 1, call.number) if call.number else ()
    for number in before:
        for step in call.shared.at(number).values():
            name = torch_collective(step[0].kind)
            if name in (Collective.BROADCAST, Collective.REDUCE):
                return f". Collective {number} is a {name}, whose root is not recorded"
    return ""


def _cause(
    graph: WaitGraph,
    rule: str,
    named: frozenset[int],
    text: str,
    calls: Sequence[Call],
    suspects: frozenset[int] = frozenset(),
) -> Cause:
    """Add what all waits have in common: victims, how long they wait, the evidence."""
    direct = frozenset(rank for call in calls for rank in call.waiting)
    victims = frozenset(graph.fronts) - named
    text += _victims_text(victims - suspects - (frozenset() if named else direct))
    longest, is_over = age_s(graph, direct)
    if is_over:
        text += f". The calls wait for at least {longest:.3g} s, longer than their time-out"
    waiting = dict.fromkeys((rank, call) for call in calls for rank in call.waiting)
    evidence = [
        evidence_of(graph.dumps[rank], call.steps[rank][0])
        for rank, call in list(waiting)[:_MAX_SHOWN]
    ]
    evidence += [_last(graph.dumps[rank]) for rank in sorted(named)[:_MAX_SHOWN]]
    return Cause(
        rule=rule,
        ranks=named,
        suspects=suspects,
        victims=victims,
        groups=frozenset(call.shared.label for call in calls),
        text=text,
        evidence=tuple(evidence),
        is_over=is_over,
    )


def _victims_text(ranks: frozenset[int]) -> str:
    return f"; victim{'s' if len(ranks) > 1 else ''}: {ranks_text(ranks)}" if ranks else ""


def _last(dump: Dump) -> Evidence:
    """Return the last operation of a rank, where its program was when it stopped."""
    if not dump.operations:
        return Evidence(file=dump.file, line=0, text=f"rank {dump.rank}: no operation")
    last = evidence_of(dump, dump.operations[-1])
    return replace(last, text=f"{last.text}: its last operation")


def _waiting_text(calls: Sequence[Call]) -> str:
    texts = [
        f"{ranks_text(call.waiting)} {_s(call.waiting, 'wait')} in {call_text(call)} "
        f"({_states(call)})"
        for call in calls
    ]
    return "; ".join(texts)


def _states(call: Call) -> str:
    """Return the states; without TORCH_NCCL_ENABLE_TIMING nothing records a start."""
    states = Counter(
        next(op.state for op in call.steps[rank] if not op.is_done) or "no state"
        for rank in call.waiting
    )
    names = ", ".join(states)
    return f"{names}: it may have started unrecorded" if set(states) == {"scheduled"} else names


def _s(ranks: Iterable[int], verb: str) -> str:
    return f"{verb}s" if len(list(ranks)) == 1 else verb


def _has(ranks: Iterable[int]) -> str:
    return "has" if len(list(ranks)) == 1 else "have"
