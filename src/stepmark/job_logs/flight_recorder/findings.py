"""Find what the dumps of several ranks prove together: mismatches, hangs, missing ranks.

States are updated by a watchdog or when the dump is written, never immediately, and the dumps
of two ranks are not written at the same moment. One note says what the dumps leave open.
"""

from collections.abc import Iterator, Sequence

from stepmark.findings.finding import Evidence, Finding, Severity, by_severity
from stepmark.findings.stalls import ARRIVED, MISMATCH, MISSING, Cause, causes
from stepmark.ground.grouping import group_by
from stepmark.ground.units import ranks_text
from stepmark.job_logs.flight_recorder.groups import GroupDumps, groups_of, progress
from stepmark.job_logs.flight_recorder.operations import Dump
from stepmark.job_logs.flight_recorder.waits import shown_by


def findings(
    dumps: Sequence[Dump], known: Sequence[Cause] | None = None, *, is_first: bool = True
) -> list[Finding]:
    """Return problems first, in the order of groups. One dump alone shows little.

    known: the causes, where other files of the job were read as well; unless is_first, they are
    shown with these.
    """
    groups = groups_of(dumps)
    known = causes(*shown_by(groups)) if known is None else known
    unsorted = [cause.finding() for cause in known if is_first]
    unsorted += _limits(known, groups, dumps)
    unsorted += _missing(groups)
    for rule in (_lost, _watchdog, _versions):
        unsorted += rule(dumps)
    return by_severity(unsorted)


def _limits(
    known: Sequence[Cause], groups: Sequence[GroupDumps], dumps: Sequence[Dump]
) -> Iterator[Finding]:
    """Say once what the dumps cannot prove about the causes."""
    rules = {cause.rule for cause in known if cause.severity is Severity.PROBLEM}
    limits = []
    if any(cause.victims and not cause.is_over for cause in known):
        limits.append("a running job looks the same, unless a later dump shows the same calls")
    if MISSING in rules:
        limits.append(
            "a rank that waits for nobody may wait in what is not recorded: its own code, a "
            "communicator's setup"
            + (
                ", gloo's sends and receives"
                if any("gloo" in d.backends for d in dumps)
                else ""
            )
        )
    if rules & {ARRIVED, MISMATCH}:
        limits.append(
            "roots of broadcasts and reductions, reduction operations and split sizes are not "
            "recorded, so ranks may differ in them"
        )
    if limits:
        text = f"not proven: {'; '.join(limits)}."
        yield Finding(rule="fr-limits", severity=Severity.NOTE, text=text)


def _missing(groups: Sequence[GroupDumps]) -> Iterator[Finding]:
    """Report ranks of the groups without a dump."""
    present = {rank for shared in groups for rank in shared.dumps}
    members = {rank for shared in groups for rank in shared.members}
    absent = members - present
    if absent:
        count = f"{len(absent)} of {len(members)}"
        text = f"no dump of {ranks_text(absent)}, {count}: their progress is unknown"
        yield Finding(
            rule="fr-missing-dump", severity=Severity.NOTE, text=text, count=len(absent)
        )


def _lost(dumps: Sequence[Dump]) -> Iterator[Finding]:
    incomplete = [dump for dump in dumps if dump.num_lost]
    if not incomplete:
        return
    most = max(dump.num_lost for dump in incomplete)
    text = (
        f"the ring buffer of {len(incomplete)} of {len(dumps)} dumps lost its beginning, up to "
        f"{most} operations: counts are not of the whole job (TORCH_FR_BUFFER_SIZE)"
    )
    yield Finding(
        rule="fr-wrapped",
        severity=Severity.WARNING,
        text=text,
        evidence=tuple(
            Evidence(file=dump.file, line=0, text=f"first record_id {dump.num_lost}")
            for dump in incomplete[:3]
        ),
        count=len(incomplete),
    )


def _watchdog(dumps: Sequence[Dump]) -> Iterator[Finding]:
    """Report where pg_status, which the watchdog updates, is out of date."""
    behind = [
        entry
        for entry in progress(dumps)
        if entry.watchdog_completed is not None
        and entry.last_completed is not None
        and entry.watchdog_completed < entry.last_completed
    ]
    if not behind:
        return
    text = (
        "pg_status lags: its last completed collective is behind the states of the entries, "
        "which were looked up for the dump; stepmark uses the states"
    )
    yield Finding(
        rule="fr-status-lags",
        severity=Severity.NOTE,
        text=text,
        evidence=tuple(
            Evidence(
                file=entry.file,
                line=0,
                text=f"last_completed_collective {entry.watchdog_completed}, state completed "
                f"up to {entry.last_completed}",
            )
            for entry in behind[:3]
        ),
        count=len(behind),
    )


def _versions(dumps: Sequence[Dump]) -> Iterator[Finding]:
    by_version = group_by((dump for dump in dumps if dump.nccl), lambda dump: dump.nccl)
    if len(by_version) > 1:
        text = f"ranks use different NCCL versions: {', '.join(sorted(by_version))}"
        evidence = [
            Evidence(file=users[0].file, line=0, text=f"comm_lib_version {version}")
            for version, users in by_version.items()
        ]
        yield Finding(
            rule="fr-versions",
            severity=Severity.WARNING,
            text=text,
            evidence=tuple(evidence[:4]),
        )
