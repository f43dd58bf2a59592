"""Rules on a job's network and adapters, and what all rules share: findings, lists, nodes.

Long (over 250 lines) because each rule is short and they are read side by side.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import multimode

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import (
    PATHS,
    AdapterSpeed,
    GpuDirect,
    Interface,
    LogFacts,
    NicPath,
    NicUse,
    Occurrences,
    Plugin,
    Transport,
)
from stepmark.ground.grouping import group_by
from stepmark.ground.units import comma_list, plural, ranks_text

_VIRTUAL = re.compile(r"^(docker|virbr|veth|br-|cni|flannel|cali|vmnet|lxc|podman)")
_ADDRESS = re.compile(r"^(\d+)\.(\d+)\.\d+\.\d+$")
_MAX_EVIDENCE = 4
SOCKET = "NET/Socket"


def finding_of(
    rule: str,
    severity: Severity,
    text: str,
    lines: Iterable[Occurrences | Evidence],
    action: str = "",
) -> Finding:
    """Return a finding with the first lines of each kind, and the number of all lines."""
    firsts: list[Evidence] = []
    more: list[Evidence] = []
    count = 0
    for kind in lines:
        quoted = (kind,) if isinstance(kind, Evidence) else kind.evidence
        count += 1 if isinstance(kind, Evidence) else kind.lines
        firsts += quoted[:1]
        more += quoted[1:]
    evidence = tuple(dict.fromkeys([*firsts, *more]))[:_MAX_EVIDENCE]
    return Finding(
        rule=rule, severity=severity, text=text, evidence=evidence, count=count, action=action
    )


def is_multi_node(facts: LogFacts) -> bool | None:
    """Return whether the job spans nodes; None where no line shows it.

    NCCL's own count decides: containers of one machine have several host names.
    """
    counts = [
        communicator.num_nodes
        for communicator in facts.communicators
        if communicator.num_nodes is not None
    ]
    if counts:
        return max(counts) > 1
    if len(facts.hosts) > 1 or any(way.same_host is False for way in facts.transports):
        return True
    return None


def net_socket(facts: LogFacts) -> Iterator[Finding]:
    """Report that TCP sockets carry the data between nodes, or would."""
    ways = [way for way in facts.transports if way.kind == SOCKET]
    lines: list[Occurrences | Evidence] = [way.evidence for way in ways]
    if socket_lines := facts.networks.get("Socket"):
        lines.append(socket_lines)
    if not lines:
        return
    if ways and all(way.same_host for way in ways):
        text = "GPUs of one host exchange data through TCP sockets."
        yield finding_of("net-socket", Severity.WARNING, text, lines)
        return
    if not _socket_between_nodes(facts):
        alone = is_multi_node(facts) is False
        text = "NCCL's network is TCP sockets. "
        text += "The job ran on one node" if alone else "No line shows a second node"
        text += ": data between its GPUs does not use them."
        yield finding_of("net-socket", Severity.NOTE, text, lines)
        return
    text = "Data between nodes goes through TCP sockets, at a fraction of what a fabric carries"
    failed = [p for p in facts.plugins if p.event == "failed" and p.name[:2] == "IB"]
    if failed:
        text += f"; InfiniBand was tried: {comma_list(sorted({p.name for p in failed}))}"
    lines += _lines(facts, failed)
    yield finding_of("net-socket", Severity.WARNING, text + ".", lines)


def _socket_between_nodes(facts: LogFacts) -> bool:
    """Return whether data between nodes goes through TCP sockets."""
    if any(way.kind == SOCKET and way.same_host is not True for way in facts.transports):
        return True
    return "Socket" in facts.networks and is_multi_node(facts) is True


def plugins(facts: LogFacts) -> Iterator[Finding]:
    """Report a plugin that was requested and did not load, is missing, or has an older API."""
    for kind in ("NET", "TUNER", "PROFILER", "ENV", "COLLNET"):
        requested, missing, symbols, loaded = (
            [plugin for plugin in facts.plugins if (plugin.kind, plugin.event) == (kind, event)]
            for event in ("asked", "missing", "symbol", "loaded")
        )
        requested = [plugin for plugin in requested if plugin.name != "none"]
        set_to = [
            value
            for name, value in facts.environment
            if name == f"NCCL_{kind}_PLUGIN" and value not in ("", "none")
        ]
        if not loaded and not requested and set_to and missing:
            text = f"NCCL_{kind}_PLUGIN asks for {comma_list(set_to)}, which was not found"
            text += f" ({_names(missing)}): NCCL uses its own."
            settings = [facts.environment[f"NCCL_{kind}_PLUGIN", value] for value in set_to]
            lines = [*settings, *_lines(facts, missing)]
            yield finding_of("plugin-not-loaded", Severity.WARNING, text, lines)
        elif (requested or (symbols and kind != "COLLNET")) and not loaded:
            origin = f"{_names(requested)} was requested" if requested else "was found"
            text = f"The {kind} plugin {origin} and did not load"
            if missing:
                text += f"; not found: {_names(missing)}"
            elif symbols:
                text += "; the library lacks every version of the interface that NCCL looks for"
            lines = _lines(facts, [*requested, *missing, *symbols])
            yield finding_of("plugin-not-loaded", Severity.WARNING, text + ".", lines)
        elif symbols and loaded:
            newest = max(plugin.api or 0 for plugin in symbols)
            api = f" (v{loaded[0].api})" if loaded[0].api else ""
            text = (
                f"The {kind} plugin has no interface v{newest}; NCCL then loaded an older one, "
                f"{loaded[0].name}{api}. Harmless: NCCL tries the newest version first."
            )
            lines = _lines(facts, [*symbols, *loaded])
            yield finding_of("plugin-older-api", Severity.NOTE, text, lines)
        elif symbols:
            text = (
                "The network plugin offers no reduction in the network (CollNet). Harmless "
                "unless that was wanted."
            )
            lines = _lines(facts, symbols)
            yield finding_of("plugin-no-collnet", Severity.NOTE, text, lines)
        elif missing and kind == "NET":
            yield _missing(facts, missing)


def _names(plugins: Sequence[Plugin]) -> str:
    return comma_list(dict.fromkeys(plugin.name for plugin in plugins if plugin.name))


def _lines(facts: LogFacts, plugins: Sequence[Plugin]) -> list[Occurrences]:
    return [facts.plugins[plugin] for plugin in plugins]


def _missing(facts: LogFacts, missing: Sequence[Plugin]) -> Finding:
    names = _names(missing) or "none found"
    lines = _lines(facts, missing)
    if _socket_between_nodes(facts):
        text = (
            f"No network plugin ({names}), and data between nodes goes through TCP sockets: a "
            "fabric other than InfiniBand or RoCE (EFA, Slingshot) needs its plugin."
        )
        return finding_of("plugin-missing", Severity.WARNING, text, lines)
    text = f"No network plugin ({names}): NCCL uses its own network. Harmless"
    text += " on one node." if is_multi_node(facts) is False else " with InfiniBand or RoCE."
    return finding_of("plugin-missing", Severity.NOTE, text, lines)


def no_gpudirect(facts: LogFacts) -> Iterator[Finding]:
    """Report connections of a fabric that stage data in host memory, and the printed reason."""
    fabric = [
        way for way in facts.transports if way.kind.startswith("NET/") and way.kind != SOCKET
    ]
    staged = [way for way in fabric if not way.gdrdma]
    ends = [end.evidence for way in staged for end in way.staged]
    reasons = [use for use in facts.gpudirect if not use.enabled and use.net != "Socket"]
    if staged:
        total = sum(way.channels for way in fabric)
        slow = sum(way.channels - way.gdrdma_channels for way in staged)
        verb = "goes" if slow == 1 else "go"
        text = f"{slow} of {total} connections over {staged[0].kind} {verb} without GPUDirect"
        text += " RDMA"
        if slow < total:
            text += f" ({_staged_adapters(staged)})"
            devices = {end.device for way in staged for end in way.staged}
            reasons = [reason for reason in reasons if _may_be_of(reason, devices)]
    elif (
        reasons
        and not fabric
        and facts.networks.keys() - {"Socket"}
        and is_multi_node(facts) is not False
    ):
        text = "GPUDirect RDMA is switched off for the network's adapters"
    else:
        return
    text += ": each byte is copied through host memory"
    distant = [reason for reason in reasons if reason.distance]
    if distant:
        text += (
            f"; GPU and adapter are {distant[0].distance} apart and NCCL_NET_GDR_LEVEL allows "
            f"{distant[0].level}"
        )
    elif reasons:
        text += "; the adapter's driver does not offer it (nvidia_peermem, dma-buf)"
    lines: list[Occurrences | Evidence] = [
        *ends[:1],
        *(facts.gpudirect[reason] for reason in reasons),
        *ends[1:],
    ]
    yield finding_of("no-gpudirect", Severity.WARNING, text + ".", lines)


def _may_be_of(reason: GpuDirect, devices: Iterable[int]) -> bool:
    """Return whether a line such as "Disabled for GPU 3 / HCA 1" is on one of the devices.

    Versions print the device in decimal or in hexadecimal, some behind its system ("0-1").
    """
    index = re.search(r"HCA (?:\d+-)?([0-9a-f]+)$", reason.device)
    return index is None or any(index[1] in (f"{n}", f"{n:x}") for n in devices)


def _staged_adapters(ways: Iterable[Transport]) -> str:
    """Return e.g. "NET/IB/1 of ranks 0, 3; NET/IB/2 of rank 4"."""
    ranks: dict[str, set[int]] = {}
    for way in ways:
        for end in way.staged:
            ranks.setdefault(f"{way.kind}/{end.device}", set()).add(end.rank)
    return comma_list((f"{name} of {ranks_text(of)}" for name, of in ranks.items()), most=4)


def shm_instead_of_p2p(facts: LogFacts) -> Iterator[Finding]:
    """Report GPUs of one host that exchange data through host memory."""
    ways = [way for way in facts.transports if way.kind == "SHM"]
    if not ways:
        return
    direct = sum(way.channels for way in facts.transports if way.kind.startswith("P2P/"))
    shared = sum(way.channels for way in ways)
    text = (
        f"{shared} of {shared + direct} connections between GPUs of one host go through shared "
        "host memory instead of GPU to GPU"
    )
    lines: list[Occurrences | Evidence] = [way.evidence for way in ways[:1]]
    for (name, value), setting in facts.environment.items():
        if name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and value != "0":
            text += f"; {name} is {value}"
            lines.append(setting)
    if facts.p2p_disabled:
        text += "; the driver refuses peer access"
        lines += facts.p2p_disabled.values()
    lines += [way.evidence for way in ways[1:]]
    yield finding_of("shm-instead-of-p2p", Severity.WARNING, text + ".", lines)


def wrong_interface(facts: LogFacts) -> Iterator[Finding]:
    """Report hosts that connect on an interface which only exists inside each of them."""
    if is_multi_node(facts) is not True or len(facts.hosts) < 2:
        return
    bootstrap: dict[Interface, Occurrences] = {}
    for interface, lines in facts.interfaces.items():
        name = interface.name
        role = interface.role
        if role == "bootstrap":
            bootstrap[interface] = lines
        elif role != "oob" and not (role == "socket" and "Socket" in facts.networks):
            continue
        text = f"{_ROLES[role]} uses {name} ({interface.address})"
        if name == "lo" or interface.address.startswith(("127.", "::1")):
            text += ": other hosts cannot reach it."
            yield finding_of("wrong-interface", Severity.PROBLEM, text, [lines])
        elif _VIRTUAL.match(name):
            text += ", a bridge inside the host; NCCL_SOCKET_IFNAME names another."
            yield finding_of("wrong-interface", Severity.WARNING, text, [lines])
    yield from _mixed_interfaces(bootstrap)


_ROLES = {
    "bootstrap": "The bootstrap",
    "oob": "The InfiniBand set-up",
    "socket": "Data over sockets",
}


def _mixed_interfaces(interfaces: Mapping[Interface, Occurrences]) -> Iterator[Finding]:
    by_name: dict[str, Occurrences] = {}
    by_network: dict[str, Occurrences] = {}
    for interface, lines in interfaces.items():
        by_name.setdefault(interface.name, lines)
        if match := _ADDRESS.match(interface.address):
            by_network.setdefault(f"{match[1]}.{match[2]}.*", lines)
    if len(by_name) > 1:
        text = (
            f"Hosts start on interfaces of different names ({comma_list(by_name)}). Right if "
            "these reach each other."
        )
        yield finding_of("mixed-interfaces", Severity.NOTE, text, by_name.values())
    elif len(by_network) > 1:
        names = comma_list(by_network)
        text = f"Hosts start on addresses of different networks ({names}). Right if routed."
        yield finding_of("mixed-interfaces", Severity.NOTE, text, by_network.values())


def nic_imbalance(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks of a host that share an adapter while other adapters carry nothing."""
    listed = listed_adapters(facts)
    used = {use.device for use in facts.nics}
    by_host = group_by(facts.nics, lambda use: (use.communicator, use.host))
    for (_, host), uses in by_host.items():
        by_device = group_by(uses, lambda use: use.device)
        ranks = {device: {use.rank for use in own} for device, own in by_device.items()}
        adapters = used | set(range(listed[host]))
        idle = sorted(adapters - ranks.keys())
        crowded = max(ranks, key=lambda index: len(ranks[index]))
        if not idle or len(ranks[crowded]) < 2:
            continue
        text = (
            f"On {host} ranks {comma_list(sorted(ranks[crowded]))} share network device "
            f"{crowded} while {plural(len(idle), 'device')} ({comma_list(idle)}) of "
            f"{len(adapters)} carry nothing."
        )
        lines = [use.evidence for use in uses if use.device == crowded]
        yield finding_of("nic-imbalance", Severity.WARNING, text, lines)


