"""Handlers of lines: versions, plugins, interfaces, communicators, their connections."""

import re

from stepmark.findings.log_facts import MAX_RANKS, ChannelCounts, InitTime
from stepmark.job_logs.nccl_log import topology
from stepmark.job_logs.nccl_log.collector import (
    AdapterSide,
    Collector,
    Link,
    LinkLines,
    StagedLines,
)
from stepmark.job_logs.nccl_log.communicators import CommHandle, parse_float
from stepmark.job_logs.nccl_log.lines import LogMessage

_NCCL = re.compile(
    r"^(NCCL|RCCL) version ?:? ?(\d{1,9}(?:\.\d+)+(?:-[\w:.]+)?)(?:\+(cuda|hip)([\d.]{1,20}))?"
)
_WITH_CUDA = re.compile(r" compiled with CUDA ([\d.]{1,20})")
_OTHER_VERSION = re.compile(r"^(HIP|ROCm) version *: *([\w.\-]+)")
_DRIVER = re.compile(r"^cudaDriverVersion (\d{4,6})$")
_SET = re.compile(r"^(\w+) set by environment to (.*?)\.?$")
_PLUGIN = re.compile(r"^(\w+)/Plugin ?:? (.*)$")
_LIBRARY = re.compile(r"[\w./\-]+\.so[\w.]*")
_SYMBOL = re.compile(
    r"ailed to find nccl(Net|CollNet|Tuner|Profiler|Env|Gin|Rma)\w*?(?:_v(\d{1,9}))?\b"
)
_LOADED = re.compile(
    r"^[Ll]oaded (?:(net|coll|collnet|tuner|gin|rma) plugin )?(.+?)(?: \(v(\d{1,9})\))?\.?$"
)
_PROFILER_API = re.compile(r"ncclProfiler_v(\d{1,9})")
_INTERFACE = re.compile(r"(?:\[\d+\])?([^\s:\[\];]+):([^\s<]+)<\d+>")
_ADAPTER = re.compile(r"\[\d+\]([^\s:]+):\d+/(\w+)")
_COMM = re.compile(r"comm (0x[0-9a-f]+) .*?rank (\d{1,9}) n[rR]anks (\d{1,9})(?!\d)")
_COMM_ID = re.compile(r"commId (0x[0-9a-f]+)")
_DEVICE = re.compile(r"cudaDev (\d{1,9})")
_BUS = re.compile(r"busId ([0-9a-f]+)")
_NODES = re.compile(r"nNodes (\d{1,9}) localRanks (\d{1,9}) localRank (\d{1,9})")
_INIT_TIME = re.compile(
    r"^Init timings(?: - \w+)?: rank (\d{1,9}) nranks (\d{1,9}) total ([\d.]{1,20}) \((.*)\)"
)
_PART = re.compile(r"(\w+) ([\d.]{1,20})")
_CHANNELS = re.compile(
    r"^(\d{1,9}) coll channels(?:, \d{1,9} collnet channels)?(?:, (\d{1,9}) nvls channels)?"
    r", (\d{1,9}) p2p channels"
)
_INIT_CALL = re.compile(
    r"ncclCommInitRank\((0x[0-9a-f]+), (\d{1,9}), (0x[0-9a-f]+), (\d{1,9}), (\d{1,9})\)"
)
_PLUGIN_KINDS = {
    "Net": "NET",
    "net": "NET",
    "CollNet": "COLLNET",
    "coll": "COLLNET",
    "collnet": "COLLNET",
}


def version(collector: Collector, message: LogMessage) -> None:
    """Record NCCL version 2.28.9+cuda13.0, RCCL version : 2.21.5-HEAD:..., HIP version : ..."""
    if match := _NCCL.match(message.text):
        library, number, toolkit, toolkit_number = match.groups()
        collector.count(collector.versions, (library.lower(), number), message)
        cuda = _WITH_CUDA.search(message.text)
        if toolkit:
            collector.count(collector.versions, (toolkit, toolkit_number), message)
        elif cuda:
            collector.count(collector.versions, ("cuda", cuda[1].rstrip(".")), message)
    elif match := _OTHER_VERSION.match(message.text):
        collector.count(collector.versions, (match[1].lower(), match[2]), message)
    elif match := _DRIVER.match(message.text):
        number = int(match[1])
        value = f"{number // 1000}.{number % 1000 // 10}"
        collector.count(collector.versions, ("cuda_driver", value), message)


