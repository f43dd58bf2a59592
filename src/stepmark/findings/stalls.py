"""Why a job does not go on: the cause, the ranks that wait, the evidence.

Each cause is one finding. What follows from it is part of it, not another problem.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.findings import disagreement
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.wait_graph import Call, WaitGraph
from stepmark.ground.units import format_time, ranks_text

_MAX_SHOWN = 3  # calls in a text
_MAX_EVIDENCE = 8  # ranks
MISMATCH = "call-mismatch"
MISSING = "failure-missing-rank"
DEADLOCK = "failure-deadlock"
ARRIVED = "failure-not-completed"
UNKNOWN = "failure-wait"
_ACTIONS = {
    MISMATCH: "Make the ranks issue the same collectives in one order, with equal counts, "
    "types and roots; TORCH_DISTRIBUTED_DEBUG=DETAIL names the call in the code.",
    MISSING: "Look at the code of {who} at that point (py-spy dump): a slow data loader or "
    "checkpoint, a branch without the call, or a process that hangs.",
    DEADLOCK: "Issue collectives of all groups in one order on every rank.",
    ARRIVED: "Look at the network and the GPUs of these ranks (NCCL_DEBUG=INFO, dmesg), and "
    "whether the call is the same on all of them.",
    UNKNOWN: "Look at dmesg of the hosts of {who}, and at what the processes there do (py-spy "
    "dump); flight-recorder dumps (TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_FR_BUFFER_SIZE) or the "
    "calls in the logs of all ranks (NCCL_DEBUG_SUBSYS=INIT,COLL) show more.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`ranks` are the cause; if `is_likely`, `suspects` may be the cause instead.

    Without `ranks` one of `suspects` is the cause, unless `text` says what else may be: by the
    rule UNKNOWN, or where gloo does not record what a rank waits in.
    """

    rule: str
    ranks: frozenset[int]
    suspects: frozenset[int] = frozenset()
    is_likely: bool = False
    victims: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()  # labels
    text: str
    evidence: tuple[Evidence, ...]
    count: int = 0  # lines that show it, where evidence has not all
    severity: Severity = Severity.PROBLEM
    is_over: bool = False  # a call waits longer than its time-out
    action: str = ""  # "": that of the rule
    wait: str = ""  # who waits since then, likely as a consequence

    def finding(self) -> Finding:
        """Return the cause with its sentence and what to do."""
        ranks = tuple(sorted(self.ranks | self.suspects))
        who = ranks_text(self.ranks or self.suspects or self.victims)
        text = f"{self.text[:1].upper()}{self.text[1:]}."
        return Finding(
            rule=self.rule,
            severity=self.severity,
            text=text,
            evidence=self.evidence,
            count=max(self.count, len(self.evidence), 1),
            action=self.action or _ACTIONS[self.rule].format(who=who),
            ranks=ranks,
            consequences=(self._consequence(),) if self.wait else (),
        )

    def _consequence(self) -> Finding:
        text = f"{self.wait[:1].upper()}{self.wait[1:]}."
        return Finding(
            rule=UNKNOWN, severity=Severity.NOTE, text=text, evidence=self.evidence[-1:]
        )


def causes(graph: WaitGraph, disagreements: Sequence[disagreement.Disagreement]) -> list[Cause]:
    """Return mismatches, each with the waits that follow from it, then all other waits."""
    waits = list(_waits(graph))
    explained = []
    for parts in disagreement.merged(disagreements):
        cause = _mismatch(parts)
        related = [wait for wait in waits if _follows(wait, cause)]
        waits = [wait for wait in waits if wait not in related]
        explained.append(_with_consequences(cause, related, graph))
    return explained + waits


def _follows(wait: Cause, mismatch: Cause) -> bool:
    suspects = mismatch.ranks | mismatch.suspects
    blamed = wait.ranks | wait.suspects
    if wait.rule == ARRIVED:
        blamed |= wait.victims
    return bool(wait.groups & mismatch.groups or blamed & suspects)


