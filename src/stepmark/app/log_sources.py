"""Logs, dumps and inspector lines, each read into the same parts: findings, messages, text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepmark.app.log_inputs import FLIGHT, INSPECTOR, LOG, Inputs
from stepmark.core.finding import Finding
from stepmark.core.message import Histogram
from stepmark.report import log_summary
from stepmark.report.histogram import ranks_seen, with_ranks
from stepmark.trace.flight_recorder import read_flight_recorder
from stepmark.trace.flight_recorder.findings import findings
from stepmark.trace.flight_recorder.groups import progress, ranks_text
from stepmark.trace.inspector import read_inspector
from stepmark.trace.nccl_log import read_log
from stepmark.trace.nccl_log.diagnosis import diagnose

Rows = list[dict[str, object]]
_MAX_RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One job's files of one kind."""

    kind: str
    files: tuple[str, ...]
    histogram: Histogram
    num_ranks_seen: int
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]  # a description, shown before the findings
    rows: tuple[tuple[str, Rows], ...] = ()  # further tables by name
    tuning: tuple[dict[str, object], ...] = ()  # NCCL's choices by size, as its log has them


def read_sources(inputs: Inputs, num_ranks: int | None) -> list[Source]:
    """Read one source per kind of file. Raises ConfigError.

    Messages of two kinds may be of one job, so they are never added.
    """
    sources = []
    if inputs.logs:
        sources.append(_log(inputs.logs, num_ranks))
    if inputs.flights:
        sources.append(_flight_recorder(inputs.flights))
    if inputs.inspectors:
        sources.append(_inspector(inputs.inspectors))
    if num_ranks is None:
        return sources
    return [
        replace(source, histogram=with_ranks(source.histogram, num_ranks)) for source in sources
    ]


def _log(paths: Sequence[Path], num_ranks: int | None) -> Source:
    facts = read_log(paths, num_ranks=num_ranks)
    return Source(
        kind=LOG,
        files=tuple(map(str, paths)),
        histogram=facts.messages,
        num_ranks_seen=max(len(facts.processes), ranks_seen(facts.messages)),
        findings=tuple(diagnose(facts)),
        lines=tuple(log_summary.fact_lines(facts)),
        tuning=tuple(log_summary.choice_rows(facts)),
        rows=(
            ("facts", log_summary.fact_rows(facts)),
            ("communicators", log_summary.communicator_rows(facts)),
            ("transports", log_summary.transport_rows(facts)),
            ("predictions", log_summary.prediction_rows(facts)),
        ),
    )


def _flight_recorder(paths: Sequence[Path]) -> Source:
    facts = read_flight_recorder(paths)
    dumps = facts.dumps
    ranks = [dump.rank for dump in dumps if dump.rank is not None]
    versions = dict.fromkeys(dump.version or "unknown" for dump in dumps)
    nccl = dict.fromkeys(dump.nccl for dump in dumps if dump.nccl)
    num_operations = sum(len(dump.operations) for dump in dumps)
    lines = [
        f"flight recorder: {len(dumps)} dump{'s' if len(dumps) > 1 else ''}"
        + (f", {ranks_text(ranks)}" if ranks else ", rank unknown")
        + f", {num_operations} operations, format {', '.join(versions)}"
        + (f", NCCL {', '.join(nccl)}" if nccl else "")
    ]
    rows: Rows = [
        {
            "rank": one.rank,
            "group": one.group,
            "operations": one.num_operations,
            "first": one.first,
            "last_enqueued": one.enqueued,
            "last_completed": one.completed,
            "watchdog_completed": one.watchdog_completed,
            "lost": one.num_lost,
            "file": one.file,
        }
        for one in progress(dumps)
    ]
    lines += [_progress_text(r) for r in rows[:_MAX_RANKS_SHOWN] if r["first"] is not None]
    more = len(rows) - _MAX_RANKS_SHOWN
    lines += [f"  ... and {more} more; --json or --csv has all"] * (more > 0)
    lines += [f"  not in the histogram: {n} {reason}" for reason, n in facts.uncounted.items()]
    return Source(
        kind=FLIGHT,
        files=tuple(map(str, paths)),
        histogram=facts.histogram,
        num_ranks_seen=len(dumps),
        findings=tuple(findings(dumps)),
        lines=tuple(lines),
        rows=(("ranks", rows),),
    )


def _progress_text(row: dict[str, object]) -> str:
    rank = "?" if row["rank"] is None else row["rank"]
    last = "none" if row["last_completed"] is None else row["last_completed"]
    return (
        f"  rank {rank}, group {row['group']}: collectives {row['first']} to "
        f"{row['last_enqueued']} enqueued, last completed {last}"
    )


def _inspector(paths: Sequence[Path]) -> Source:
    facts = read_inspector(paths)
    calls = sum(tally.calls for tally in facts.histogram.values())
    clocks = ", ".join(
        f"{n} {source or 'unnamed clock'}" for source, n in facts.timing_sources.items()
    )
    rows: Rows = [
        {"collective": name, "algorithm": algorithm, "protocol": protocol, "calls": n}
        for (name, algorithm, protocol), n in facts.algorithms.items()
    ]
    lines = [
        f"inspector: {calls} operations of {facts.num_ranks_seen} ranks, format "
        f"{', '.join(facts.versions) or 'unknown'}, timed by: {clocks}"
    ]
    lines += [
        f"  {row['collective']}: {row['algorithm']} {row['protocol']}, {row['calls']} calls"
        for row in rows
    ]
    return Source(
        kind=INSPECTOR,
        files=tuple(map(str, paths)),
        histogram=facts.histogram,
        num_ranks_seen=facts.num_ranks_seen,
        findings=facts.findings,
        lines=tuple(lines),
        rows=(("algorithms", rows),) if rows else (),
    )