def listed_adapters(facts: LogFacts) -> Counter[str]:
    """Return how many network adapters each host lists."""
    in_use = {way.kind for way in facts.transports if way.kind.startswith("NET/")}
    role = "socket" if in_use == {SOCKET} else "ib"
    names = {
        (interface.name, host)
        for interface, lines in facts.interfaces.items()
        for host in lines.hosts
        if interface.role == role
    }
    return Counter(host for _, host in names)


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
        worst = {path.host: path for path in sorted(known, key=_distance)}
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


def idle_adapters(facts: LogFacts) -> Iterator[Finding]:
    """Report adapters that carry nothing, on hosts with a rank for each of them.

    With fewer ranks it is a note, where all their connections use one adapter.
    """
    listed = listed_adapters(facts)
    # With PXN a line names the adapter of another rank's GPU.
    relayed = {way.communicator for way in facts.transports if way.pxn}
    uses = group_by(facts.nics, lambda use: (use.communicator, use.host))
    same: dict[tuple[int, tuple[int, ...], int], list[NicUse]] = {}
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
            is_expected = count >= len(adapters) or len(devices) == 1
            if is_known and idle and not is_shared and is_expected:
                same.setdefault((listed[host], tuple(idle), count), []).extend(own)
    for (num_listed, idle_devices, count), own in same.items():
        text = (
            f"On {comma_list(dict.fromkeys(use.host for use in own))}, {len(idle_devices)} of "
            f"{num_listed} network adapters ({comma_list(idle_devices)}) carry nothing in "
            f"the connections of {plural(count, 'rank')}."
        )
        severity = Severity.WARNING if count >= num_listed else Severity.NOTE
        yield finding_of("idle-adapters", severity, text, [use.evidence for use in own])
