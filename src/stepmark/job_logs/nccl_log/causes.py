"""Link the findings of a job: the cause, the chain that leads to it, what follows from it.

A failure with a lower Role explains those with higher ones; of two with one Role the earlier is
named first. What is not explained stays a problem of its own.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import Failure, LogFacts, Role
from stepmark.findings.stalls import MISMATCH, MISSING
from stepmark.ground.grouping import group_by
from stepmark.ground.units import comma_list, ranks_text
from stepmark.job_logs.failures import XIDS
from stepmark.job_logs.job_output import GENERAL, REMARKS
from stepmark.job_logs.job_output.exits import FIRST_FAILURE
from stepmark.job_logs.nccl_log.network_rules import finding_of

_MAX_HOSTS = 4  # that a text names
# Findings of the log that are causes, and those that only show where ranks stopped.
_CAUSES = frozenset({MISMATCH, "p2p-mismatch"})
LATE = "late-call"  # a call that differs, issued after a time-out
_SYMPTOMS = frozenset({"behind", "p2p-unpaired", "init-incomplete", "table-incomplete", LATE})
# Variables that explain a finding, if they are set.
_SET_BY: dict[str, tuple[str, ...]] = {
    "failure-no-interface": ("NCCL_SOCKET_IFNAME",),
    "failure-no-algorithm": ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"),
    "failure-connect": ("NCCL_SOCKET_IFNAME",),
    "failure-ib-connect": ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_CROSS_NIC"),
    "failure-ib-retry": ("NCCL_IB_TIMEOUT", "NCCL_IB_GID_INDEX"),
    "failure-plugin": ("NCCL_NET_PLUGIN", "NCCL_NET", "FI_PROVIDER"),
    "failure-nvls": ("NCCL_NVLS_ENABLE",),
    "net-socket": ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"),
    "shm-instead-of-p2p": ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
    "no-gpudirect": ("NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "FI_EFA_USE_DEVICE_RDMA"),
    "ofi-tcp": ("FI_PROVIDER",),
    "plugin-not-loaded": ("NCCL_NET_PLUGIN",),
}
# Findings that explain an error which does not state its cause.
_EXPLAINS_VAGUE = frozenset({"warning", "failure-unknown", "ofi-tcp"})
# Words of a WARN line that reads like a failure, and of one after which NCCL continues.
LOOKS_FATAL = re.compile(
    r"\b(?:fail|error|fatal|abort|could ?n.t|could not|cannot|can.t|unable|invalid|mismatch"
    r"|corrupt|unhandled|exited|terminated|timed[ -]?out|timeout|hanging|deadlock|no such"
    r"|not (?:found|working|permitted|available)|missing|denied|refused)",
    re.IGNORECASE,
)
FALLS_BACK = re.compile(
    r"\b(?:default(?:ing|s) to|using (?:the )?default|fall(?:ing|s)?[ -]?back|ignor(?:ed|ing)"
    r"|will not be used|performance)",
    re.IGNORECASE,
)
_INSIDE_HOST = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL")
# Findings that lead to another one.
_LEADS_TO = {
    "net-socket": ("plugin-not-loaded", "plugin-missing", "failure-plugin"),
    "no-gpudirect": ("ofi-tcp",),
}


def linked(
    facts: LogFacts, findings: Sequence[Finding], stalls: Sequence[Finding]
) -> list[Finding]:
    """Return the findings with failures of the output, each under what explains it."""
    others = _with_settings(facts, _join_warnings(findings))
    failures = [(role, _with_hosts(facts, one)) for role, one in _failures(facts.failures)]
    stalls = [_with_hosts(facts, one) for one in stalls]
    ranked = [(role, place, finding) for place, (role, finding) in enumerate(failures)]
    problems = [one for one in stalls if one.severity is Severity.PROBLEM]
    others += [one for one in stalls if one.severity is not Severity.PROBLEM]
    ranked += [
        (Role.CAUSE if finding.rule in _CAUSES else Role.WAIT, -2, finding)
        for finding in problems
    ]
    for finding in others:
        if finding.rule in _CAUSES and finding.severity is Severity.PROBLEM:
            ranked.append((Role.CAUSE, -1, finding))
        elif finding.rule == "init-incomplete" and facts.has_failed:
            problem = replace(finding, severity=Severity.PROBLEM)
            ranked.append((Role.WAIT, -3 if _explains(facts, problems) else -1, problem))
    plain = [
        finding for finding in others if not any(finding.rule == f.rule for *_, f in ranked)
    ]
    if not any(role < Role.REMARK for role, *_ in ranked):
        return plain
    ranked.sort(key=lambda one: one[:2])
    if ranked[0][2].rule not in GENERAL:
        return _tree(facts, ranked, plain)
    warned = next((one for one in plain if _is_warned_cause(one, ranked[0][2])), None)
    if warned is not None:
        words = warned.text.removeprefix("NCCL warns: ")
        text = f"A call of NCCL failed after this warning: {words}"
        cause = replace(warned, rule="failure-warned", severity=Severity.PROBLEM, text=text)
        first = (ranked[0][0], -1, cause)
        return _tree(facts, [first, *ranked], [one for one in plain if one is not warned])
    if ranked[0][2].rule == "failure-nccl" and (facts.communicators or facts.networks):
        action = "No WARN line is in the log: look at the other ranks' logs and at dmesg."
        ranked[0] = (*ranked[0][:2], replace(ranked[0][2], action=action))
    return _tree(facts, ranked, plain)


def _with_hosts(facts: LogFacts, finding: Finding) -> Finding:
    """Return the finding with the hosts of its ranks, by the start of the largest group."""
    members = max((group.members for group in facts.communicators), key=len, default=())
    own = [one for one in members if one.rank in finding.ranks]
    hosts = sorted({one.host for one in own})
    if not 0 < len(hosts) <= _MAX_HOSTS or len({one.host for one in members}) == 1:
        return finding
    is_whole = 1 < len(own) == sum(one.host in hosts for one in members)
    verb = "are all ranks of" if is_whole else "are on" if len(own) > 1 else "is on"
    ranks = ranks_text(one.rank for one in own if one.rank is not None)
    text = f"{finding.text} {ranks.capitalize()} {verb} {comma_list(hosts)}."
    return replace(finding, text=text)


def _is_warned_cause(finding: Finding, failure: Finding) -> bool:
    """Return whether NCCL printed a warning, or runs on a bad provider, before a failure."""
    if finding.rule not in _EXPLAINS_VAGUE or not finding.evidence:
        return False
    if failure.rule != "failure-nccl" and not LOOKS_FATAL.search(finding.text):
        return False
    warned = finding.evidence[0]
    failed = failure.evidence[0]
    is_before = warned.file != failed.file or warned.line < failed.line
    return is_before and not FALLS_BACK.search(finding.text)


def _tree(
    facts: LogFacts, ranked: Sequence[tuple[Role, int, Finding]], plain: Sequence[Finding]
) -> list[Finding]:
    """Return the cause with what it explains, then other causes, then the rest."""
    role, _, cause = ranked[0]
    roots: list[Finding] = []
    explained: list[Finding] = []
    for other_role, _, finding in ranked[1:]:
        is_cause = other_role <= Role.CAUSE and role <= Role.CAUSE
        (roots if is_cause else explained).append(finding)
    rest = []
    chain = list(_settings(facts, cause.rule))
    for finding in plain:
        if finding.rule in _SYMPTOMS and role < Role.CONSEQUENCE:
            explained.append(finding)
        elif (finding.rule in _EXPLAINS_VAGUE or f"failure-{finding.rule}" in XIDS) and (
            role >= Role.SIGNAL
        ):
            chain.append(finding)
        else:
            rest.append(finding)
    first, explained = _same_process(facts, cause, explained)
    consequences = tuple(replace(one, severity=Severity.NOTE) for one in explained)
    chained = (*chain, *cause.chain, *first)
    text = " ".join([cause.text, *(one.text for one in chain if f"failure-{one.rule}" in XIDS)])
    followed = (*cause.consequences, *consequences)
    cause = replace(cause, text=text, chain=chained, consequences=followed)
    others = [replace(one, chain=(*_settings(facts, one.rule), *one.chain)) for one in roots]
    return [cause, *others, *rest]


def _same_process(
    facts: LogFacts, cause: Finding, explained: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Separate the launcher's report that names the failed process first."""
    first = next((one for one in facts.failures if one.detail == FIRST_FAILURE), None)
    if first is None or first.evidence in cause.evidence:
        return [], list(explained)
    text = f"By torchrun's report this process failed first: {_subject([first])} {first.text}."
    report = finding_of("first-failure", Severity.NOTE, text, [first.evidence])
    kept = [one for one in explained if first.evidence not in one.evidence or one.count > 1]
    return [report], kept


