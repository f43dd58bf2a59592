"""Why the ranks of a job do not go on, by all its files: one cause, not one per file."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.findings.disagreement import Disagreement
from stepmark.findings.log_facts import LogFacts, Mismatch
from stepmark.findings.stalls import MISSING, Cause, causes
from stepmark.findings.wait_graph import WaitGraph, merged
from stepmark.job_logs.flight_recorder import waits as dump_waits
from stepmark.job_logs.flight_recorder.groups import groups_of
from stepmark.job_logs.flight_recorder.operations import Dump
from stepmark.job_logs.flight_recorder.trace_text import TracedCall
from stepmark.job_logs.nccl_log import waits as log_waits
from stepmark.job_logs.reports import shown_by_analyzer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStalls:
    """Causes, and mismatches of the log that follow from them: calls after a time-out."""

    causes: tuple[Cause, ...]
    late: tuple[Mismatch, ...] = ()


def stalls_of(
    facts: LogFacts | None, dumps: Sequence[Dump] = (), traced: Sequence[TracedCall] = ()
) -> JobStalls:
    """Return what time-outs, logged calls, dumps and their analysis show together."""
    graph = WaitGraph(fronts={})
    found = list[Disagreement]()
    sources = [log_waits.shown_by(facts)] if facts else []
    sources += [shown_by_analyzer(traced)] if traced else []
    sources += [dump_waits.shown_by(groups_of(dumps))] if dumps else []
    for shown, differing in sources:
        graph = merged(shown, graph)
        found = [*differing, *found]
    certain = [one for one in facts.mismatches if one.certain] if facts else []
    late = [one for one in certain if facts and _is_late(facts, one)]
    if late and not any(cause.rule == MISSING for cause in causes(graph, found)):
        late = []
    ranks = log_waits.job_ranks(facts.communicators) if facts else {}
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
