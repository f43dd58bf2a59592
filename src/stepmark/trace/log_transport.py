"""Lines on how data goes from rank to rank: channels, rings, trees, adapters."""

import re

from stepmark.core.log_facts import MAX_RANKS
from stepmark.trace.log_calls import Handle
from stepmark.trace.log_facts import Collector
from stepmark.trace.log_said import Link, Said

_VIA = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,9})(?:\[[^\]]*\])? -> (\d{1,9})(?:\[[^\]]*\])?"
    r"(?: \[(send|receive)\])? via (.+)$"
)
_COLLNET = re.compile(r"^CollNet \d+(?:/\d+)? : (\d{1,9}) \[(send|receive)\] via COLLNET/(.+)$")
_ORDER = re.compile(r"^Channel (\d{1,4})/(\d{1,4}) : +([\d ]+)$")
_TAIL = re.compile(r" comm (0x[0-9a-f]+) nRanks (\d{1,9})(?!\d)")
_NET = re.compile(r"^NET/(.+?)/(\d{1,9})(?:\((\d+)\))?((?:/.*)?)$")


def channel(held: Collector, said: Said) -> None:
    """Channel 00/24 : 0 1 2 3 (a ring), or Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM."""
    if order := _ORDER.match(said.text):
        handle = held.handles.latest(said)
        if handle:
            handle.rings[tuple(int(rank[:9]) for rank in order[3].split())] += 1
        return
    found = _VIA.search(said.text)
    if found is None and said.text.rstrip().endswith("->"):
        found = _VIA.search(said.unwrapped())
    if found is None:
        return
    source, target, side, way = found.groups()
    tail = _TAIL.search(way)
    if tail and int(tail[2]) > MAX_RANKS:
        return
    handle = held.handles.of(said, tail[1]) if tail else held.handles.latest(said)
    if handle is None:
        handle = held.handles.of(said, "")
    if tail:
        handle.num_ranks = handle.num_ranks or int(tail[2])
        way = way[: tail.start()]
    way = way.split(" comm ", 1)[0].strip()
    _linked(held, said, handle, (int(source), int(target)), side or "send", way)


def _linked(
    held: Collector, said: Said, handle: Handle, ends: tuple[int, int], side: str, way: str
) -> None:
    which = 0 if side == "send" else 1
    net = _NET.match(way)
    gdrdma = bool(net and "/GDRDMA" in net[4])
    pxn = bool(net and net[3])
    key = (handle.order, Link(_kind(way, net), *ends, gdrdma, pxn))
    held.links.setdefault(key, ([0, 0], said))[0][which] += 1
    # Through another rank's GPU (PXN) it is that one's adapter.
    if net and not pxn:
        rank = ends[which]
        held.nics.setdefault((handle.order, rank, int(net[2])), ([0, 0], said))[0][which] += 1


def _kind(way: str, net: re.Match[str] | None) -> str:
    if net:
        return f"NET/{net[1]}"
    if "shared memory" in way or way.startswith("SHM"):
        return "SHM"
    return "/".join(way.split("/")[:2])


def collnet(held: Collector, said: Said) -> None:
    """CollNet 00/0 : 0 [send] via COLLNET/SHARP/0."""
    found, handle = _COLLNET.match(said.text), held.handles.latest(said)
    if found and handle:
        rank, side, way = found.groups()
        link = Link(f"COLLNET/{way.split('/')[0]}", int(rank), None, "/GDRDMA" in way, False)
        key = (handle.order, link)
        held.links.setdefault(key, ([0, 0], said))[0][0 if side == "send" else 1] += 1


def multicast_group(held: Collector, said: Said) -> None:
    """NVLS comm 0x... headRank 0 nHeads 8 ...: a rank joined NVLink SHARP."""
    handle = held.handles.latest(said)
    if handle and handle.rank is not None and said.text.startswith("NVLS comm "):
        key = (handle.order, Link("NVLS", handle.rank, None, False, False))
        held.links.setdefault(key, ([0, 0], said))[0][0] += 1


def ring(held: Collector, said: Said) -> None:
    """Ring 00 : 7 -> 0 -> 1 says nothing more than the channels; old ones say `via`."""
    if " via " in said.text or said.text.rstrip().endswith("->"):
        channel(held, said)


def trees(held: Collector, said: Said) -> None:
    """Trees [0] 1/-1/-1->0->-1 [1] ..."""
    handle = held.handles.latest(said)
    if handle and handle.num_trees is None:
        handle.num_trees = said.text.count("[")