def variable(collector: Collector, message: LogMessage) -> None:
    """Record NCCL_X set by environment to v."""
    if match := _SET.match(message.text):
        collector.count(collector.environment, (match[1], match[2]), message)


def plugin(collector: Collector, message: LogMessage) -> None:
    """Record NET/Plugin: ..., TUNER/Plugin: ..., and so on."""
    match = _PLUGIN.match(message.text)
    if match is None:
        return
    kind, words = match.groups()
    symbol = _SYMBOL.search(words)
    loaded = _LOADED.match(words)
    add = collector.add_plugin
    if symbol:
        kind = _PLUGIN_KINDS.get(symbol[1], symbol[1].upper())
        add(message, kind, "symbol", "", int(symbol[2]) if symbol[2] else None)
    elif api := _PROFILER_API.search(words):
        add(message, kind, "loaded", api[0], int(api[1]))
    elif loaded:
        kind = _PLUGIN_KINDS.get(loaded[1] or "", kind)
        add(message, kind, "loaded", loaded[2], int(loaded[3]) if loaded[3] else None)
    elif words.startswith("Using tuner plugin "):
        add(message, kind, "loaded", words.removeprefix("Using tuner plugin "))
    elif " set by env to " in words or "_PLUGIN set to " in words:
        add(message, kind, "asked", words.rsplit(" to ", 1)[1])
    elif "ould not find" in words or "o plugin found" in words or "cannot open" in words:
        for library in dict.fromkeys(_LIBRARY.findall(words)) or [""]:
            add(message, kind, "missing", library.rstrip("."))
    elif words.startswith("Using internal"):
        add(message, kind, "internal", "")


_UNPREFIXED = re.compile(
    r"^(?:P2P|(?:(?P<loaded>Successfully loaded external)|External|Failed to initialize) "
    r"(?P<kind>network|NET|tuner|profiler|env)) plugin (?P<name>.*?)(?: is unsupported)?$"
)


def plugin_loaded(collector: Collector, message: LogMessage) -> None:
    """Record lines on plugins without their kind in front."""
    if message.text.startswith("Failed to open libibverbs"):
        collector.add_plugin(message, "NET", "failed", "IB: no libibverbs.so")
    elif match := _UNPREFIXED.match(message.text):
        kind = (match["kind"] or "NET").upper().replace("NETWORK", "NET")
        event = "loaded" if match["loaded"] or match["kind"] is None else "failed"
        collector.add_plugin(message, kind, event, match["name"])


def bootstrap(collector: Collector, message: LogMessage) -> None:
    """Record Bootstrap : Using eth0:10.0.0.1<0>."""
    if ": Using" in message.text or ":Using" in message.text:
        for name, address in _INTERFACE.findall(message.text):
            collector.add_interface(message, "bootstrap", name, address)


def net(collector: Collector, message: LogMessage) -> None:
    """Record NET/IB : Using ..., NET/Socket : Using ..., NET/OFI ..., GPUDirect."""
    text = message.text
    if "GPU Direct RDMA" in text or "disabling GDR" in text:
        collector.add_gpudirect(message)
    elif text.startswith("NET/Socket") and "Using [" in text:
        for name, address in _INTERFACE.findall(text):
            collector.add_interface(message, "socket", name, address)
    elif " speed=" in text:
        topology.port(collector, message)
    elif text.startswith("NET/IB") and "No device found" in text:
        collector.add_plugin(message, "NET", "failed", "IB: no device")
    elif text.startswith("NET/IB") and "Using" in text:
        adapters, _, rest = text.partition("; OOB ")
        for name, link in _ADAPTER.findall(adapters):
            collector.add_interface(message, "ib", name, link)
        for name, address in _INTERFACE.findall(rest):
            collector.add_interface(message, "oob", name, address)
    elif text.startswith("NET/OFI"):
        for component, pattern in _OFI_FACTS:
            if match := pattern.search(text):
                collector.count(collector.versions, (component, match[1]), message)


_OFI_FACTS = (
    ("aws-ofi-nccl", re.compile(r"Initializing aws-ofi-\w+ (\S+)")),
    ("libfabric", re.compile(r"Using Libfabric version (\S+)")),
    ("ofi_provider", re.compile(r"Selected [Pp]rovider is (\S+?),?(?: |$)")),
)


def network(collector: Collector, message: LogMessage) -> None:
    """Record Using network IB."""
    for start in ("Using network ", "Using internal Network ", "Using internal network "):
        if message.text.startswith(start) and "plugin" not in message.text:
            collector.count(collector.networks, message.text.removeprefix(start), message)
            return


