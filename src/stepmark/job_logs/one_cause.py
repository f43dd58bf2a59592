"""Join what a log and flight-recorder dumps of one job show: one cause, not two."""

from collections.abc import Sequence
from dataclasses import replace

from stepmark.findings.finding import Finding, Severity
from stepmark.job_logs.nccl_log.waits import ranks_text

# Findings of a log that state how a rank waited or was ended, but not why.
_WAITS = frozenset(
    f"failure-{name}"
    for name in (
        *("timeout", "missing-rank", "deadlock", "store-wait", "heartbeat", "terminated"),
        *("time-limit", "stopped", "teardown", "aborted", "peer-closed", "store-lost"),
        *("worker-lost", "nccl", "exit", "abort"),
    )
)
_MISMATCHES = frozenset({"call-mismatch", "p2p-mismatch", "failure-mismatch"})
# What the dumps must show to agree with a wait that names a cause.
_SAME = {
    "failure-missing-rank": ("fr-hang", "fr-unknown"),
    "failure-deadlock": ("fr-deadlock",),
}
_NAMING = ("fr-hang", "fr-deadlock", "fr-mismatch")


def join_findings(
    log: Sequence[Finding], dumps: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of both, with what one proves of the other's cause below that."""
    cause = next((one for one in log if one.severity is Severity.PROBLEM), None)
    shown = [one for one in dumps if one.severity is Severity.PROBLEM]
    if not shown:
        return list(log), list(dumps)
    if cause is None:
        behind = [one for one in log if one.rule == "behind"]
        rest = [one for one in log if one not in behind]
        return rest, [_with_consequences(shown[0], behind), *_without(dumps, shown[:1])]
    named = next((one for one in shown if _explains(one, cause)), None)
    if named is not None:
        joined = _with_consequences(named, [replace(cause, consequences=())])
        joined = _with_consequences(joined, cause.consequences)
        return [_moved("dumps"), *_without(log, [cause])], [joined, *_without(dumps, [named])]
    agreeing = [one for one in shown if _agrees(one, cause)]
    others = [one for one in shown if one not in agreeing]
    notes = [replace(one, severity=Severity.NOTE) for one in agreeing]
    joined = replace(cause, chain=(*cause.chain, *notes))
    if others:
        joined = _contradicted(joined, "dumps", others[0])
    rest = [_contradicted(one, "log", cause) for one in others]
    moved = [_moved("log")] if agreeing else []
    first = [joined if one is cause else one for one in log]
    return first, [*rest, *moved, *_without(dumps, shown)]


def _explains(shown: Finding, cause: Finding) -> bool:
    """Return whether the dumps name the cause of a wait that the log leaves open."""
    if cause.rule not in _WAITS or shown.rule not in _NAMING:
        return False
    if cause.rule in _SAME and shown.rule == "fr-hang":
        return False
    return shown.rule not in _SAME.get(cause.rule, ())


def _agrees(shown: Finding, cause: Finding) -> bool:
    """Return whether the dumps prove the cause, or what follows from it."""
    if cause.ranks and shown.ranks and not set(cause.ranks) & set(shown.ranks):
        return False
    if cause.rule in _SAME:
        return shown.rule in _SAME[cause.rule]
    if cause.rule in _MISMATCHES:
        return True
    return shown.rule not in ("fr-mismatch", "fr-deadlock")


def _contradicted(finding: Finding, source: str, other: Finding) -> Finding:
    who = f" (of {ranks_text(other.ranks)})" if other.ranks else ""
    verb = "shows" if source == "log" else "show"
    text = f"{finding.text} The {source} of this job {verb} another problem{who}, {other.rule}"
    text += ": that contradicts this, or is of another time, or there are two faults."
    return replace(finding, text=text)


def _with_consequences(finding: Finding, more: Sequence[Finding]) -> Finding:
    notes = (replace(one, severity=Severity.NOTE) for one in more)
    return replace(finding, consequences=(*finding.consequences, *notes))


def _without(findings: Sequence[Finding], left_out: Sequence[Finding]) -> list[Finding]:
    return [one for one in findings if one not in left_out]


def _moved(source: str) -> Finding:
    text = f"The cause is shown with the {source}; what is shown here is part of it."
    return Finding(rule="joined", severity=Severity.NOTE, text=text)
