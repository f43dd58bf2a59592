"""Find what a debug log shows to be wrong, slow, or harmless although it looks bad.

Every rule quotes the lines that prove it; without them it reports nothing. Over 250 lines: each
rule is short, and they are read side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stepmark.findings.finding import Evidence, Finding, Severity, by_severity
from stepmark.findings.log_facts import (
    IssuedCall,
    LaggingRank,
    LogFacts,
    LostCalls,
    Mismatch,
    Occurrences,
)
from stepmark.findings.stalls import MISMATCH
from stepmark.ground.grouping import group_by
from stepmark.ground.units import comma_list, plural
from stepmark.job_logs.answers import ABORTED
from stepmark.job_logs.failures import classify
from stepmark.job_logs.job_output import REMARKS
from stepmark.job_logs.job_stalls import JobStalls, stalls_of
from stepmark.job_logs.nccl_log import network_rules, start_rules
from stepmark.job_logs.nccl_log.causes import FALLS_BACK, LATE, LOOKS_FATAL, linked
from stepmark.job_logs.nccl_log.network_rules import finding_of

# NVLink systems of the last generations run 12 to 32 channels.
MIN_CHANNELS = 8


def diagnose(facts: LogFacts, stalls: JobStalls | None = None) -> list[Finding]:
    """Return all findings, problems first, each with the lines that show it.

    stalls: why ranks do not go on, where other files of the job were read as well.
    """
    stalls = stalls_of(facts) if stalls is None else stalls
    findings = [*facts.stopped, *(finding for rule in RULES for finding in rule(facts))]
    findings += map(call_mismatch, stalls.late)
    findings += (call_mismatch(one) for one in facts.mismatches if not one.certain)
    return by_severity(linked(facts, findings, [cause.finding() for cause in stalls.causes]))


def unknown_warnings(facts: LogFacts) -> Iterator[Finding]:
    """Report WARN lines that no rule knows as they stand: as failures if they look fatal."""
    for warning, lines in facts.warnings.items():
        text = f"NCCL warns: {warning.rstrip('.')}."
        if classify(lines.evidence[0].text) is not None or _harmless_text(warning):
            continue
        if facts.has_failed or FALLS_BACK.search(warning) or not LOOKS_FATAL.search(warning):
            yield finding_of("warning", Severity.WARNING, text, [lines])
            continue
        text = f"A warning of NCCL looks fatal, and no rule knows it: {warning.rstrip('.')}."
        action = "Read the lines around it, and whether the job went on."
        yield finding_of("failure-unknown", Severity.PROBLEM, text, [lines], action)


def call_mismatch(mismatch: Mismatch) -> Finding:
    """Return that ranks seem to have issued different collectives at the same place.

    Those of ranks that certainly form a communicator are causes, unless a call came after a
    time-out.
    """
    sides = "; ".join(
        f"{plural(len(issuers), 'rank')} ({_rank(side)}) issued {side.call}"
        for side, issuers in zip(mismatch.sides, mismatch.issuers, strict=True)
    )
    call = f"Call {mismatch.position + 1} of communicator {mismatch.communicator}"
    text = f"{call} differs: {sides}"
    if not mismatch.certain:
        text += ". No line confirms that these ranks form one communicator"
    evidence = [side.evidence for side in mismatch.sides]
    rule = MISMATCH if not mismatch.certain else LATE
    return finding_of(rule, Severity.WARNING, text + ".", evidence)


def peer_differences(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks that received other sizes, or other numbers of calls, than were sent."""
    groups = group_by(
        facts.peers, lambda pair: (pair.communicator, pair.num_sent == pair.num_received)
    )
    for (communicator, is_paired), pairs in groups.items():
        parts = (
            f"rank {pair.source} sent {comma_list(pair.sent)} to rank {pair.target}, which "
            f"expected {comma_list(pair.received)}"
            if is_paired
            else f"rank {pair.source} issued {plural(pair.num_sent, 'send')} to rank "
            f"{pair.target}, which issued {plural(pair.num_received, 'receive')}"
            for pair in pairs
        )
        text = f"In communicator {communicator} sends and receives do not match: "
        text += "; ".join(list(parts)[:4])
        text += "" if len(pairs) <= 4 else f"; and {plural(len(pairs) - 4, 'pair')} more"
        lines = [line for pair in pairs for line in pair.evidence]
        if is_paired:
            severity = Severity.PROBLEM if pairs[0].certain else Severity.WARNING
            yield finding_of("p2p-mismatch", severity, text + ".", lines, _SPLITS)
        else:
            text += ". Lines were lost, the log was copied while the job ran, or it hung here."
            yield finding_of("p2p-unpaired", Severity.WARNING, text, lines)


