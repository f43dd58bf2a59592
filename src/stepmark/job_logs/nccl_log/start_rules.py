"""Findings on the launch of a job and the start of its communicators."""

from collections.abc import Iterator

from stepmark.findings.finding import Finding, Severity
from stepmark.findings.log_facts import Communicator, LogFacts, Member
from stepmark.ground.units import comma_list, plural
from stepmark.job_logs.nccl_log.lines import UNORDERED
from stepmark.job_logs.nccl_log.network_rules import finding_of

SLOW_INIT_S = 10.0
MAX_NAMED = 4096  # ranks that are looked for by name


def several_jobs(facts: LogFacts) -> Iterator[Finding]:
    """Report one GPU in processes that share no communicator, of two launches in one input."""
    first: dict[tuple[str, str], Member] = {}
    joined = [{member.process for member in group.members} for group in facts.communicators]
    for group in facts.communicators:
        for member in group.members:
            if member.bus_id is None or member.started is None:
                continue
            earlier = first.setdefault((member.host, member.bus_id), member)
            pair = {earlier.process, member.process}
            if len(pair) == 1 or any(pair <= processes for processes in joined):
                continue
            text = (
                f"The files are of several jobs or launches: {earlier.process} and "
                f"{member.process} used one GPU of {member.host} and share no communicator. "
                "What is shown as the cause and as its consequences may be of different jobs."
            )
            lines = [one.started for one in (earlier, member) if one.started]
            action = "Read the files of each launch alone."
            yield finding_of("several-jobs", Severity.WARNING, text, lines, action)
            return


def mixed_versions(facts: LogFacts) -> Iterator[Finding]:
    """Report processes with different libraries, or hosts with different drivers."""
    for component, name in (
        ("nccl", "NCCL"),
        ("rccl", "RCCL"),
        ("cuda_driver", "CUDA drivers"),
        ("aws-ofi-nccl", "aws-ofi-nccl"),
    ):
        versions = {
            value: lines for (key, value), lines in facts.versions.items() if key == component
        }
        if len(versions) < 2:
            continue
        most = max(len(lines.hosts) for lines in versions.values())
        counts = comma_list(
            f"{value} ({plural(lines.processes, 'process')}"
            f"{f' on {comma_list(lines.hosts, most=4)}' if len(lines.hosts) < most else ''})"
            if lines.processes
            else f"{value} ({plural(lines.lines, 'line')})"
            for value, lines in versions.items()
        )
        text = f"The job uses several versions of {name}: {counts}."
        yield finding_of("mixed-versions", Severity.WARNING, text, versions.values())


def init_incomplete(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks that began to start a communicator and never finished."""
    for comm in facts.communicators:
        stuck = [member for member in comm.members if member.started and not member.completed]
        if not stuck:
            continue
        ranks = comma_list("?" if member.rank is None else member.rank for member in stuck)
        text = (
            f"Communicator {comm.key}: rank {ranks} began to start and did not finish; "
            f"{len(comm.members)} of {comm.num_ranks or '?'} ranks are in the log"
        )
        begun = {member.rank for member in comm.members}
        if comm.num_ranks and comm.num_ranks <= MAX_NAMED and None not in begun:
            missing = [rank for rank in range(comm.num_ranks) if rank not in begun]
            text += f"; of rank {comma_list(missing)} no line shows a start" if missing else ""
        action = "Look at what the ranks without a start did: they left, or wait elsewhere."
        evidence = [member.started for member in stuck if member.started]
        yield finding_of("init-incomplete", Severity.WARNING, f"{text}.", evidence, action)


def slow_init(facts: LogFacts) -> Iterator[Finding]:
    """Report communicators that took long to start, and the longest part of it."""
    for comm in facts.communicators:
        times = [member.init for member in comm.members if member.init]
        worst = max(times, key=lambda time: time.total_s, default=None)
        if worst is None or worst.total_s < SLOW_INIT_S:
            continue
        name, seconds = max(worst.parts_s, key=lambda part: part[1], default=("?", 0.0))
        text = f"Communicator {comm.key} took {worst.total_s:g} s to start"
        text += f", {seconds:g} s of it in {name}."
        yield finding_of("slow-init", Severity.WARNING, text, [worst.evidence])


def healthy_facts(facts: LogFacts) -> list[str]:
    """Return what a log shows to be in order, as clauses; failures are not looked at."""
    clauses: list[str] = []
    complete = [comm for comm in facts.communicators if is_complete(comm)]
    if complete:
        largest = max(complete, key=lambda comm: len(comm.members))
        hosts = plural(len({member.host for member in largest.members}), "host")
        clauses.append(f"{plural(len(largest.members), 'rank')} on {hosts}")
    has_all = bool(complete) and len(complete) == len(facts.communicators)
    if has_all:
        clauses.append(f"{plural(len(complete), 'communicator')} started on every rank")
    for kind in dict.fromkeys(way.kind for way in facts.transports if way.is_net):
        ways = [way for way in facts.transports if way.kind == kind]
        total = sum(way.channels for way in ways)
        if all(way.gdrdma for way in ways):
            clauses.append(f"{kind} with GPUDirect RDMA on {total} of {total} connections")
    inside = [way for way in facts.transports if way.kind.startswith(("P2P/", "SHM"))]
    if inside and all(way.kind.startswith("P2P/") for way in inside):
        total = sum(way.channels for way in inside)
        clauses.append(f"GPU to GPU (P2P) on {total} of {total} connections without network")
    collectives = [
        tally.ranks == kind.num_ranks
        for kind, tally in facts.messages.items()
        if kind.collective not in UNORDERED
    ]
    doubts = (facts.lost, facts.behind, facts.mismatches, facts.peers)
    is_torn = facts.torn_lines or facts.unread_calls
    if has_all and collectives and all(collectives) and not any(doubts) and not is_torn:
        clauses.append("no line of a call is lost, torn or cut")
    return clauses


def is_complete(comm: Communicator) -> bool:
    """Return whether every rank is in the log and started, or at least issued calls."""
    ranks = [member.rank for member in comm.members if member.completed]
    return comm.num_ranks == len(comm.members) and set(ranks) == set(range(comm.num_ranks))
