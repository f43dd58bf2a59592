"""What reports of other tools show of a job's ranks: NCCL's RAS, torch's analyzer of dumps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from stepmark.findings.disagreement import Disagreement, sides_text, suspects_of
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.stalls import causes
from stepmark.findings.wait_graph import Call, Part, WaitGraph, find_behind
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder.trace_text import TracedCall, TraceProblem
from stepmark.job_logs.ras_report import RasReport, RasSide, RasStatement

TRACE_TEXT = "analysis of the dumps"
_MOVING = (
    "Counts of a job that runs differ for a moment: a second report shows whether they move"
)
_WAITS = (TraceProblem.MISSING_RANKS, TraceProblem.UNDECIDED, TraceProblem.NO_ERROR)
_PROCESS_ACTION = "Look at this process and its node: its own output, dmesg, the GPU (Xid)."


def shown_by_analyzer(traced: Sequence[TracedCall]) -> tuple[WaitGraph, list[Disagreement]]:
    """Return what torch's analyzer shows: who waits for whom, and calls that differ."""
    calls = [
        _traced_call(one)
        for one in traced
        if one.problem in _WAITS and one.sequence is not None
    ]
    fronts: dict[int, list[Call]] = {}
    for call in sorted(calls, key=lambda call: call.number or 0):
        for rank in call.waiting:
            own = fronts.setdefault(rank, [])
            if call.group not in {other.group for other in own}:
                own.append(call)
    find_behind(fronts)
    found = [found for one in traced for found in _traced_mismatches(one)]
    return WaitGraph(fronts=fronts), found


def _label(one: TracedCall) -> str:
    return f"group {one.group} {one.description}".strip()


def _traced_call(one: TracedCall) -> Call:
    members = one.expected_ranks or tuple(range(one.num_expected or 0))
    lacking = {*one.missing_ranks, *one.ranks_without_dump}
    elements = sum(map(prod, one.input_sizes or ()))
    words = f"{one.kind} of {elements} elements" if elements else one.kind
    part = Part(words, one.state, False, tuple(one.evidence[:1]))
    return Call(
        group=_label(one),
        name=one.group,
        number=one.sequence,
        title=f"collective {one.sequence} of {_label(one)}",
        parts={rank: part for rank in members if rank not in lacking},
        absent=dict.fromkeys(one.missing_ranks, one.evidence[-1]),
        unknown=dict.fromkeys(one.ranks_without_dump, "without a dump"),
        is_open=not members,
    )


def _traced_mismatches(one: TracedCall) -> Iterator[Disagreement]:
    for mismatch in one.mismatches:
        sides = [side for side in mismatch.sides if side.ranks]
        if not sides:
            continue
        words = sides_text(
            (side.ranks, side.words or f"another {mismatch.subject}") for side in sides
        )
        what = mismatch.subject or mismatch.error
        yield Disagreement(
            source=TRACE_TEXT,
            group=_label(one),
            text=f"the {what} of collective {one.sequence} of {_label(one)} ({words})",
            suspects=suspects_of(sorted((side.ranks for side in sides), key=len)),
            evidence=tuple(one.evidence),
        )


def ras_findings(report: RasReport) -> list[Finding]:
    """Return what a RAS report states: a dead process first, which explains the rest."""
    lost = [_lost(one) for one in report.statements if one.kind in ("DEAD", "INCOMPLETE")]
    lost.sort(key=lambda finding: finding.rule != "ras-dead")
    others: list[Finding] = []
    for one in report.statements:
        if (
            one.kind == "MISMATCH"
            and one.subject != "status"
            and all(s.ranks for s in one.sides)
        ):
            others += [cause.finding() for cause in causes(_counts(one), [])]
        elif one.kind in ("MISMATCH", "ERROR"):
            others.append(_stated(one))
        elif one.kind == "TIMEOUT":
            text = "Processes did not answer in time while the report was made."
            others.append(_finding("ras-timeout", text, [one.evidence], Severity.WARNING))
    stated = {word for row in report.groups for word in (*row.errors, row.status)}
    has_problem = any(one.severity is Severity.PROBLEM for one in (*lost, *others))
    if not has_problem and stated & {"MISMATCH", "INCOMPLETE", "ERROR", "ABORT"}:
        text = f"The report states {', '.join(sorted(stated - {'RUNNING', 'OK'}))}."
        lines = [row.evidence for row in report.groups if row.errors or row.status == "ABORT"]
        others.append(_finding("ras-state", text, lines))
    if not report.is_whole:
        text = "The RAS report is cut, or its parts do not add up: more may be wrong."
        others.append(_finding("ras-cut", text, [report.evidence], Severity.WARNING))
    if not lost:
        return others
    cause, *rest = lost
    ranks = [one for one in rest if one.ranks]
    if cause.rule == "ras-dead" and len(ranks) == 1:
        # The same process, as a rank of its communicator.
        text = f"{cause.text.rstrip('.')}: {ranks_text(ranks[0].ranks)} without data."
        cause = replace(cause, text=text, ranks=ranks[0].ranks)
    explained = tuple(replace(one, severity=Severity.NOTE) for one in (*rest, *others))
    return [replace(cause, consequences=explained)]


