"""Lines of connections between ranks: channels, rings, trees, adapters."""

import re

from stepmark.core.log_facts import MAX_RANKS
from stepmark.trace.nccl_log.collector import Collector, Link, LinkLines
from stepmark.trace.nccl_log.communicators import CommHandle
from stepmark.trace.nccl_log.lines import LogMessage

_VIA = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,9})(?:\[[^\]]*\])? -> (\d{1,9})(?:\[[^\]]*\])?"
    r"(?: \[(send|receive)\])? via (.+)$"
)
_COLLNET = re.compile(r"^CollNet \d+(?:/\d+)? : (\d{1,9}) \[(send|receive)\] via COLLNET/(.+)$")
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
        match = _VIA.search(message.with_next_line())
    if match is None:
        return
    source, target, side, way = match.groups()
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
    ends = (int(source), int(target))
    _add_link(collector, message, handle, ends, _SIDES[side or "send"], way)


def _add_link(
    collector: Collector,
    message: LogMessage,
    handle: CommHandle,
    ends: tuple[int, int],
    side: int,
    way: str,
) -> None:
    net = _NET.match(way)
    gdrdma = bool(net and "/GDRDMA" in net[4])
    pxn = bool(net and net[3])
    link = Link(_kind(way, net), *ends, gdrdma, pxn)
    collector.links.setdefault((handle.order, link), LinkLines(message)).sides[side] += 1
    # Through another rank's GPU (PXN) it is that one's adapter.
    if net and not pxn:
        key = (handle.order, ends[side], int(net[2]))
        collector.nics.setdefault(key, LinkLines(message)).sides[side] += 1


def _kind(way: str, net: re.Match[str] | None) -> str:
    if net:
        return f"NET/{net[1]}"
    if "shared memory" in way or way.startswith("SHM"):
        return "SHM"
    return "/".join(way.split("/")[:2])


def collnet(collector: Collector, message: LogMessage) -> None:
    """Record CollNet 00/0 : 0 [send] via COLLNET/SHARP/0."""
    match, handle = _COLLNET.match(message.text), collector.communicators.latest(message)
    if match and handle:
        rank, side, way = match.groups()
        link = Link(f"COLLNET/{way.split('/')[0]}", int(rank), None, "/GDRDMA" in way, False)
        lines = collector.links.setdefault((handle.order, link), LinkLines(message))
        lines.sides[_SIDES[side]] += 1


def multicast_group(collector: Collector, message: LogMessage) -> None:
    """Record NVLS comm 0x... headRank 0 nHeads 8 ...: a rank joined NVLink SHARP."""
    handle = collector.communicators.latest(message)
    if handle and handle.rank is not None and message.text.startswith("NVLS comm "):
        link = Link("NVLS", handle.rank, None, False, False)
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
