"""The answer of `stepmark logs`: failed or hung, finished and what shows it, or unknown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import starmap

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import LogFacts, Member
from stepmark.findings.stalls import ARRIVED, DEADLOCK, MISSING, UNKNOWN
from stepmark.ground.reading import Table
from stepmark.ground.units import comma_list, plural
from stepmark.job_logs.nccl_log.start_rules import is_complete
from stepmark.text_tables.nccl_notes import OUT_OF_BOUNDS


class JobState(StrEnum):
    """State of a job, as its files show it."""

    FAILED = "failed or hung"
    FINISHED = "finished"
    UNKNOWN = "unknown whether it ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`text` is one sentence, `evidence` the lines that show the end or the failure."""

    state: JobState
    text: str
    evidence: tuple[Evidence, ...] = ()


# Findings of a job that stands still, unless it still ran or its log was cut.
INCOMPLETE = frozenset(
    {"table-incomplete", "init-incomplete", "behind", "p2p-unpaired", "uncertain-failure"}
)
# That a job ended does not say how, where its communicators were aborted.
ABORTED = "communicators-aborted"
# With them an end that a line states is not that of everything in the files.
_NO_END = frozenset({"table-incomplete", "several-jobs", "after-end", "uncertain-failure"})
# Findings on what a file lost; every view shows them.
DAMAGE = frozenset({"torn-lines", "lost-lines", "cut-lines", "rows-missing", "rounded-sizes"})
# Older versions print "Destroy COMPLETE" of communicators whose process fails later.
_DESTROYS_AT_END = (2, 27)
_MAX_QUOTED = 160
# Findings of ranks that wait, and those whose text has the line's words already.
_OWN_WORDS = frozenset(
    {MISSING, DEADLOCK, ARRIVED, UNKNOWN, "failure-python", "failure-unknown", "failure-warned"}
)


def as_ended(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings of a job that ended: what is incomplete failed."""
    return tuple(
        replace(
            one,
            severity=Severity.PROBLEM,
            text=one.text.replace(", or still ran,", ",").replace(" or it still ran", ""),
        )
        if one.rule in INCOMPLETE and one.severity is Severity.WARNING
        else one
        for one in findings
    )


def answer_of(
    findings: Sequence[Finding],
    tables: Sequence[tuple[Table, Sequence[Finding]]],
    endings: Sequence[Evidence],
    summary: str,
    *,
    is_ended: bool,
    headline: str = "",
) -> Answer:
    """Return the answer over all parts; is_ended: the user states that the job ended.

    headline: the figures of its training, which come first unless the job failed.
    """
    of_tables = [(table, one) for table, found in tables for one in found]
    every = [*findings, *(one for _, one in of_tables)]
    in_tables = comma_list(filter(None, starmap(_table_text, of_tables)), most=3)
    if any(one.severity is Severity.PROBLEM for one in every):
        problems = [one for one in findings if one.severity is Severity.PROBLEM][:1]
        words = [*(_quoted(one) for one in problems), in_tables, headline]
        text = "; ".join(word.rstrip(".") for word in words if word)
        return Answer(
            state=JobState.FAILED,
            text=f"{text} ({_tally(every)})",
            evidence=problems[0].evidence if problems else (),
        )
    doubts = {*INCOMPLETE, ABORTED} if is_ended else INCOMPLETE
    incomplete = [one for one in findings if one.rule in doubts]
    after_end = [one for one in findings if one.rule == "after-end"]
    if {one.rule for one in findings} & _NO_END:
        endings = ()
    evidence = tuple(endings[-1:])
    hint = "" if is_ended else " (--ended if it ended)"
    is_finished = endings or (is_ended and not incomplete)
    state = JobState.FINISHED if is_finished else JobState.UNKNOWN
    if endings:
        last = endings[-1]
        how = f'"{last.text.strip()[:_MAX_QUOTED]}" ({last.file}:{last.line})'
    elif is_finished:
        how = "--ended states it, and no line states a failure"
    elif after_end or incomplete:
        doubt = (after_end or incomplete)[0]
        evidence = doubt.evidence
        end = f': "{evidence[0].text.strip()[:_MAX_QUOTED]}"' if after_end else hint
        how = f"{doubt.text[:1].lower()}{doubt.text[1:].rstrip('.')}{end}"
    else:
        how = f"no line shows an end, a failure or a hang{hint}"
    parts = filter(None, [headline, f"{state}: {how}", in_tables, summary])
    return Answer(state=state, text=f"{'; '.join(parts)} ({_tally(every)})", evidence=evidence)


def _quoted(problem: Finding) -> str:
    """Return a problem; a failure with the line that states it: host, process and figures."""
    if not problem.rule.startswith("failure-") or problem.rule in _OWN_WORDS:
        return problem.text
    line = problem.evidence[0].text.strip() if problem.evidence else ""
    quote = line[:_MAX_QUOTED] + ("..." if len(line) > _MAX_QUOTED else "")
    return f'{problem.text.rstrip(".")}: "{quote}"' if line else problem.text


def _tally(findings: Sequence[Finding]) -> str:
    """Return e.g. "1 problem, 2 warnings"."""
    counts = Counter(finding.severity for finding in findings)
    words = [plural(counts[kind], kind) for kind in reversed(Severity) if counts[kind]]
    return ", ".join(words) or "no findings"


def _table_text(table: Table, finding: Finding) -> str:
    """Return wrong results or missing rows in a few words; "" for other findings."""
    if finding.rule == "rows-missing":
        return finding.text
    if finding.severity is not Severity.PROBLEM:
        return ""
    if not any(note.startswith(OUT_OF_BOUNDS) for note in table.notes):
        return finding.text
    head, colon, rest = finding.text.partition(":")
    return f"{head}, footer FAILED{colon}{rest}"


def endings_of(facts: LogFacts) -> list[Evidence]:
    """Return the lines that show the end of a job, those of its last start."""
    members = [member for group in facts.communicators for member in group.members]
    starts = [member.started for member in members if member.started is not None]
    stated = [
        line
        for line in facts.endings
        if not any(one.file == line.file and one.line > line.line for one in starts)
    ]
    return [*_destroyed(facts, members), *stated]


def _destroyed(facts: LogFacts, members: Sequence[Member]) -> list[Evidence]:
    """Return a line of the end of each communicator, if all ranks of all of them ended."""
    versions = [text for library, text in facts.versions if library in ("nccl", "rccl")]
    numbers = [tuple(map(int, text.split("-")[0].split(".")[:2])) for text in versions]
    is_whole = all(is_complete(group) for group in facts.communicators)
    if not members or not numbers or min(numbers) < _DESTROYS_AT_END or not is_whole:
        return []
    lines = [member.destroyed for member in members if member.destroyed is not None]
    return lines[-1:] if len(lines) == len(members) else []
