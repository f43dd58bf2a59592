"""Rules on the network of a job, and what all rules share: findings, lists, nodes.

Long (over 250 lines) because each rule is short and they are read side by side.
"""

import re
from collections.abc import Iterable, Iterator

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.log_facts import Interface, LogFacts, NicUse, Occurrences, Plugin

_VIRTUAL = re.compile(r"^(docker|virbr|veth|br-|cni|flannel|cali|vmnet|lxc|podman)")
_ADDRESS = re.compile(r"^(\d+)\.(\d+)\.\d+\.\d+$")
_MAX_EVIDENCE = 4
SOCKET = "NET/Socket"


def finding_of(
    rule: str, severity: Severity, text: str, lines: Iterable[Occurrences | Evidence]
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
    return Finding(rule=rule, severity=severity, text=text, evidence=evidence, count=count)


def is_multi_node(facts: LogFacts) -> bool | None:
    """Return whether the job spans nodes; None where no line tells.

    NCCL's own count decides: containers of one machine have several host names.
    """
    known = [one.num_nodes for one in facts.communicators if one.num_nodes is not None]
    if known:
        return max(known) > 1
    if len(facts.hosts) > 1 or any(way.same_host is False for way in facts.transports):
        return True
    return None


def listed(words: Iterable[object], most: int = 8) -> str:
    """Return the first of many, e.g. "0, 1, 2 and 5 more"."""
    texts = [str(word) for word in words]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def plural(number: int, noun: str) -> str:
    """Return e.g. "1 line", "3 lines"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def net_socket(facts: LogFacts) -> Iterator[Finding]:
    """Report that TCP sockets carry the data between nodes, or would."""
    ways = [way for way in facts.transports if way.kind == SOCKET]
    lines: list[Occurrences | Evidence] = [way.evidence for way in ways]
    if used := facts.networks.get("Socket"):
        lines.append(used)
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
    failed = [one for one in facts.plugins if one.event == "failed" and one.name[:2] == "IB"]
    if failed:
        text += f"; InfiniBand was tried: {listed(sorted({one.name for one in failed}))}"
    lines += [facts.plugins[one] for one in failed]
    yield finding_of("net-socket", Severity.WARNING, text + ".", lines)


def _socket_between_nodes(facts: LogFacts) -> bool:
    """Return whether data between nodes goes through TCP sockets."""
    if any(way.kind == SOCKET and way.same_host is not True for way in facts.transports):
        return True
    return "Socket" in facts.networks and is_multi_node(facts) is True


def plugins(facts: LogFacts) -> Iterator[Finding]:
    """Report a plugin that was requested and did not load, is missing, or has an older API."""
    for kind in ("NET", "TUNER", "PROFILER", "ENV", "COLLNET"):
        own = [one for one in facts.plugins if one.kind == kind]
        by_event = {
            event: [one for one in own if one.event == event]
            for event in ("asked", "missing", "symbol", "loaded", "failed")
        }
        yield from _plugin(facts, kind, by_event)


def _plugin(facts: LogFacts, kind: str, by_event: dict[str, list[Plugin]]) -> Iterator[Finding]:
    asked = [one for one in by_event["asked"] if one.name != "none"]
    loaded, missing, symbols = by_event["loaded"], by_event["missing"], by_event["symbol"]
    if (asked or (symbols and kind != "COLLNET")) and not loaded:
        why = [*missing, *symbols]
        what = f"{listed(one.name for one in asked)} was requested" if asked else "was found"
        text = f"The {kind} plugin {what} and did not load"
        if missing:
            text += f"; not found: {listed(dict.fromkeys(one.name for one in missing))}"
        elif symbols:
            text += "; the library lacks every version of the interface that NCCL looks for"
        lines = [facts.plugins[one] for one in (*asked, *why)]
        yield finding_of("plugin-not-loaded", Severity.WARNING, text + ".", lines)
    elif symbols and loaded:
        newest = max((one.api or 0 for one in symbols), default=0)
        api = f" (v{loaded[0].api})" if loaded[0].api else ""
        text = (
            f"The {kind} plugin has no interface v{newest}; NCCL then loaded an older one, "
            f"{loaded[0].name}{api}. Harmless: NCCL tries the newest version first."
        )
        lines = [facts.plugins[one] for one in (*symbols, *loaded)]
        yield finding_of("plugin-older-api", Severity.NOTE, text, lines)
    elif symbols:
        text = (
            "The network plugin offers no reduction in the network (CollNet). Harmless unless "
            "that was wanted."
        )
        yield finding_of(
            "plugin-no-collnet", Severity.NOTE, text, [facts.plugins[one] for one in symbols]
        )
    elif missing and kind == "NET":
        yield _missing(facts, missing)


def _missing(facts: LogFacts, missing: list[Plugin]) -> Finding:
    names = listed(dict.fromkeys(one.name for one in missing if one.name)) or "none found"
    lines = [facts.plugins[one] for one in missing]
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
    reasons = [one for one in facts.gpudirect if not one.enabled and one.net != "Socket"]
    if staged:
        total = sum(way.channels for way in fabric)
        slow = sum(way.channels for way in staged)
        text = f"{slow} of {total} connections over {staged[0].kind} go without GPUDirect RDMA"
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
    far = [one for one in reasons if one.distance]
    if far:
        text += (
            f"; GPU and adapter are {far[0].distance} apart and NCCL_NET_GDR_LEVEL allows "
            f"{far[0].level}"
        )
    elif reasons:
        text += "; the adapter's driver does not offer it (nvidia_peermem, dma-buf)"
    lines: list[Occurrences | Evidence] = [way.evidence for way in staged[:1]]
    lines += [facts.gpudirect[one] for one in reasons]
    lines += [way.evidence for way in staged[1:]]
    yield finding_of("no-gpudirect", Severity.WARNING, text + ".", lines)


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
    uses_tcp = "Socket" in facts.networks
    interfaces = [
        one
        for one in facts.interfaces
        if one.role in ("bootstrap", "oob") or (one.role == "socket" and uses_tcp)
    ]
    for one in interfaces:
        if one.name == "lo" or one.address.startswith(("127.", "::1")):
            text = f"{_role(one)} uses {one.name} ({one.address}): other hosts cannot reach it."
            yield finding_of("wrong-interface", Severity.PROBLEM, text, [facts.interfaces[one]])
        elif _VIRTUAL.match(one.name):
            text = (
                f"{_role(one)} uses {one.name} ({one.address}), a bridge inside the host; "
                "NCCL_SOCKET_IFNAME names another."
            )
            yield finding_of("wrong-interface", Severity.WARNING, text, [facts.interfaces[one]])
    yield from _mixed_interfaces(facts, [one for one in interfaces if one.role == "bootstrap"])


def _role(one: Interface) -> str:
    names = {"bootstrap": "The bootstrap", "oob": "The InfiniBand set-up"}
    return names.get(one.role, "Data over sockets")


def _mixed_interfaces(facts: LogFacts, interfaces: list[Interface]) -> Iterator[Finding]:
    firsts: dict[str, Interface] = {}
    for one in interfaces:
        firsts.setdefault(one.name, one)
    subnets: dict[tuple[str, str], Interface] = {}
    for one in interfaces:
        if match := _ADDRESS.match(one.address):
            subnets.setdefault((match[1], match[2]), one)
    if len(firsts) > 1:
        text = (
            f"Hosts start on interfaces of different names ({listed(firsts)}). Right if these "
            "reach each other."
        )
        lines = [facts.interfaces[one] for one in firsts.values()]
        yield finding_of("mixed-interfaces", Severity.NOTE, text, lines)
    elif len(subnets) > 1:
        names = listed(f"{a}.{b}.*" for a, b in subnets)
        text = f"Hosts start on addresses of different networks ({names}). Right if routed."
        lines = [facts.interfaces[one] for one in subnets.values()]
        yield finding_of("mixed-interfaces", Severity.NOTE, text, lines)


def nic_imbalance(facts: LogFacts) -> Iterator[Finding]:
    """Report ranks of a host that share an adapter while other adapters carry nothing."""
    by_host: dict[tuple[str, str], list[NicUse]] = {}
    for use in facts.nics:
        by_host.setdefault((use.communicator, use.host), []).append(use)
    for (_, host), uses in by_host.items():
        ranks: dict[int, set[int]] = {}
        for use in uses:
            ranks.setdefault(use.device, set()).add(use.rank)
        known = _adapters(facts, host)
        idle = sorted(known - ranks.keys())
        crowded = max(ranks, key=lambda index: len(ranks[index]))
        if not idle or len(ranks[crowded]) < 2:
            continue
        text = (
            f"On {host} ranks {listed(sorted(ranks[crowded]))} share network device {crowded} "
            f"while {plural(len(idle), 'device')} ({listed(idle)}) of {len(known)} "
            "carry nothing."
        )
        lines = [use.evidence for use in uses if use.device == crowded]
        yield finding_of("nic-imbalance", Severity.WARNING, text, lines)


def _adapters(facts: LogFacts, host: str) -> set[int]:
    """Return the adapters that the host lists; else those that any host uses."""
    in_use = {way.kind for way in facts.transports if way.kind.startswith("NET/")}
    role = "socket" if in_use == {SOCKET} else "ib"
    names = {
        one.name
        for one, lines in facts.interfaces.items()
        if one.role == role and host in lines.hosts
    }
    return {use.device for use in facts.nics} | set(range(len(names)))