def communicator(collector: Collector, message: LogMessage) -> None:
    """Record comm 0x... rank r nranks n ..., of any version and with any function in front."""
    match = _COMM.search(message.text)
    if match is None:
        return
    pointer, rank, num_ranks = match.groups()
    if int(num_ranks) > MAX_RANKS:
        return
    comm_id = _COMM_ID.search(message.text)
    if "Init START" in message.text or "Init COMPLETE" in message.text:
        collector.forget_counters(message.process)
    if "Init START" in message.text:
        handle = collector.communicators.start(message, pointer, comm_id and comm_id[1])
        handle.started = message.evidence()
    else:
        handle = collector.communicators.of(message, pointer)
    handle.rank, handle.num_ranks = int(rank), int(num_ranks)
    if comm_id:
        handle.comm_id = comm_id[1]
    if "Init COMPLETE" in message.text:
        handle.completed = True
    if "Abort COMPLETE" in message.text:
        collector.aborted.append(message.evidence())
    if "Destroy COMPLETE" in message.text:
        handle.destroyed = message.evidence()
    if device := _DEVICE.search(message.text):
        handle.device = int(device[1])
    if bus := _BUS.search(message.text):
        handle.bus_id = bus[1]
    if nodes := _NODES.search(message.text):
        handle.num_nodes, handle.local_ranks, handle.local_rank = map(int, nodes.groups())


def init_call(collector: Collector, message: LogMessage) -> None:
    """Record the CALL of ncclCommInitRank(comm, nranks, commId, rank, device)."""
    match = _INIT_CALL.search(message.text)
    if match is None or int(match[2]) > MAX_RANKS:
        return
    collector.forget_counters(message.process)
    pointer, num_ranks, comm_id, rank, device = match.groups()
    handle = collector.communicators.of(message, pointer)
    handle.comm_id = handle.comm_id or comm_id
    handle.rank, handle.num_ranks, handle.device = int(rank), int(num_ranks), int(device)


def init_time(collector: Collector, message: LogMessage) -> None:
    """Record Init timings - ncclCommInitRank: rank 0 nranks 8 total 1.60 (kernels ...)."""
    match = _INIT_TIME.match(message.text)
    if match is None or int(match[2]) > MAX_RANKS:
        return
    rank, num_ranks, total, parts = match.groups()
    handle = collector.communicators.with_rank(message, int(rank), int(num_ranks))
    if handle is None:
        handle = collector.communicators.of(message, "")
        handle.rank, handle.num_ranks = int(rank), int(num_ranks)
    handle.init = InitTime(
        total_s=parse_float(total) or 0.0,
        parts_s=tuple((name, parse_float(s) or 0.0) for name, s in _PART.findall(parts)),
        evidence=message.evidence(),
    )


def channel_counts(collector: Collector, message: LogMessage) -> None:
    """Record 24 coll channels, 24 collnet channels, 0 nvls channels, ..."""
    match = _CHANNELS.match(message.text)
    handle = collector.communicators.latest(message)
    if match and handle and handle.channels is None:
        coll, nvls, p2p = (
            None if digits is None else int(digits[:9]) for digits in match.groups()
        )
        handle.channels = ChannelCounts(
            coll=coll or 0,
            nvls=nvls,
            p2p=p2p or 0,
            evidence=message.evidence(),
        )


_VIA = re.compile(
    r"(?:Channel|Ring) (\d+(?:/\d+)?) : (\d{1,9})(?:\[[^\]]*\])? -> (\d{1,9})(?:\[[^\]]*\])?"
    r"(?: \[(send|receive)\])? via (.+)$"
)
_COLLNET = re.compile(
    r"^CollNet (\d+(?:/\d+)?) : (\d{1,9}) \[(send|receive)\] via COLLNET/(.+?)/(\d{1,9})(/.*)?$"
)
_ORDER = re.compile(r"^Channel (\d{1,4})/(\d{1,4}) : +([\d ]+)$")
_COMMUNICATOR = re.compile(r" comm (0x[0-9a-f]+) nRanks (\d{1,9})(?!\d)")
_NET = re.compile(r"^NET/(.+?)/(\d{1,9})(?:\((\d+)\))?((?:/.*)?)$")
_SIDES = {"send": 0, "receive": 1}


