"""What a debug log says is wrong, slow, or harmless although it looks bad.

Every rule names the lines that prove it; without them it says nothing. Long (over 250 lines)
because each rule is short and they are read side by side.
"""

import re
from collections.abc import Callable, Iterator

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.log_facts import CallSide, LogFacts, Seen
from stepmark.trace import diagnose_network
from stepmark.trace.log_finding import finding, listed, plural

SLOW_INIT_S = 10.0
# NVLink systems of the last generations run 12 to 32 channels.
FEW_CHANNELS = 8

_ORDER = (Severity.PROBLEM, Severity.WARNING, Severity.NOTE)


def diagnose(facts: LogFacts) -> list[Finding]:
    """All findings, problems first, each with the lines that show it."""
    found = [one for rule in RULES for one in rule(facts)]
    return sorted(found, key=lambda one: _ORDER.index(one.severity))


def failures(facts: LogFacts) -> Iterator[Finding]:
    """WARN lines: known failures with what they mean, others as they stand."""
    known: dict[tuple[str, str], list[Seen]] = {}
    for remark in facts.warnings:
        fits = (one for one in FAILURES if one[1].search(remark.text))
        rule, _, text = next(fits, ("warning", None, f"NCCL warns: {remark.text}"))
        known.setdefault((rule, text), []).append(remark.seen)
    for (rule, text), seen in known.items():
        severity = Severity.WARNING if rule == "warning" else Severity.PROBLEM
        yield finding(rule, severity, text, seen)


def call_mismatch(facts: LogFacts) -> Iterator[Finding]:
    """Ranks of a communicator that issued different collectives at the same place."""
    for one in facts.mismatches:
        sides = "; ".join(
            f"{plural(number, 'rank')} ({_rank(side)}) issued {side.call}"
            for side, number in zip(one.sides, one.ranks, strict=True)
        )
        text = f"Call {one.position + 1} of communicator {one.communicator} differs: {sides}"
        severity = Severity.PROBLEM if one.certain else Severity.WARNING
        text += "" if one.certain else ". No line tells that these ranks are one communicator"
        evidence = [side.evidence for side in one.sides]
        yield finding("call-mismatch", severity, text + ".", evidence)


def behind(facts: LogFacts) -> Iterator[Finding]:
    """Ranks that issued fewer collectives than others when the log ended."""
    groups: dict[str, list[int]] = {}
    for index, one in enumerate(facts.behind):
        groups.setdefault(one.communicator, []).append(index)
    for communicator, indexes in groups.items():
        held = sorted((facts.behind[index] for index in indexes), key=lambda one: one.issued)
        worst = held[0]
        who = f"rank {worst.rank}" if worst.rank is not None else worst.process
        last = f"its last is {worst.last.call}" if worst.last else "it issued none"
        text = (
            f"In communicator {communicator} {who} issued {worst.issued} of {worst.most} "
            f"collectives: {last}, and it did not issue {worst.missing.call}, which "
            f"{_rank(worst.missing)} did"
        )
        if len(held) > 1:
            others = listed(one.process if one.rank is None else one.rank for one in held[1:])
            text += f". Behind as well: {others}"
        text += ". The job hangs here, unless the log was taken while it ran"
        sides = [one.last for one in held if one.last]
        evidence = [worst.missing.evidence, *(side.evidence for side in sides)]
        yield finding("behind", Severity.WARNING, text + ".", evidence)


def _rank(side: CallSide) -> str:
    return side.process if side.rank is None else f"rank {side.rank}"


def mixed_versions(facts: LogFacts) -> Iterator[Finding]:
    """Processes with different libraries, or hosts with different drivers."""
    for what, name in (
        ("nccl", "NCCL"),
        ("rccl", "RCCL"),
        ("cuda_driver", "CUDA drivers"),
        ("aws-ofi-nccl", "aws-ofi-nccl"),
    ):
        held = {value: seen for (key, value), seen in facts.versions.items() if key == what}
        if len(held) < 2:
            continue
        counts = listed(f"{value} ({_processes(seen)})" for value, seen in held.items())
        text = f"Several versions of {name} in one job: {counts}."
        yield finding("mixed-versions", Severity.WARNING, text, held.values())


def _processes(seen: Seen) -> str:
    if not seen.processes:
        return plural(seen.lines, "line")
    return f"{seen.processes} process{'' if seen.processes == 1 else 'es'}"


_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")


