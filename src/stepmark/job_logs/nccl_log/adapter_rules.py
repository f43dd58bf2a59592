"""Rules on network adapters: slower ones, far ones, and those that carry nothing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import multimode

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import (
    PATHS,
    AdapterSpeed,
    LogFacts,
    NicPath,
    Occurrences,
)
from stepmark.ground.grouping import group_by
from stepmark.job_logs.nccl_log.network_rules import (
    comma_list,
    finding_of,
    is_multi_node,
    listed_adapters,
    plural,
)

_SLOWER = 0.9  # of the usual speed; below, an adapter is slow
_FAR = ("PHB", "SYS")


def slow_adapter(facts: LogFacts) -> Iterator[Finding]:
    """Report adapters that are slower than most: a ring is as fast as its slowest adapter."""
    speeds = _speeds(facts)
    usual = max(multimode(speed.gbit_per_s for speed in speeds), default=0.0)
    slow = [speed for speed in speeds if speed.gbit_per_s < _SLOWER * usual]
    if not slow:
        return
    names = comma_list(
        f"{speed.name} of {speed.host} at {speed.gbit_per_s:g} Gb/s" for speed in slow
    )
    verb = "is" if len(slow) == 1 else "are"
    count = sum(speed.gbit_per_s >= _SLOWER * usual for speed in speeds)
    text = f"{plural(len(slow), 'network adapter')} {verb} slow: {names}, and {count} "
    text += f"at {usual:g} Gb/s"
    severity = Severity.WARNING
    if _is_spare(slow, speeds, facts):
        severity = Severity.NOTE
        text += ". Right where these are not meant for the job's data"
    lines: list[Occurrences | Evidence] = [facts.adapter_speeds[speed] for speed in slow]
    yield finding_of("slow-adapter", severity, text + ".", lines)


def _speeds(facts: LogFacts) -> list[AdapterSpeed]:
    """Return adapters of known hosts: by the lines of their ports, else by the topology."""
    known = [speed for speed in facts.adapter_speeds if speed.host in facts.hosts]
    ports = [speed for speed in known if speed.device is None]
    return ports or known


def _is_spare(
    slow: Sequence[AdapterSpeed], speeds: Sequence[AdapterSpeed], facts: LogFacts
) -> bool:
    """Return whether slow adapters seem to be for other use than data.

    Either no connection uses them, or all of several hosts have the same.
    """
    used = {(use.host, use.device) for use in facts.nics}
    if used and all(speed.device is not None for speed in slow):
        return not any((speed.host, speed.device) in used for speed in slow)
    by_host: dict[str, set[tuple[str, float]]] = {}
    for speed in speeds:
        by_host.setdefault(speed.host, set()).add((speed.name, speed.gbit_per_s))
    first, *others = by_host.values()
    return bool(others) and all(other == first for other in others)


def far_adapter(facts: LogFacts) -> Iterator[Finding]:
    """Report GPUs, or hosts' rings, that reach an adapter over a longer way than others."""
    known = [path for path in facts.nic_paths if path.host in facts.hosts]
    paths = [path for path in known if path.gpu]
    if not paths and is_multi_node(facts):
        worst: dict[str, NicPath] = {}
        for path in sorted(known, key=_distance):
            worst[path.host] = path
        paths = list(worst.values())
    nearest = min(map(_distance, paths), default=0)
    far = [path for path in paths if path.path in _FAR and _distance(path) > nearest]
    if not far:
        return
    far.sort(key=_distance, reverse=True)
    names = comma_list(f"{path.gpu or 'a GPU'} of {path.host} ({path.path})" for path in far)
    text = (
        f"Far from a network adapter: {names}; others are at {PATHS[nearest]}. Their data "
        "crosses the CPU (PHB) or the link between CPUs (SYS)."
    )
    lines = [facts.nic_paths[path] for path in far]
    yield finding_of("far-adapter", Severity.WARNING, text, lines)


def _distance(path: NicPath) -> int:
    return PATHS.index(path.path)


def one_channel(facts: LogFacts) -> Iterator[Finding]:
    """Report hosts with several adapters whose collectives have one channel, so one adapter."""
    num_adapters = max(listed_adapters(facts).values(), default=0)
    for comm in facts.communicators:
        counts = comm.channels
        if counts and counts.coll == 1 and num_adapters > 1 and (comm.num_nodes or 1) > 1:
            text = (
                f"Communicator {comm.key} spans {comm.num_nodes} nodes over 1 channel: one of "
                f"{num_adapters} network adapters of a host carries its collectives."
            )
            yield finding_of("one-channel", Severity.WARNING, text, [counts.evidence])


def one_adapter(facts: LogFacts) -> Iterator[Finding]:
    """Report a host whose only rank sends all through one of several adapters."""
    listed = listed_adapters(facts)
    for host, uses in group_by(facts.nics, lambda use: use.host).items():
        devices = {use.device for use in uses}
        ranks = {use.rank for use in uses}
        if len(devices) == len(ranks) == 1 and listed[host] > 1:
            text = (
                f"On {host} all connections of rank {ranks.pop()} use network device "
                f"{devices.pop()} of {listed[host]}: their rate is that of one adapter."
            )
            lines = [use.evidence for use in uses]
            yield finding_of("one-adapter", Severity.NOTE, text, lines)


def idle_adapters(facts: LogFacts) -> Iterator[Finding]:
    """Report adapters that carry nothing, on a host with a rank for each of them."""
    listed = listed_adapters(facts)
    # With PXN a line names the adapter of another rank's GPU.
    relayed = {way.communicator for way in facts.transports if way.pxn}
    uses = group_by(facts.nics, lambda use: (use.communicator, use.host))
    for comm in facts.communicators:
        num_local = Counter(member.host for member in comm.members)
        for host, count in num_local.items() if comm.key not in relayed else ():
            own = uses.get((comm.key, host), [])
            devices = {use.device for use in own}
            adapters = set(range(listed[host]))
            idle = sorted(adapters - devices)
            is_shared = len(devices) < len(own)  # nic-imbalance says so
            # A device beyond the list: two ports of an adapter are one name.
            is_known = bool(own) and devices <= adapters
            if is_known and idle and not is_shared and count >= len(adapters):
                text = (
                    f"On {host} {len(idle)} of {listed[host]} network adapters "
                    f"({comma_list(idle)}) carry nothing in the connections of {count} ranks."
                )
                lines = [use.evidence for use in own]
                yield finding_of("idle-adapters", Severity.WARNING, text, lines)