def channel(collector: Collector, message: LogMessage) -> None:
    """Record Channel 00/24 : 0 1 2 3 (a ring) or 00/0 : 0[0] -> 1[1] via P2P/CUMEM."""
    if order := _ORDER.match(message.text):
        handle = collector.communicators.latest(message)
        if handle:
            handle.rings[tuple(int(rank[:9]) for rank in order[3].split())] += 1
        return
    match = _VIA.search(message.text)
    if match is None and message.text.rstrip().endswith("->"):
        message = message.with_next_line()
        match = _VIA.search(message.text)
    if match is None:
        return
    name, source, target, side, way = match.groups()
    stated = _COMMUNICATOR.search(way)
    if stated and int(stated[2]) > MAX_RANKS:
        return
    table = collector.communicators
    handle = table.of(message, stated[1]) if stated else table.latest(message)
    if handle is None:
        handle = table.of(message, "")
    if stated:
        handle.num_ranks = handle.num_ranks or int(stated[2])
        way = way[: stated.start()]
    way = way.split(" comm ", 1)[0].strip()
    ranks = (int(source), int(target))
    _add_link(collector, message, handle, name, ranks, _SIDES[side or "send"], way)


def _add_link(
    collector: Collector,
    message: LogMessage,
    handle: CommHandle,
    channel_name: str,
    ranks: tuple[int, int],
    side: int,
    way: str,
) -> None:
    net = _NET.match(way)
    if net is None and way.startswith("NET/"):
        return  # cut
    pxn = bool(net and net[3])
    link = Link(_kind(way, net), *ranks)
    lines = collector.links.setdefault((handle.order, link), LinkLines(message))
    lines.sides[side] += 1
    lines.pxn[side] += pxn
    if net:
        end = AdapterSide(handle.order, ranks[side], side, link.kind, int(net[2]), net[3])
        _add_end(collector, message, lines, end, channel_name, net[4])
    # With PXN the adapter belongs to another rank's GPU.
    if net and not pxn:
        key = (handle.order, ranks[side], int(net[2]))
        collector.nics.setdefault(key, message)


def _add_end(
    collector: Collector,
    message: LogMessage,
    lines: LinkLines,
    end: AdapterSide,
    channel_name: str,
    ending: str,
) -> None:
    """Record whether a line that ends so has GPUDirect RDMA; nothing where it is cut."""
    if _GDRDMA.match(ending) or (not ending and message.following.startswith(b"/GDR")):
        collector.direct.add(end)
    elif ending != "/":
        lines.staged.setdefault(end, StagedLines(message)).channels[channel_name] += 1


# No other word begins so: a line cut inside it still says it.
_GDRDMA = re.compile(r"^/G|/GDRDMA")


def _kind(way: str, net: re.Match[str] | None) -> str:
    if net:
        return f"NET/{net[1]}"
    if "shared memory" in way or way.startswith("SHM"):
        return "SHM"
    return "/".join(way.split("/")[:2])


def collnet(collector: Collector, message: LogMessage) -> None:
    """Record CollNet 00/0 : 0 [send] via COLLNET/SHARP/0."""
    match = _COLLNET.match(message.text)
    handle = collector.communicators.latest(message)
    if match and handle:
        name, rank, word, way, device, ending = match.groups()
        side = _SIDES[word]
        link = Link(f"COLLNET/{way.split('/')[0]}", int(rank), None)
        lines = collector.links.setdefault((handle.order, link), LinkLines(message))
        lines.sides[side] += 1
        end = AdapterSide(handle.order, int(rank), side, link.kind, int(device), None)
        _add_end(collector, message, lines, end, name, ending or "")


def nvls(collector: Collector, message: LogMessage) -> None:
    """Record NVLS multicast support is [not ]available on dev 0, and who joins NVLink SHARP.

    That is NVLS comm 0x... headRank 0 nHeads 8 ...
    """
    if "multicast support is" in message.text:
        collector.count(collector.nvls, "not available" not in message.text, message)
    handle = collector.communicators.latest(message)
    if handle and handle.rank is not None and message.text.startswith("NVLS comm "):
        link = Link("NVLS", handle.rank, None)
        collector.links.setdefault((handle.order, link), LinkLines(message)).sides[0] += 1


def ring(collector: Collector, message: LogMessage) -> None:
    """Record Ring 00 : 7 -> 0 -> 1 of old versions, with `via`; others repeat the channels."""
    if " via " in message.text or message.text.rstrip().endswith("->"):
        channel(collector, message)


def trees(collector: Collector, message: LogMessage) -> None:
    """Record Trees [0] 1/-1/-1->0->-1 [1] ..."""
    handle = collector.communicators.latest(message)
    if handle and handle.num_trees is None:
        handle.num_trees = message.text.count("[")