def forced_settings(facts: LogFacts) -> Iterator[Finding]:
    """Variables for debugging that were left on."""
    for (name, value), seen in facts.environment.items():
        if name in _SWITCHES and value not in ("0", ""):
            way = name.removeprefix("NCCL_").removesuffix("_DISABLE")
            text = f"{name} is {value}: NCCL may not use {way}."
        elif name == "NCCL_ALGO":
            text = f"NCCL_ALGO is {value}: NCCL's own choice by size is switched off."
        elif name == "NCCL_PROTO":
            text = f"NCCL_PROTO is {value}: NCCL's own choice by size is switched off."
            if "LL128" in value.upper() and "^" not in value:
                text += " LL128 where NCCL does not enable it by itself can corrupt data."
        else:
            continue
        yield finding("forced-setting", Severity.WARNING, text, [seen])


def nvls_off(facts: LogFacts) -> Iterator[Finding]:
    """Reductions in the NVLink switch are off."""
    switched = facts.environment.get(("NCCL_NVLS_ENABLE", "0"))
    none = [
        one.channels.evidence
        for one in facts.communicators
        if one.channels and one.channels.nvls == 0 and (one.local_ranks or 0) > 2
    ]
    absent = facts.nvls.get(False)
    if switched:
        text = "NCCL_NVLS_ENABLE is 0: no reductions in the NVLink switch (NVLS)."
        yield finding("nvls-off", Severity.WARNING, text, [switched, *none])
    elif absent and True not in facts.nvls:
        text = "No GPU has NVLink multicast (NVLS): normal before Hopper and without NVSwitch."
        yield finding("nvls-off", Severity.NOTE, text, [absent])
    elif absent is None and none:
        text = "Communicators have no channels for reductions in the NVLink switch (NVLS)."
        yield finding("nvls-off", Severity.NOTE, text, none)
    elif absent:
        text = "Some GPUs have NVLink multicast (NVLS) and others do not."
        yield finding("nvls-off", Severity.WARNING, text, [absent, facts.nvls[True]])


def few_channels(facts: LogFacts) -> Iterator[Finding]:
    """An NVLink system with so few channels that they cannot fill the links."""
    for one in facts.communicators:
        counts, nvlink = one.channels, any(g.path_intra == "NVL" for g in one.graphs)
        if counts is None or counts.coll >= FEW_CHANNELS or (one.num_ranks or 0) < 2:
            continue
        limits = {
            name: seen
            for (name, _), seen in facts.environment.items()
            if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
        }
        if not nvlink and not limits:
            continue
        text = f"Communicator {one.key} has {plural(counts.coll, 'channel')} for collectives"
        text += ", few for NVLink" if nvlink else ""
        text += f"; {listed(limits)} is set" if limits else ""
        seen: list[Seen | Evidence] = [counts.evidence, *limits.values()]
        yield finding("few-channels", Severity.WARNING, text + ".", seen)


def slow_init(facts: LogFacts) -> Iterator[Finding]:
    """Communicators that took long to start, and the part that took most."""
    for one in facts.communicators:
        times = [member.init for member in one.members if member.init]
        if not times:
            continue
        worst = max(times, key=lambda time: time.total_s)
        if worst.total_s < SLOW_INIT_S:
            continue
        name, seconds = max(worst.parts_s, key=lambda part: part[1], default=("?", 0.0))
        text = (
            f"Communicator {one.key} took {worst.total_s:g} s to start, {seconds:g} s of it in "
            f"{name}."
        )
        yield finding("slow-init", Severity.WARNING, text, [worst.evidence])


def init_incomplete(facts: LogFacts) -> Iterator[Finding]:
    """Ranks that began to start a communicator and never finished."""
    for one in facts.communicators:
        stuck = [member for member in one.members if member.started and not member.completed]
        if not stuck:
            continue
        who = listed("?" if member.rank is None else member.rank for member in stuck)
        text = (
            f"Communicator {one.key}: rank {who} began to start and did not finish; "
            f"{len(one.members)} of {one.num_ranks or '?'} ranks are in the log."
        )
        evidence = [member.started for member in stuck if member.started]
        yield finding("init-incomplete", Severity.WARNING, text, evidence)


def harmless(facts: LogFacts) -> Iterator[Finding]:
    """Lines that look like errors and are none."""
    held: dict[str, list[Seen]] = {}
    for remark in facts.harmless:
        text = next((why for start, why in _HARMLESS if remark.text.startswith(start)), "")
        held.setdefault(text, []).append(remark.seen)
    for text, seen in held.items():
        if text:
            yield finding("harmless", Severity.NOTE, text, seen)