def _failures(failures: Sequence[Failure]) -> list[tuple[Role, Finding]]:
    """Return one finding per rule and role, in the order of their first line."""
    stated = [one for one in failures if one.rule not in ("failure-retried", *REMARKS)]
    groups = group_by(stated, _rule_and_words)
    return [(same[0].role, _finding(same)) for same in groups.values()]


def _rule_and_words(failure: Failure) -> tuple[str, str]:
    words = failure.detail if failure.rule == "failure-python" else ""
    return failure.rule, failure.text if failure.rule == "failure-unknown" else words


def _finding(failures: Sequence[Failure]) -> Finding:
    first = next((one for one in failures if one.place), failures[0])
    who = _who(failures)
    if first.rule == "failure-python" and first.detail:
        text = f"{_subject(failures)} raised {first.detail.rstrip('.')}"
    elif first.text[:1].islower():
        text = f"{_subject(failures)} {first.text}"
    else:
        detail = f" {first.detail}" if first.text.endswith(":") else ""
        text = f"{first.text}{detail}".rstrip(".")
        text += f" ({who})" if who else ""
    text += f", at {first.place}" if first.place else ""
    lines = [first.evidence, *(one.evidence for one in failures if one is not first)]
    finding = finding_of(first.rule, Severity.PROBLEM, text + ".", lines)
    chain: tuple[Finding, ...] = ()
    if first.place_evidence is not None:
        place = f"The exception was raised at {first.place}."
        chain = (finding_of("raised-at", Severity.NOTE, place, [first.place_evidence]),)
    count = sum(one.lines for one in failures)
    ranks = tuple(sorted({one.rank for one in failures if one.rank is not None}))
    return replace(finding, action=first.action, chain=chain, count=count, ranks=ranks)