def _mismatch(parts: Sequence[disagreement.Disagreement]) -> Cause:
    suspects = parts[0].suspects.intersection(*(part.suspects for part in parts))
    shown = [part for part in parts if part.source == parts[0].source]
    text = f"ranks disagree on {'; on '.join(part.text for part in shown[:_MAX_SHOWN])}"
    if len(shown) > _MAX_SHOWN:
        text += f"; and in {len(shown) - _MAX_SHOWN} more groups or pairs"
    if len(suspects) == 1:
        verb = "takes part in each of these" if len(shown) > 1 else "differs from all others"
        text += f". {ranks_text(suspects).capitalize()} {verb}"
        named = suspects
        rest = frozenset[int]()
    else:
        text += f". The {parts[0].source} cannot show which side is wrong"
        named = frozenset[int]()
        rest = suspects
    return Cause(
        rule=MISMATCH,
        ranks=named,
        suspects=rest,
        groups=frozenset(part.group for part in parts),
        text=text,
        evidence=tuple(line for part in parts[:_MAX_SHOWN] for line in part.evidence),
    )


def _with_consequences(cause: Cause, related: Sequence[Cause], graph: WaitGraph) -> Cause:
    """Tell which ranks wait since a mismatch, instead of a second problem."""
    if not related:
        return cause
    calls = [call for call in graph.calls if call.group in cause.groups] or graph.calls
    victims = frozenset(graph.fronts) - cause.ranks - cause.suspects
    wait = f"{_waiting_text(calls)}{_victims_text(victims)}, likely as a consequence"
    lines = [line for wait in related for line in wait.evidence]
    return replace(
        cause,
        wait=wait,
        victims=frozenset(graph.fronts),
        evidence=tuple(dict.fromkeys((*cause.evidence, *lines))),
        is_over=any(wait.is_over for wait in related),
    )


def _waits(graph: WaitGraph) -> Iterator[Cause]:
    """Yield a cycle or ranks that wait for nobody, else what else calls wait for."""
    cycle = graph.cycle(collectives_only=True)
    idle = graph.idle
    calls = graph.calls
    ends = [call for call in calls if not call.blockers]
    unknown = [call for call in ends if call.unknown or (call.is_open and not call.is_split)]
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
    calls = [call for call in graph.calls if call.absent.keys() & idle]
    direct = frozenset(rank for call in calls for rank in call.waiting)
    texts = [
        f"{ranks_text(call.absent.keys() & idle)} {_have(call.absent.keys() & idle)} "
        f"not issued {call_text(call)}, in which {_ranks_wait([call])}"
        for call in calls[:_MAX_SHOWN]
    ]
    more = f"; nor {len(calls) - _MAX_SHOWN} more calls" if len(calls) > _MAX_SHOWN else ""
    # One rank alone in a call looks the same if it is the one that should not be there.
    alone = direct if len(direct) == 1 else frozenset[int]()
    is_gloo = graph.hides_transfers
    is_unclear = len(idle) > 1 and bool(is_gloo or alone)
    is_unknown = (is_gloo and (graph.has_transfers or bool(alone))) or is_unclear
    # So do few ranks in a call that most have not issued.
    suspects = direct if len(direct) < len(idle) else alone
    remarks = dict.fromkeys(call.remark for call in calls if call.is_open and call.remark)
    doubt = "maybe " if is_unknown else "likely " if is_gloo or suspects or remarks else ""
    text = (
        f"{ranks_text(idle)} did not join a call: {'; '.join(texts)}{more}. "
        f"{_number(idle, 'It waits', 'They wait')} for no other rank and "
        f"{_number(idle, 'is', 'are')} {doubt}the cause"
    )
    if is_gloo:
        which = _number(idle, "it", "one of them")
        text += f", unless {which} waits in a send or receive, which gloo does not record"
    if suspects:
        verb = _number(suspects, "makes", "make")
        text += f", unless {ranks_text(suspects)}, alone in it, {verb} a call too many"
    text += "".join(f". {remark[:1].upper()}{remark[1:]}" for remark in remarks)
    if is_unknown:
        return _cause(graph, UNKNOWN, frozenset(), text, calls, suspects=idle | alone)
    if is_gloo:
        return _cause(graph, MISSING, frozenset(), text, calls, suspects=idle)
    cause = _cause(graph, MISSING, idle, text, calls, suspects=suspects)
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
    elif len({call.group for _, call in edges}) > 1:
        text += ". They do not make these calls in the same order"
    breakers = graph.breakers(cycle)
    named = breakers if len(breakers) == 1 else frozenset(cycle)
    if len(named) < len(cycle):
        text += f"; all cycles lead through {ranks_text(named)}"
    calls = list(dict.fromkeys(call for _, call in edges))
    one_named = named if len(named) == 1 else frozenset[int]()
    return _cause(graph, DEADLOCK, one_named, text, calls, suspects=named - one_named)


