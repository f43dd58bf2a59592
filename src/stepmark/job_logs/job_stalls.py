"""Why the ranks of a job do not go on, by all its files: one cause, not one per file."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.findings.log_facts import LogFacts, Mismatch
from stepmark.findings.stalls import MISSING, Cause, causes
from stepmark.findings.wait_graph import merged
from stepmark.job_logs.flight_recorder import waits as dump_waits
from stepmark.job_logs.flight_recorder.groups import groups_of
from stepmark.job_logs.flight_recorder.operations import Dump
from stepmark.job_logs.nccl_log import waits as log_waits


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStalls:
    """Causes, and mismatches of the log that follow from them: calls after a time-out."""

    causes: tuple[Cause, ...]
    late: tuple[Mismatch, ...]


def stalls_of(facts: LogFacts, dumps: Sequence[Dump] = ()) -> JobStalls:
    """Return what time-outs, logged calls and dumps show together."""
    graph, found = log_waits.shown_by(facts)
    if dumps:
        dump_graph, dump_found = dump_waits.shown_by(groups_of(dumps))
        graph, found = merged(dump_graph, graph), [*dump_found, *found]
    certain = [one for one in facts.mismatches if one.certain]
    late = [one for one in certain if _is_late(facts, one)]
    if late and not any(cause.rule == MISSING for cause in causes(graph, found)):
        late = []
    ranks = log_waits.job_ranks(facts.communicators)
    logged = [log_waits.logged(one, ranks) for one in certain if one not in late]
    return JobStalls(causes=tuple(causes(graph, [*logged, *found])), late=tuple(late))


def _is_late(facts: LogFacts, mismatch: Mismatch) -> bool:
    """Return whether a call of the mismatch was issued after a rank had timed out."""
    timed_out = [state.evidence for state in facts.progress if state.waits_in is not None]
    first = min(timed_out, key=lambda line: (line.file, line.line), default=None)
    return first is not None and any(
        side.evidence.file == first.file and side.evidence.line > first.line
        for side in mismatch.sides
    )