def cut_lines(facts: LogFacts) -> Iterator[Finding]:
    """Lines of calls that ended before their count and type."""
    if facts.unread_calls:
        text = f"{plural(facts.unread_calls, 'call')} could not be counted: the line is cut."
        yield finding("cut-lines", Severity.NOTE, text, [])


_HARMLESS = (
    (
        "dlvsym failed on mlx5dv",
        "libmlx5 is older than NCCL's newest use of it, and NCCL goes on without. Harmless.",
    ),
    (
        "Topology detection",
        "Virtual machines hide the speed of their PCI links and NCCL assumes one. Harmless "
        "unless the rings are poor: then NCCL_TOPO_FILE describes the machine.",
    ),
    (
        "Could not get speed from",
        "The interface does not tell its speed and NCCL assumes 10 Gb/s. Harmless if NCCL's "
        "network is another one, or there is one node.",
    ),
    ("Could not find real path of", "A PCI path is hidden by the virtual machine. Harmless."),
)

# (rule, WARN lines, what they mean), the special before the general.
FAILURES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "failure-version",
        re.compile(r"Mismatched NCCL version|version mismatch with remote"),
        "Ranks run different versions of NCCL and cannot form a communicator.",
    ),
    (
        "failure-mismatch",
        re.compile(r"[Cc]ollective mismatch|Mismatched collective|message truncated"),
        "NCCL itself saw ranks issue different collectives or sizes.",
    ),
    (
        "failure-ib-connect",
        re.compile(r"ibv_modify_qp"),
        "Two adapters could not be connected: they do not reach each other (wrong GID index, "
        "VLAN or rail), or the port is down.",
    ),
    (
        "failure-ib-retry",
        re.compile(r"Got completion .*(?:status=12\b|error 12\b|\(12\))"),
        "InfiniBand gave up after retries (status 12): the other end died, a link flaps, or "
        "NCCL_IB_TIMEOUT is too short.",
    ),
    (
        "failure-ib",
        re.compile(r"Got completion .*(?:status|error)"),
        "An InfiniBand operation failed; the status in the line says how.",
    ),
    (
        "failure-peer-closed",
        re.compile(
            r"Connection closed by remote peer|remote process (?:exited|has terminated)"
        ),
        "Another process closed its connection: it failed first, and its log says why.",
    ),
    (
        "failure-no-algorithm",
        re.compile(r"[Nn]o algorithm/protocol"),
        "NCCL has no algorithm and protocol for a call: NCCL_ALGO or NCCL_PROTO excludes all "
        "that the function has.",
    ),
    (
        "failure-nvls",
        re.compile(r"NVLink SHARP \(NVLS\)|bind NVLS|NVLS.*[Mm]ulticast.*(?:fail|error)"),
        "NVLink multicast memory could not be set up: the Fabric Manager or an NVSwitch is in "
        "a bad state. NCCL_NVLS_ENABLE=0 avoids it.",
    ),
    (
        "failure-p2p",
        re.compile(r"P2P is disabled between NVLINK"),
        "Two GPUs joined by NVLink refuse peer access: likely a hardware fault.",
    ),
    (
        "failure-no-interface",
        re.compile(r"no socket interface found|No usable listening interface"),
        "No network interface fits NCCL_SOCKET_IFNAME.",
    ),
    (
        "failure-connect",
        re.compile(r"[Cc]onnect\w* .*(?:refused|timed out|[Nn]o route|unreachable)"),
        "A host could not be reached over TCP.",
    ),
    (
        "failure-cuda",
        re.compile(r"Cuda failure|HIP failure"),
        "A call of the GPU's runtime failed inside NCCL.",
    ),
)

RULES: tuple[Callable[[LogFacts], Iterator[Finding]], ...] = (
    failures,
    call_mismatch,
    behind,
    init_incomplete,
    mixed_versions,
    diagnose_network.wrong_interface,
    diagnose_network.net_socket,
    diagnose_network.plugins,
    diagnose_network.no_gpudirect,
    diagnose_network.nic_imbalance,
    diagnose_network.shm_instead_of_p2p,
    forced_settings,
    nvls_off,
    few_channels,
    slow_init,
    harmless,
    cut_lines,
)