def _blocked_text(call: Call, ranks: Iterable[int]) -> Iterator[str]:
    """Say for whom of these ranks a call waits."""
    if absent := call.absent.keys() & set(ranks):
        yield f"{ranks_text(absent)} {_have(absent)} not issued"
    for rank in sorted(call.behind.keys() & set(ranks))[:_MAX_SHOWN]:
        yield f"rank {rank} has issued behind {call.behind[rank].title}"


def _unknown(graph: WaitGraph, calls: Sequence[Call]) -> Cause:
    """Name the ranks that may be the cause where no source shows it."""
    listed = [frozenset(call.unknown) for call in calls if call.unknown]
    common = frozenset.intersection(*listed) if listed else frozenset[int]()
    maybe = common or frozenset(rank for ranks in listed for rank in ranks)
    text = f"{_waiting_text(calls)}. The cause is unknown: "
    if maybe:
        text += f"{ranks_text(maybe)} may be the cause or a victim"
        reasons = {rank: why for call in calls for rank, why in call.unknown.items() if why}
        for reason in dict.fromkeys(reasons.values()):
            lacking = [rank for rank in maybe if reasons.get(rank) == reason]
            text += f", {ranks_text(lacking)} {reason}" if lacking else ""
    if any(call.is_open for call in calls):
        text += "; " if maybe else ""
        text += "the members of the group are not listed: another rank may be missing"
        outside = graph.free - frozenset(rank for call in calls for rank in call.parts)
        if outside:
            verb = _number(outside, "waits", "wait")
            text += f", such as {ranks_text(outside)}, which {verb} for nobody"
        text += ", calls may differ, or data stopped flowing"
    remarks = dict.fromkeys(call.remark for call in calls if call.remark)
    text += "".join(f". {remark}" for remark in remarks)
    return _cause(graph, UNKNOWN, frozenset(), text, calls, suspects=maybe)


def _arrived(graph: WaitGraph, calls: Sequence[Call]) -> Iterator[Cause]:
    """Report calls that every member has issued and that are not completed."""
    for call in calls:
        if call.is_split:
            yield _split(graph, call)
            continue
        text = f"{_waiting_text([call])}; "
        if call.done:
            text += (
                f"{ranks_text(call.done)} {_have(call.done)} completed it: the state may be "
                "late"
            )
        else:
            text += "every member has issued it, so no rank is missing"
            text += f". {call.remark}" if call.remark else ""
        cause = _cause(graph, ARRIVED, frozenset(), text, [call])
        is_late = call.done and cause.victims <= set(call.waiting)
        yield replace(cause, severity=Severity.WARNING if is_late else Severity.PROBLEM)


def _split(graph: WaitGraph, call: Call) -> Cause:
    """Report a call that ended on some ranks, while others waited for it to their time-out."""
    fewer = min(call.waiting, call.done, key=len)
    if fewer == call.waiting:
        verb = _number(fewer, "is behind: it waits", "are behind: they wait")
        text = f"{ranks_text(fewer)} {verb}{_span([call])} in {call_text(call)}, which "
        text += f"{ranks_text(call.done)} {_have(call.done)} completed"
    else:
        verb = _number(fewer, "is ahead: it has", "are ahead: they have")
        text = f"{ranks_text(fewer)} {verb} completed {call_text(call)}, in which "
        text += _ranks_wait([call])
    text += ". Calls of different kind or size were paired, or it ended on some ranks only"
    cause = _cause(graph, ARRIVED, frozenset(), text, [call], suspects=frozenset(fewer))
    action = f"Compare the calls of {ranks_text(fewer)} with those of the others from there on."
    victims = frozenset(graph.fronts) - set(fewer)
    return replace(cause, victims=victims, action=action)


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
    is_over = any(call.is_over for rank in direct for call in graph.fronts.get(rank, ()))
    text += f". {graph.doubt}" if graph.doubt else ""
    lines = [line for call in calls for line in call.absent.values() if line][:_MAX_EVIDENCE]
    waiting = dict.fromkeys((rank, call) for call in calls for rank in call.waiting)
    for rank, call in list(waiting)[:_MAX_EVIDENCE]:
        lines += call.parts[rank].evidence
    lines += [graph.last[rank] for rank in sorted(named)[:_MAX_EVIDENCE] if rank in graph.last]
    return Cause(
        rule=rule,
        ranks=named,
        suspects=suspects,
        victims=victims,
        groups=frozenset(call.group for call in calls),
        text=text,
        evidence=tuple(dict.fromkeys(lines)),
        count=len(waiting)
        + len([line for call in calls for line in call.absent.values() if line]),
        is_over=is_over,
    )