def _finding(
    rule: str,
    text: str,
    lines: Sequence[Evidence],
    severity: Severity = Severity.PROBLEM,
    action: str = "",
    ranks: Sequence[int] = (),
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        text=text,
        evidence=tuple(dict.fromkeys(lines)),
        count=max(len(set(lines)), 1),
        action=action,
        ranks=tuple(ranks),
    )


def _communicator(one: RasStatement) -> str:
    return f"communicator {one.hash}" if one.hash else "the job"


def _places(sides: Sequence[RasSide]) -> str:
    """Return e.g. ' (GPU 5 of process 77 on node n1)' of the processes that are listed."""
    words = []
    for process in [process for side in sides for process in side.processes][:4]:
        gpus = f"GPU {process.gpus} of " if process.gpus else ""
        pid = f"process {process.pid}" if process.pid is not None else "a process"
        words.append(f"{gpus}{pid}" + (f" on node {process.node}" if process.node else ""))
    return f" ({'; '.join(words)})" if words else ""


def _ranks_of(sides: Sequence[RasSide]) -> list[int]:
    return sorted({rank for side in sides for rank in side.ranks})


def _lost(one: RasStatement) -> Finding:
    """Return ranks or processes of which RAS has no data."""
    ranks = _ranks_of(one.sides)
    where = _places(one.sides)
    count = one.count or sum(side.count for side in one.sides) or "some"
    lines = [one.evidence, *(side.evidence for side in one.sides)]
    if one.kind == "DEAD":
        verb = "process of the job is" if count == 1 else "processes of the job are"
        text = f"{count} {verb} dead by RAS, unreachable for it{where}."
        return _finding("ras-dead", text, lines, action=_PROCESS_ACTION, ranks=ranks)
    who = f"{ranks_text(ranks)} of {_communicator(one)}" if ranks else f"{count} of the job"
    text = f"RAS has no data of {who}{where}: the process is slow, stopped or dead."
    return _finding("ras-incomplete", text, lines, action=_PROCESS_ACTION, ranks=ranks)


def _stated(one: RasStatement) -> Finding:
    """Return different states, counts without ranks, or an error, in the report's own words."""
    sides = "; ".join(
        f"{ranks_text(side.ranks) if side.ranks else f'{side.count} ranks'}"
        f"{_places([side])}: {side.value}"
        for side in one.sides
    )
    lines = [one.evidence, *(side.evidence for side in one.sides)]
    smaller = _ranks_of(one.sides[1:] or one.sides)
    if one.kind == "ERROR":
        # A remote error follows from the process at the other end.
        own = [side for side in one.sides if not str(side.value).startswith("Remote")]
        smaller = _ranks_of(own or one.sides)
    what = {"MISMATCH": "differ in", "ERROR": "report an error:"}[one.kind]
    text = f"Ranks of {_communicator(one)} {what} {one.subject} ({sides})."
    if one.kind == "ERROR" and len(smaller) < len(_ranks_of(one.sides)):
        text += f" Remote errors follow from others: look at {ranks_text(smaller)} first."
    text += f" {_MOVING}." if one.kind == "MISMATCH" and one.subject != "status" else ""
    action = f"{_PROCESS_ACTION} Begin with {ranks_text(smaller)}." if smaller else ""
    return _finding(f"ras-{one.kind.lower()}", text, lines, action=action, ranks=smaller)


def _counts(one: RasStatement) -> WaitGraph:
    """Return who waits in the last operation that any rank has launched."""
    most = max(int(side.value) for side in one.sides)
    parts = {}
    absent = {}
    for side in one.sides:
        for rank in side.ranks:
            if side.value == most:
                parts[rank] = Part("", "launched", False, (one.evidence, side.evidence))
            else:
                absent[rank] = side.evidence
    kind = "operation" if one.subject == "collective" else one.subject
    label = _communicator(one)
    call = Call(
        group=label,
        name=one.hash,
        number=most,
        title=f"{kind} {most} of {label}",
        parts=dict(sorted(parts.items())),
        absent=dict(sorted(absent.items())),
        is_open=one.size is not None and len(parts) + len(absent) < one.size,
    )
    fronts = {rank: [call] for rank in call.parts}
    return WaitGraph(fronts=fronts, doubt=_MOVING)
