"""What the output of a job shows of its ranks' calls: time-outs, states, logged calls.

The watchdog's lines name ranks that timed out; others of their group are known by a line on
their state, by another rank's report, or not at all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepmark.findings.disagreement import Disagreement, sides_text, suspects_of
from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import (
    AbsentRank,
    Communicator,
    GroupProgress,
    LogFacts,
    Mismatch,
)
from stepmark.findings.wait_graph import Call, Part, WaitGraph, find_behind
from stepmark.ground.units import ranks_text

MAX_HOLES = 1024
TIME_OUTS = "time-outs"
LOG = "log"
# Watchdogs count these on one rank alone, or give each a size of its own.
_UNNUMBERED = ("send", "recv", "coalesced", "unknown")
_EQUAL = ("all_reduce", "broadcast")


@dataclass(slots=True)
class _Group:
    """A process group by the lines of its ranks; no two have one rank in the group."""

    name: str  # as the lines give it, e.g. "7(tp)"; "" unknown
    states: dict[int, GroupProgress] = field(default_factory=dict)  # by rank in the group

    @property
    def label(self) -> str:
        name, _, words = self.name.partition("#")[0].partition("(")
        return f"group {name} {words.rstrip(')')}".strip() if name else ""

    def title(self, number: int) -> str:
        """Return e.g. 'collective 7 of group 98 TP'; without a group where no line names it."""
        title = f"collective {number}"
        return f"{title} of {self.label}" if self.label else title

    @property
    def numbers(self) -> list[int]:
        """Numbers of the collectives that timed out."""
        return sorted(
            {n for state in self.states.values() if (n := state.waits_in) is not None}
        )

    def rank_of(self, group_rank: int) -> int | None:
        """Return the rank in the job: as a line states it, or if both are the same in all."""
        if state := self.states.get(group_rank):
            return state.rank
        is_same = all(place == state.rank for place, state in self.states.items())
        return group_rank if is_same else None


def shown_by(facts: LogFacts) -> tuple[WaitGraph, list[Disagreement]]:
    """Return what the output shows: who waits for whom, and calls that differ."""
    groups = [group for group in _groups(facts.progress) if group.numbers]
    found = [one for group in groups for one in _disagreements(group)]
    calls = {(group.name, n): _call(facts, group, n) for group in groups for n in group.numbers}
    fronts: dict[int, list[Call]] = {}
    for group in groups:
        for state in group.states.values():
            if state.waits_in is not None:
                fronts.setdefault(state.rank, []).append(calls[group.name, state.waits_in])
    _add_lagging(facts, list(calls.values()))
    find_behind(fronts)
    known = {rank for call in calls.values() for rank in (*call.parts, *call.absent)}
    return WaitGraph(fronts=fronts, free=frozenset(known - fronts.keys())), found


def _groups(states: Sequence[GroupProgress]) -> Iterator[_Group]:
    """Yield the groups. Ranks with one place in a group are of different groups of one name.

    A number of a group without its id (PG 6) counts in each process alone.
    """
    by_name: dict[str, list[_Group]] = {}
    for state in states:
        known = by_name.setdefault(state.group, [])
        own = next((one for one in known if state.group_rank not in one.states), None)
        if own is None:
            own = _Group(state.group if not known else f"{state.group}#{len(known) + 1}")
            known.append(own)
        own.states[state.group_rank] = state
    for groups in by_name.values():
        yield from groups


def _call(facts: LogFacts, group: _Group, number: int) -> Call:
    parts: dict[int, Part] = {}
    absent: dict[int, Evidence | None] = {}
    unknown: dict[int, str] = {}
    remarks: list[str] = []
    for state in group.states.values():
        if state.waits_in == number:
            seconds = state.seconds or 0.0
            parts[state.rank] = Part(
                state.call, "timed out", False, (state.evidence,), seconds, is_over=True
            )
        elif number <= max(state.enqueued or 0, state.waits_in or 0):
            is_done = number <= max(state.completed or 0, (state.waits_in or 1) - 1)
            parts[state.rank] = Part("", "issued", is_done, (state.evidence,))
        elif state.enqueued is not None:
            absent[state.rank] = state.evidence
            if state.completed is not None and state.completed < state.enqueued:
                remarks.append(
                    f"rank {state.rank} had enqueued {state.enqueued} and completed "
                    f"{state.completed}: it may wait there"
                )
        elif state.waits_in is not None:
            absent[state.rank] = None  # it waits in an earlier one
        else:
            unknown[state.rank] = "without a line on its progress"
    for report in _reports(facts, group):
        rank = group.rank_of(report.rank)
        rank = report.rank if rank is None else rank
        if rank not in parts and absent.get(rank) is None:
            absent[rank] = report.evidence
            unknown.pop(rank, None)
    named = {*group.states, *(report.rank for report in _reports(facts, group))}
    holes = sorted(set(range(min(max(named), MAX_HOLES))) - named)
    # Of a group that few lines are of, the log is a part.
    if holes and len(holes) <= len(named):
        ranks = [group.rank_of(place) for place in holes]
        if None in ranks:
            places = ", ".join(map(str, holes[:8])) + (", ..." if len(holes) > 8 else "")
            remarks.append(f"Without a line here: rank {places} within the group")
        else:
            unknown |= {rank: "without a line here" for rank in ranks if rank is not None}
    return Call(
        group=group.label,
        name=group.name.partition("(")[0],
        number=number,
        title=group.title(number),
        parts=parts,
        absent=absent,
        unknown=unknown,
        is_open=True,
        remark="; ".join(remarks),
    )


def _reports(facts: LogFacts, group: _Group) -> Iterator[AbsentRank]:
    """Yield what ranks of the group report on others that did not join."""
    for report in facts.absent:
        state = group.states.get(report.rank)
        has_waited = state is not None and state.waits_in is not None
        if report.group in (group.name, "?") and not has_waited:
            yield report


def _add_lagging(facts: LogFacts, calls: Sequence[Call]) -> None:
    """Note ranks that logged fewer calls, where nothing else shows who is missing."""
    lines = {one.rank: one.missing.evidence for one in facts.behind if one.rank is not None}
    is_one = len({one.communicator for one in facts.behind}) == 1
    if is_one and len(calls) == 1 and not calls[0].absent:
        for rank, line in lines.items():
            if rank not in calls[0].parts:
                calls[0].absent[rank] = line
                calls[0].unknown.pop(rank, None)


def _disagreements(group: _Group) -> Iterator[Disagreement]:
    """Yield that ranks of a group timed out in one collective that differs between them."""
    for number in group.numbers:
        same = [state for state in group.states.values() if state.waits_in == number]
        sides: dict[str, list[GroupProgress]] = {}
        for state in same:
            if state.call and not state.call.startswith(_UNNUMBERED):
                # What a rank gives differs by rank in others, such as gather and all_to_all.
                is_whole = state.call.startswith(_EQUAL) and " of " in state.call
                words = state.call if is_whole else state.call.partition(" of ")[0]
                sides.setdefault(words, []).append(state)
        if len(sides) < 2:
            continue
        by_size = sorted(sides.values(), key=len)
        ranks = [tuple(state.rank for state in side) for side in by_size]
        calls = sides_text(
            (who, side[0].call) for who, side in zip(ranks, by_size, strict=True)
        )
        yield Disagreement(
            source=TIME_OUTS,
            group=group.label,
            text=f"{group.title(number)} ({calls})",
            suspects=suspects_of(ranks),
            evidence=tuple(side[0].evidence for side in by_size),
        )


def logged(mismatch: Mismatch, job_ranks: Mapping[str, int]) -> Disagreement:
    """Return logged calls that differ. job_ranks: of processes with one rank."""
    label = f"communicator {mismatch.communicator}"
    words = []
    sides = []
    for issuers, side in zip(mismatch.issuers, mismatch.sides, strict=True):
        ranks = [rank for _, rank in issuers if rank is not None]
        words.append(f"{ranks_text(ranks) if ranks else side.process}: {side.call}")
        named = (job_ranks.get(process, rank) for process, rank in issuers)
        sides.append(tuple(rank for rank in named if rank is not None))
    return Disagreement(
        source=LOG,
        group=label,
        text=f"call {mismatch.position + 1} of {label} ({'; '.join(reversed(words))})",
        suspects=suspects_of(sorted(sides, key=len)),
        evidence=tuple(side.evidence for side in mismatch.sides),
    )


def job_ranks(groups: Sequence[Communicator]) -> dict[str, int]:
    """Return the rank in the largest communicator, of processes that have one there."""
    largest = max(groups, key=lambda group: group.num_ranks or 0, default=None)
    if largest is None:
        return {}
    counts = Counter(member.process for member in largest.members)
    return {
        member.process: member.rank
        for member in largest.members
        if member.rank is not None and member.process and counts[member.process] == 1
    }
