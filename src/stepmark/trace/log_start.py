"""Lines of a start: versions, variables, plugins, interfaces, communicators, their times."""

import re

from stepmark.core.log_facts import MAX_RANKS, ChannelCounts, Graph, InitTime
from stepmark.trace.log_facts import Collector
from stepmark.trace.log_said import Said

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
    r"^(\d{1,9}) coll channels(?:, (\d{1,9}) collnet channels)?(?:, (\d{1,9}) nvls channels)?"
    r", (\d{1,9}) p2p channels(?:, (\d{1,9}) p2p channels per peer)?"
)
_GRAPH = re.compile(
    r"^Pattern (\d{1,9}), crossNic \d+, nChannels (\d{1,9}), "
    r"bw ([\d.]{1,20})/([\d.]{1,20}), type (\w+)/(\w+)"
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


def version(held: Collector, said: Said) -> None:
    """NCCL version 2.28.9+cuda13.0, RCCL version : 2.21.5-HEAD:..., HIP version : ..."""
    if found := _NCCL.match(said.text):
        library, number, toolkit, toolkit_number = found.groups()
        held.say(held.versions, (library.lower(), number), said)
        with_cuda = _WITH_CUDA.search(said.text)
        if toolkit:
            held.say(held.versions, (toolkit, toolkit_number), said)
        elif with_cuda:
            held.say(held.versions, ("cuda", with_cuda[1].rstrip(".")), said)
    elif found := _OTHER_VERSION.match(said.text):
        held.say(held.versions, (found[1].lower(), found[2]), said)
    elif found := _DRIVER.match(said.text):
        number = int(found[1])
        value = f"{number // 1000}.{number % 1000 // 10}"
        held.say(held.versions, ("cuda_driver", value), said)


def variable(held: Collector, said: Said) -> None:
    """NCCL_X set by environment to v."""
    if found := _SET.match(said.text):
        held.say(held.environment, (found[1], found[2]), said)


def plugin(held: Collector, said: Said) -> None:
    """NET/Plugin: ..., TUNER/Plugin: ..., and so on."""
    found = _PLUGIN.match(said.text)
    if found is None:
        return
    kind, words = found.groups()
    symbol, loaded = _SYMBOL.search(words), _LOADED.match(words)
    tell = held.plugin_said
    if symbol:
        kind = _PLUGIN_KINDS.get(symbol[1], symbol[1].upper())
        tell(said, kind, "symbol", "", int(symbol[2]) if symbol[2] else None)
    elif api := _PROFILER_API.search(words):
        tell(said, kind, "loaded", api[0], int(api[1]))
    elif loaded:
        kind = _PLUGIN_KINDS.get(loaded[1] or "", kind)
        tell(said, kind, "loaded", loaded[2], int(loaded[3]) if loaded[3] else None)
    elif words.startswith("Using tuner plugin "):
        tell(said, kind, "loaded", words.removeprefix("Using tuner plugin "), None)
    elif " set by env to " in words or "_PLUGIN set to " in words:
        tell(said, kind, "asked", words.rsplit(" to ", 1)[1], None)
    elif "ould not find" in words or "o plugin found" in words or "cannot open" in words:
        for library in dict.fromkeys(_LIBRARY.findall(words)) or [""]:
            tell(said, kind, "missing", library.rstrip("."), None)
    elif words.startswith("Using internal"):
        tell(said, kind, "internal", "", None)


def plugin_loaded(held: Collector, said: Said) -> None:
    """Lines on plugins without their kind in front, by their first words."""
    for start, kind, event in (
        ("Successfully loaded external network plugin ", "NET", "loaded"),
        ("Successfully loaded external tuner plugin ", "TUNER", "loaded"),
        ("Successfully loaded external profiler plugin ", "PROFILER", "loaded"),
        ("Successfully loaded external env plugin ", "ENV", "loaded"),
        ("External network plugin ", "NET", "failed"),
        ("External tuner plugin ", "TUNER", "failed"),
        ("External profiler plugin ", "PROFILER", "failed"),
        ("Failed to initialize NET plugin ", "NET", "failed"),
        ("Failed to open libibverbs", "NET", "failed"),
        ("P2P plugin ", "NET", "loaded"),
    ):
        if said.text.startswith(start):
            name = said.text.removeprefix(start).removesuffix(" is unsupported")
            name = "IB: no libibverbs.so" if start.endswith("verbs") else name
            held.plugin_said(said, kind, event, name, None)
            return


def bootstrap(held: Collector, said: Said) -> None:
    """Bootstrap : Using eth0:10.0.0.1<0>."""
    if ": Using" in said.text or ":Using" in said.text:
        for name, address in _INTERFACE.findall(said.text):
            held.interface_said(said, "bootstrap", name, address)


def net(held: Collector, said: Said) -> None:
    """NET/IB : Using ..., NET/Socket : Using ..., NET/OFI ..., and GPUDirect per adapter."""
    text = said.text
    if "GPU Direct RDMA" in text or "disabling GDR" in text:
        held.gpudirect_said(said)
    elif text.startswith("NET/Socket") and "Using [" in text:
        for name, address in _INTERFACE.findall(text):
            held.interface_said(said, "socket", name, address)
    elif text.startswith("NET/IB") and "No device found" in text:
        held.plugin_said(said, "NET", "failed", "IB: no device", None)
    elif text.startswith("NET/IB") and "Using" in text:
        adapters, _, rest = text.partition("; OOB ")
        for name, link in _ADAPTER.findall(adapters):
            held.interface_said(said, "ib", name, link)
        for name, address in _INTERFACE.findall(rest):
            held.interface_said(said, "oob", name, address)
    elif text.startswith("NET/OFI"):
        _libfabric(held, said)


_OFI_FACTS = (
    ("aws-ofi-nccl", re.compile(r"Initializing aws-ofi-\w+ (\S+)")),
    ("libfabric", re.compile(r"Using Libfabric version (\S+)")),
    ("ofi_provider", re.compile(r"Selected [Pp]rovider is (\S+?),?(?: |$)")),
)


def _libfabric(held: Collector, said: Said) -> None:
    for what, pattern in _OFI_FACTS:
        if found := pattern.search(said.text):
            held.say(held.versions, (what, found[1]), said)


def network(held: Collector, said: Said) -> None:
    """Using network IB."""
    for start in ("Using network ", "Using internal Network ", "Using internal network "):
        if said.text.startswith(start) and "plugin" not in said.text:
            held.say(held.networks, said.text.removeprefix(start), said)
            return


def communicator(held: Collector, said: Said) -> None:
    """comm 0x... rank r nranks n ..., of any version and with any function in front."""
    found = _COMM.search(said.text)
    if found is None:
        return
    pointer, rank, num_ranks = found.groups()
    if int(num_ranks) > MAX_RANKS:
        return
    comm_id = _COMM_ID.search(said.text)
    if "Init START" in said.text or "Init COMPLETE" in said.text:
        held.forget_cells()
    if "Init START" in said.text:
        handle = held.handles.start(said, pointer, comm_id and comm_id[1])
        handle.started = said.evidence()
    else:
        handle = held.handles.of(said, pointer)
    handle.rank, handle.num_ranks = int(rank), int(num_ranks)
    if comm_id:
        handle.comm_id = comm_id[1]
    if "Init COMPLETE" in said.text:
        handle.completed = True
    if device := _DEVICE.search(said.text):
        handle.device = int(device[1])
    if bus := _BUS.search(said.text):
        handle.bus_id = bus[1]
    if nodes := _NODES.search(said.text):
        handle.num_nodes, handle.local_ranks, handle.local_rank = map(int, nodes.groups())


def init_call(held: Collector, said: Said) -> None:
    """CALL line of ncclCommInitRank(comm, nranks, commId, rank, device)."""
    found = _INIT_CALL.search(said.text)
    if found is None or int(found[2]) > MAX_RANKS:
        return
    held.forget_cells()
    pointer, num_ranks, comm_id, rank, device = found.groups()
    handle = held.handles.of(said, pointer)
    handle.comm_id = handle.comm_id or comm_id
    handle.rank, handle.num_ranks, handle.device = int(rank), int(num_ranks), int(device)


def init_time(held: Collector, said: Said) -> None:
    """Init timings - ncclCommInitRank: rank 0 nranks 8 total 1.60 (kernels 0.43, ...)."""
    found = _INIT_TIME.match(said.text)
    if found is None or int(found[2]) > MAX_RANKS:
        return
    rank, num_ranks, total, parts = found.groups()
    handle = held.handles.with_rank(said, int(rank), int(num_ranks))
    if handle is None:
        handle = held.handles.of(said, "")
        handle.rank, handle.num_ranks = int(rank), int(num_ranks)
    handle.init = InitTime(
        total_s=_number(total),
        parts_s=tuple((name, _number(seconds)) for name, seconds in _PART.findall(parts)),
        evidence=said.evidence(),
    )


def _number(digits: str) -> float:
    """0 of what is no number: a mangled line must not stop the reader."""
    try:
        return float(digits)
    except ValueError:
        return 0.0


def channel_counts(held: Collector, said: Said) -> None:
    """24 coll channels, 24 collnet channels, 0 nvls channels, ..."""
    found, handle = _CHANNELS.match(said.text), held.handles.latest(said)
    if found and handle and handle.channels is None:
        coll, collnet, nvls, p2p, per_peer = (
            None if digits is None else int(digits[:9]) for digits in found.groups()
        )
        handle.channels = ChannelCounts(
            coll=coll or 0,
            collnet=collnet,
            nvls=nvls,
            p2p=p2p or 0,
            p2p_per_peer=per_peer,
            evidence=said.evidence(),
        )


def graph(held: Collector, said: Said) -> None:
    """Pattern 4, crossNic 0, nChannels 12, bw 30.0/30.0, type NVL/PIX, ..."""
    found, handle = _GRAPH.match(said.text), held.handles.latest(said)
    if found and handle and len(handle.graphs) < 16:
        pattern, num_channels, intra, inter, path_intra, path_inter = found.groups()
        handle.graphs.append(
            Graph(
                pattern=int(pattern[:9]),
                num_channels=int(num_channels[:9]),
                bytes_per_s=_number(intra) * 1e9,
                inter_bytes_per_s=_number(inter) * 1e9,
                path_intra=path_intra,
                path_inter=path_inter,
            )
        )


def multicast(held: Collector, said: Said) -> None:
    """NVLS multicast support is [not ]available on dev 0."""
    if "multicast support is" in said.text:
        held.say(held.nvls, "not available" not in said.text, said)