def call_text(call: Call) -> str:
    """Return e.g. 'collective 3 of group 0 default_pg (all_reduce of 1024 Float (4 KiB))'."""
    words = _words(call)
    return f"{call.title} ({' or '.join(words[:3])})" if words else call.title


def _words(call: Call) -> tuple[str, ...]:
    """Return what the ranks that wait in a call have issued, as far as known."""
    texts = dict.fromkeys(call.parts[rank].text for rank in call.waiting)
    return tuple(text for text in texts if text)


def _victims_text(ranks: frozenset[int]) -> str:
    return f"; victim{'s' if len(ranks) > 1 else ''}: {ranks_text(ranks)}" if ranks else ""


def _waiting_text(calls: Sequence[Call]) -> str:
    """Say who waits in which calls, those of alike groups together: no rank is lost."""
    alike: dict[tuple[int | None, tuple[str, ...], str], list[Call]] = {}
    for call in calls:
        purpose = call.group.partition(call.name)[2] if call.name else call.group
        alike.setdefault((call.number, _words(call), purpose), []).append(call)
    texts = []
    for (number, words, purpose), same in list(alike.items())[:_MAX_SHOWN]:
        where = call_text(same[0])
        if len(same) > 1:
            names = ", ".join(call.name for call in same[:8])
            more = ", ..." if len(same) > 8 else ""
            where = f"call {number} of {len(same)} groups, {names}{more}{purpose}"
            where += f" ({' or '.join(words[:3])})" if words else ""
        texts.append(_ranks_wait(same, where))
    rest = [call for same in list(alike.values())[_MAX_SHOWN:] for call in same]
    if rest:
        ranks = {rank for call in rest for rank in call.waiting}
        texts.append(f"{ranks_text(ranks)} in {len(rest)} more calls")
    return "; ".join(texts)


def _ranks_wait(calls: Sequence[Call], where: str = "") -> str:
    """Return e.g. 'ranks 0, 2 wait 15.1 s in collective 3 of group 0 (timed out)'."""
    ranks = sorted({rank for call in calls for rank in call.waiting})
    parts = [call.parts[rank] for call in calls for rank in call.waiting]
    states = dict.fromkeys(part.state or "no state" for part in parts)
    if any(call.is_over for call in calls):
        states["timed out"] = None
    names = ", ".join(states)
    # Without TORCH_NCCL_ENABLE_TIMING nothing records a start.
    names += ": it may have started unrecorded" if names == "scheduled" else ""
    place = f" in {where}" if where else ""
    verb = _number(ranks, "waits", "wait")
    return f"{ranks_text(ranks)} {verb}{_span(calls)}{place} ({names})"


def _span(calls: Sequence[Call]) -> str:
    """Return e.g. " 600.1 s", the longest wait in calls that timed out."""
    if not any(call.is_over for call in calls):
        return ""
    parts = [call.parts[rank] for call in calls for rank in call.waiting]
    return f" {format_time(max(part.seconds for part in parts))}"


def _number(ranks: Collection[int], singular: str, plural: str) -> str:
    """Return the words that agree with so many ranks."""
    return singular if len(ranks) == 1 else plural


def _have(ranks: Collection[int]) -> str:
    return _number(ranks, "has", "have")