def _subject(failures: Sequence[Failure]) -> str:
    """Return e.g. "Rank 1 (pid 785)"."""
    processes = comma_list(dict.fromkeys(one.process for one in failures if one.process))
    who = _who(failures)
    if who and processes.startswith("pid"):
        who += f" ({processes})"
    subject = who or processes or "a process"
    return subject[:1].upper() + subject[1:]


def _who(failures: Iterable[Failure]) -> str:
    """Return e.g. "ranks 0, 1"; "" where no line says it."""
    ranks = sorted({one.rank for one in failures if one.rank is not None})
    return ranks_text(ranks) if ranks else ""


def _settings(facts: LogFacts, rule: str, names: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the variables that are set and explain the finding."""
    for name in names or _SET_BY.get(rule, ()):
        for (variable, value), lines in facts.environment.items():
            if variable == name and not (name.endswith("_DISABLE") and value in ("", "0")):
                yield finding_of("set", Severity.NOTE, f"{name} is set to {value}.", [lines])


def _with_settings(facts: LogFacts, findings: Sequence[Finding]) -> list[Finding]:
    """Put variables under the findings that they explain, instead of beside them."""
    result = []
    used: set[Evidence] = set()
    for finding in findings:
        if finding.severity is Severity.NOTE:
            result.append(finding)
            continue
        names = _SET_BY.get(finding.rule, ())
        if finding.rule == "net-socket" and "one host" in finding.text:
            names = _INSIDE_HOST
        chain = tuple(_settings(facts, finding.rule, names)) if names else ()
        used |= {line for link in chain for line in link.evidence}
        result.append(replace(finding, chain=(*chain, *finding.chain)))
    return [
        finding
        for finding in result
        if finding.rule != "forced-setting" or not used.issuperset(finding.evidence)
    ]


def _join_warnings(findings: Sequence[Finding]) -> list[Finding]:
    """Put findings that lead to another one into its chain."""
    result = list(findings)
    for rule, leads in _LEADS_TO.items():
        for place, finding in enumerate(result):
            if finding.rule != rule or finding.severity is Severity.NOTE:
                continue
            before = tuple(
                one for one in result if one.rule in leads and one.severity is not Severity.NOTE
            )
            result[place] = replace(finding, chain=(*finding.chain, *before))
            result = [one for one in result if one not in before]
            break
    return result


def _explains(facts: LogFacts, stalls: Sequence[Finding]) -> bool:
    """Return whether a rank that others miss is one that never finished a start."""
    stuck = {
        member.rank
        for group in facts.communicators
        for member in group.members
        if member.started and not member.completed
    }
    return any(one.rule == MISSING and stuck & set(one.ranks) for one in stalls)