_SPLITS = (
    "Exchange the split sizes before an uneven all_to_all: what a rank sends to another must "
    "be what that one expects."
)


def lagging_ranks(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks that issued fewer collectives than others when the log ended."""
    groups = group_by(facts.behind, lambda lagging: lagging.communicator)
    for communicator, ranks in groups.items():
        ranks.sort(key=lambda rank: rank.issued)
        worst = ranks[0]
        last = f"its last is {worst.last.call}" if worst.last else "it issued none"
        text = (
            f"In communicator {communicator} {_rank(worst)} issued {worst.issued} of "
            f"{worst.most} collectives: {last}, and it did not issue {worst.missing.call}, "
            f"which {_rank(worst.missing)} did"
        )
        if len(ranks) > 1:
            others = (rank.process if rank.rank is None else rank.rank for rank in ranks[1:])
            text += f". Also behind: {comma_list(others)}"
        if not facts.has_failed:
            text += ". The job hangs here, unless lines were lost or it still ran"
        calls = [worst.missing, *(rank.last for rank in ranks if rank.last)]
        evidence = [call.evidence for call in calls]
        yield finding_of("behind", Severity.WARNING, text + ".", evidence)


_ONE_FILE = "Write one file per process: NCCL_DEBUG_FILE with %h.%p."


def lost_lines(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks whose log lacks calls that their peers have."""
    for lost in facts.lost:
        text = (
            f"The log of {_rank(lost)} lacks at least {plural(lost.lines, 'call')} of "
            f"communicator {lost.communicator} between others: lines were lost, and "
            "counts of calls are too low, or lines of others are there twice"
        )
        if not lost.certain:
            text += ", or it issued fewer calls: opCount does not count in this log"
        lines = [lost.before.evidence]
        yield finding_of("lost-lines", Severity.WARNING, f"{text}.", lines, _ONE_FILE)


def _rank(issuer: IssuedCall | LaggingRank | LostCalls) -> str:
    return issuer.process if issuer.rank is None else f"rank {issuer.rank}"


_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")


def forced_settings(facts: LogFacts) -> Iterator[Finding]:
    """Report variables for debugging that were left on."""
    for (name, value), lines in facts.environment.items():
        if name in _SWITCHES and value not in ("0", ""):
            way = name.removeprefix("NCCL_").removesuffix("_DISABLE")
            text = f"{name} is {value}: NCCL may not use {way}."
        elif name in ("NCCL_ALGO", "NCCL_PROTO"):
            text = f"{name} is {value}: NCCL's own choice by size is switched off."
            if name == "NCCL_PROTO" and "LL128" in value.upper() and "^" not in value:
                text += " LL128 where NCCL does not enable it by itself can corrupt data."
        else:
            continue
        yield finding_of("forced-setting", Severity.WARNING, text, [lines])


def nvls_off(facts: LogFacts) -> Iterator[Finding]:
    """Report that reductions in the NVLink switch are off."""
    disabled = facts.environment.get(("NCCL_NVLS_ENABLE", "0"))
    without = [
        comm.channels.evidence
        for comm in facts.communicators
        if comm.channels and comm.channels.nvls == 0 and (comm.local_ranks or 0) > 2
    ]
    absent = facts.nvls.get(False)
    if disabled:
        text = "NCCL_NVLS_ENABLE is 0: no reductions in the NVLink switch (NVLS)."
        yield finding_of("nvls-off", Severity.WARNING, text, [disabled, *without])
    elif absent and True not in facts.nvls:
        text = "No GPU has NVLink multicast (NVLS): normal before Hopper and without NVSwitch."
        yield finding_of("nvls-off", Severity.NOTE, text, [absent])
    elif absent is None and without:
        text = "Communicators have no channels for reductions in the NVLink switch (NVLS)."
        yield finding_of("nvls-off", Severity.NOTE, text, without)
    elif absent:
        text = "Some GPUs have NVLink multicast (NVLS) and others do not."
        yield finding_of("nvls-off", Severity.WARNING, text, [absent, facts.nvls[True]])


def few_channels(facts: LogFacts) -> Iterator[Finding]:
    """Report an NVLink system with so few channels that they cannot fill the links."""
    for comm in facts.communicators:
        counts = comm.channels
        if counts is None or counts.coll >= MIN_CHANNELS or (comm.num_ranks or 0) < 2:
            continue
        limits = {
            name: lines
            for (name, _), lines in facts.environment.items()
            if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
        }
        if not comm.over_nvlink and not limits:
            continue
        text = f"Communicator {comm.key} has {plural(counts.coll, 'channel')} for collectives"
        text += ", few for NVLink" if comm.over_nvlink else ""
        text += f"; {comma_list(limits)} is set" if limits else ""
        lines: list[Occurrences | Evidence] = [counts.evidence, *limits.values()]
        yield finding_of("few-channels", Severity.WARNING, text + ".", lines)


def harmless(facts: LogFacts) -> Iterator[Finding]:
    """Report lines that look like errors and are none."""
    messages = (*facts.harmless.items(), *facts.warnings.items())
    groups = group_by(messages, lambda message: _harmless_text(message[0]))
    for text, same in groups.items():
        if text:
            yield finding_of("harmless", Severity.NOTE, text, [lines for _, lines in same])


def _harmless_text(message: str) -> str:
    return next((text for part, text in _HARMLESS if part in message[:160]), "")


def remarks(facts: LogFacts) -> Iterator[Finding]:
    """Report what looks like a failure and is none, and failures of unknown order."""
    for rule, (name, severity, text) in REMARKS.items():
        failures = [one for one in facts.failures if one.rule == rule]
        if failures:
            lines = [one.evidence for one in failures]
            stated = f"{failures[0].text} {failures[0].detail}".strip()
            finding = finding_of(name, severity, text or stated, lines)
            count = sum(one.lines for one in failures)
            yield replace(finding, count=count, action=failures[0].action)


def aborted_communicators(facts: LogFacts) -> Iterator[Finding]:
    """Report communicators that were aborted: after a failure, or by torch at its end."""
    if facts.aborted:
        yield finding_of(
            ABORTED,
            Severity.NOTE,
            f"{plural(len(facts.aborted), 'communicator')} aborted (ncclCommAbort): after a "
            "failure, or at the end of a job by versions of torch that do not destroy them.",
            facts.aborted,
        )


def tcp_provider(facts: LogFacts) -> Iterator[Finding]:
    """Report libfabric's TCP provider behind the OFI plugin."""
    for (component, name), lines in facts.versions.items():
        if component == "ofi_provider" and name.lower().startswith(("tcp", "sockets", "udp")):
            text = f"The OFI plugin runs on libfabric's provider {name}, not on the fabric's."
            action = "Check FI_PROVIDER and that the fabric's devices are in the container."
            yield finding_of("ofi-tcp", Severity.WARNING, text, [lines], action)


def lines_after_ends(facts: LogFacts) -> Iterator[Finding]:
    """Report lines after the end of a job by which it went on, or failed after all."""
    if facts.after_ends:
        text = "After a line that states the end of the job it went on, or failed after all"
        yield finding_of("after-end", Severity.WARNING, f"{text}.", facts.after_ends)


def cut_lines(facts: LogFacts) -> Iterator[Finding]:
    """Report lines of calls that end before their count and type."""
    if facts.unread_calls:
        text = (
            f"{plural(facts.unread_calls, 'call')} could not be counted: the line is cut off. "
            "The calls of its process are not compared with other ranks."
        )
        yield finding_of("cut-lines", Severity.NOTE, text, [])


def rounded_sizes(facts: LogFacts) -> Iterator[Finding]:
    """Report calls that were counted at another size than their line has."""
    if facts.rounded_calls:
        text = (
            f"{plural(facts.rounded_calls, 'call')} are counted at the next power of two of "
            "their elements: the log has too many different sizes to keep."
        )
        yield finding_of("rounded-sizes", Severity.WARNING, text, [])


def torn_lines(facts: LogFacts) -> Iterator[Finding]:
    """Report lines that were left out, as their process never existed."""
    if facts.torn_lines:
        text = (
            f"{plural(facts.torn_lines, 'line')} were left out: torn or interleaved, they name "
            "a process that is a part of another one's name. Counts of calls may be too low."
        )
        finding = finding_of("torn-lines", Severity.WARNING, text, facts.torn)
        yield replace(finding, count=facts.torn_lines, action=_ONE_FILE)


_HARMLESS = (
    (
        "dlvsym failed on mlx5dv",
        "libmlx5 lacks a function that NCCL can use; NCCL works without it. Harmless.",
    ),
    (
        "Topology detection",
        "Virtual machines hide the speed of their PCI links and NCCL assumes one. Harmless "
        "unless the rings are poor: then NCCL_TOPO_FILE describes the machine.",
    ),
    (
        "Could not get speed from",
        "The interface does not report its speed and NCCL assumes 10 Gb/s. Harmless if NCCL's "
        "network is another one, or there is one node.",
    ),
    ("Could not find real path of", "A PCI path is hidden by the virtual machine. Harmless."),
    (
        "Failed to open libibverbs",
        "No library of InfiniBand: NCCL uses another network. Harmless without InfiniBand.",
    ),
    *(
        (
            words,
            "An adapter could not be opened (a container without /dev/infiniband lacks it): "
            "NCCL uses others, or sockets.",
        )
        for words in ("ibv_open_device failed", "nable to open device")
    ),
    (
        "NUMA auto balancing",
        "The kernel moves pages between NUMA nodes, which makes times vary "
        "(kernel.numa_balancing=0 stops it). No failure.",
    ),
    (
        "iommu=pt",
        "The kernel runs without iommu=pt, which RCCL advises. No failure by itself.",
    ),
    (
        "ollNetPlugin",
        "The network plugin offers no reduction in the network (CollNet). Harmless unless that "
        "was wanted.",
    ),
)

RULES: tuple[Callable[[LogFacts], Iterator[Finding]], ...] = (
    unknown_warnings,
    peer_differences,
    lagging_ranks,
    lost_lines,
    start_rules.init_incomplete,
    start_rules.mixed_versions,
    network_rules.wrong_interface,
    network_rules.net_socket,
    network_rules.plugins,
    network_rules.no_gpudirect,
    network_rules.nic_imbalance,
    network_rules.slow_adapter,
    network_rules.far_adapter,
    network_rules.one_channel,
    network_rules.idle_adapters,
    network_rules.shm_instead_of_p2p,
    forced_settings,
    nvls_off,
    few_channels,
    start_rules.slow_init,
    harmless,
    tcp_provider,
    remarks,
    aborted_communicators,
    lines_after_ends,
    cut_lines,
    rounded_sizes,
    torn_lines,
    start_rules.several_jobs,
)
