"""What time-outs of collectives show: the rank that others wait for, a cycle, or neither."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import GroupProgress, LogFacts
from stepmark.job_logs.nccl_log.network_rules import comma_list, finding_of

UNSEEN = "No line shows what was done instead."
_PROBLEM = Severity.PROBLEM


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {comma_list(ranks)}"


def missing_anywhere(facts: LogFacts) -> set[int]:
    """Return the ranks that did not join what others waited in."""
    return {rank for wait in _groups(facts) for rank in _missing(facts, wait)}


def _groups(facts: LogFacts) -> list[list[GroupProgress]]:
    """Return the states of each group in which a rank timed out."""
    groups: dict[str, list[GroupProgress]] = {}
    for state in facts.progress:
        groups.setdefault(state.group, []).append(state)
    return [
        states
        for states in groups.values()
        if any(state.waits_in is not None for state in states)
    ]


def _missing(facts: LogFacts, states: Sequence[GroupProgress]) -> dict[int, Evidence]:
    """Return the ranks that did not join what others of the group waited in."""
    first = min(state.waits_in for state in states if state.waits_in is not None)
    ranks = {state.group_rank: state.rank for state in states}
    waiting = {state.rank for state in states if state.waits_in is not None}
    missing: dict[int, Evidence] = {}
    for absent in facts.absent:
        rank = ranks.get(absent.rank, absent.rank)
        if absent.group in (states[0].group, "?") and rank not in waiting:
            missing.setdefault(rank, absent.evidence)
    for state in states:
        if state.waits_in is None and state.enqueued is not None and state.enqueued < first:
            missing.setdefault(state.rank, state.evidence)
    return missing


def waits_of(facts: LogFacts) -> Iterator[Finding]:
    """Yield what time-outs show: a rank that did not come, a cycle, or that it is unknown."""
    groups = _groups(facts)
    if not groups:
        return
    if different := next(filter(None, map(_different_calls, groups)), None):
        yield different
        return
    missing = [_missing(facts, states) for states in groups]
    waits_for = {
        state.rank: absent
        for states, absent in zip(groups, missing, strict=True)
        for state in states
        if state.waits_in is not None and absent
    }
    if cycle := _cycle(waits_for):
        yield _deadlock(groups, missing, cycle)
        return
    for states, absent in zip(groups, missing, strict=True):
        ends = [rank for rank in absent if rank not in waits_for]
        if ends:
            yield _missing_rank(states, {rank: absent[rank] for rank in ends})
            return
    behind = {one.rank: one for one in facts.behind if one.rank is not None}
    if len({one.communicator for one in facts.behind}) == 1 and behind and not any(missing):
        lines = {rank: one.missing.evidence for rank, one in behind.items()}
        yield _missing_rank(groups[0], lines)
        return
    yield _unknown_wait(groups)


def _cycle(waits_for: dict[int, dict[int, Evidence]]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first."""
    for start in waits_for:
        path = [start]
        while True:
            step = next((rank for rank in waits_for[path[-1]] if rank in waits_for), None)
            if step is None:
                break
            if step in path:
                return path[path.index(step) :]
            path.append(step)
    return []


def _waiting_text(states: Sequence[GroupProgress]) -> str:
    """Return e.g. "rank 0 waited 15 s in collective 4 (all_reduce) of group 0"."""
    parts = []
    for state in states:
        group = f" of group {state.group}" if state.group else ""
        call = f" ({state.call})" if state.call else ""
        parts.append(
            f"rank {state.rank} waited {state.seconds or 0:.4g} s in collective "
            f"{state.waits_in}{call}{group}"
        )
    return comma_list(parts, most=4)


def _waiting(states: Iterable[GroupProgress]) -> list[GroupProgress]:
    return sorted(
        (state for state in states if state.waits_in is not None),
        key=lambda state: (state.waits_in or 0, state.rank),
    )


def _missing_rank(states: Sequence[GroupProgress], absent: dict[int, Evidence]) -> Finding:
    waiting = _waiting(states)
    who = ranks_text(sorted(absent))
    text = (
        f"{who[:1].upper()}{who[1:]} did not join a collective: {_waiting_text(waiting)}. "
        f"{UNSEEN}"
    )
    lines = [*absent.values(), *(state.evidence for state in waiting)]
    action = (
        f"Look at the code of {who} at that point (py-spy dump, flight-recorder dumps): a slow "
        "data loader or checkpoint, a branch without the call, or a process that hangs."
    )
    finding = finding_of("failure-missing-rank", _PROBLEM, text, lines)
    return replace(finding, action=action, ranks=tuple(sorted(absent)))


def _deadlock(
    groups: Sequence[Sequence[GroupProgress]],
    missing: Sequence[dict[int, Evidence]],
    cycle: Sequence[int],
) -> Finding:
    states = [state for group in groups for state in _waiting(group) if state.rank in cycle]
    order = " for ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
    text = (
        f"Ranks wait for each other in different groups ({order}): {_waiting_text(states)}. "
        "They use the groups in different order."
    )
    lines = [line for absent in missing for line in absent.values()]
    lines += [state.evidence for state in states]
    action = "Issue collectives of all groups in one order on every rank."
    finding = finding_of("failure-deadlock", _PROBLEM, text, lines)
    return replace(finding, action=action, ranks=tuple(sorted(cycle)))


def _unknown_wait(groups: Sequence[Sequence[GroupProgress]]) -> Finding:
    states = [state for group in groups for state in _waiting(group)]
    waiting = [_waiting(group) for group in groups]
    apart = [group for group in waiting if group[0].waits_in != group[-1].waits_in]
    behind = sorted(
        {s.rank for group in apart for s in group if s.waits_in == group[0].waits_in}
    )
    text = f"Collectives timed out: {_waiting_text(states)}. "
    if apart:
        verb = "is" if len(behind) == 1 else "are"
        text += (
            f"{ranks_text(behind).capitalize()} {verb} behind: other ranks wait in a later "
            "collective of the same group. Calls of different kind or size were paired, or a "
            "collective ended on some ranks only"
        )
    else:
        text += (
            "No line shows a rank that did not join: a rank without lines here, different "
            "calls, or data that stopped flowing. The cause is unknown"
        )
    action = (
        "Set TORCH_NCCL_TRACE_BUFFER_SIZE (TORCH_FR_BUFFER_SIZE) for flight-recorder dumps, or "
        "NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=INIT,COLL, and read the logs of all ranks."
    )
    finding = finding_of("failure-timeout", _PROBLEM, text + ".", [s.evidence for s in states])
    return replace(finding, action=action, ranks=tuple(behind))


def _different_calls(states: Sequence[GroupProgress]) -> Finding | None:
    """Return that ranks of a group timed out in one collective that differs between them."""
    by_number: dict[int | None, list[GroupProgress]] = {}
    for state in _waiting(states):
        if state.call and not state.call.startswith(_UNNUMBERED):
            by_number.setdefault(state.waits_in, []).append(state)
    for same in by_number.values():
        # What a rank gives differs by rank in others, such as gather and all_to_all.
        calls = {
            state.call if state.call.startswith(_EQUAL) else state.call.partition(" of ")[0]
            for state in same
        }
        if len(calls) > 1:
            text = f"Ranks issued different calls as one collective: {_waiting_text(same)}."
            finding = finding_of("failure-mismatch", _PROBLEM, text, [s.evidence for s in same])
            action = "Make the ranks issue the same collectives in one order, of equal size."
            return replace(finding, action=action)
    return None


_UNNUMBERED = ("send", "recv", "coalesced", "unknown")
_EQUAL = ("all_reduce", "broadcast")
