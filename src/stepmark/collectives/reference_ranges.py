"""Ranges of healthy tables of results by hardware, from data/collectives.toml.

validation/normal_ranges.py derives that file, the figures of each healthy curve, from public
tables and our own runs; a range is that of all but the curve that is judged. Figures are
relative to what they scale with, so that a range holds for other numbers of ranks: bandwidth to
the link's rate on one host and to the NICs' rate on several, latency to NCCL's own estimate.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import msgspec

from stepmark.ground.package_data import data_text
from stepmark.ground.reading import Table
from stepmark.model.collectives import Collective
from stepmark.model.device import DeviceSpec, find_device
from stepmark.model.nccl_tuner import RING_US, TREE_US, ring_hops_us, tree_hops_us
from stepmark.model.network import CHANNEL_BYTES_PER_S, MAX_SEND_CHANNELS, send_channels
from stepmark.text_tables.printed_figures import itemsize_of

Span = tuple[float, float]
Nics = tuple[int, float]  # of a host, Gbit/s of each
_FAMILY = {
    Collective.ALL_REDUCE: "all_reduce",
    Collective.ALL_GATHER: "gather",
    Collective.REDUCE_SCATTER: "gather",
    Collective.ALL_TO_ALL: "all_to_all",
    Collective.SENDRECV: "sendrecv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What ranks ran on, as far as it is known. A domain of NVLink counts as one host."""

    device: DeviceSpec | None
    num_ranks: int  # 0 is unknown
    num_hosts: int  # 0 is unknown, or hosts have different numbers of ranks
    nic_gbit: float  # NICs' rate for each rank; 0 is unknown, or on one host

    @property
    def is_stated(self) -> bool:
        """Return whether it is known what limits a large message."""
        return self.num_hosts == 1 or self.nic_gbit > 0

    @property
    def hosts(self) -> str:
        return str(self.num_hosts) if self.num_hosts < 3 else "more"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthyCurve:
    """Figures of one curve of a healthy table, and the hardware that they hold for."""

    link: str = ""  # link_kind of data/hardware.toml; "" for any
    hosts: str  # "1", "2", "more"
    network: str = ""  # "RDMA" (InfiniBand, RoCE), "EFA", "TCPXO", "TCPX", "TCP"
    nic_gbit: float = 0  # for each rank
    family: str
    share: float | None = None  # peak busbw / rate()
    latency: float | None = None  # shortest time / tuner_latency_s()
    source: str
    fingerprint: str  # Curve.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Figures of several healthy curves. Each span is (lowest, highest); None without any."""

    link: str = ""
    network: str = ""
    nic_gbit: float = 0
    family: str
    share: Span | None = None
    latency: Span | None = None
    num_tables: int = 0
    sources: tuple[str, ...] = ()


@cache
def load_healthy() -> tuple[HealthyCurve, ...]:
    curves = tomllib.loads(data_text("collectives.toml"))["curve"]
    return msgspec.convert(curves, tuple[HealthyCurve, ...])


def hardware_of(table: Table, nics: Nics | None) -> Hardware:
    """Return the hardware that a table states. nics: those that its ranks use."""
    device = find_device(table.device)
    ranks = table.num_ranks or 0
    hosts = table.num_hosts or 0
    if device and 0 < ranks <= (device.link_domain or 0):
        hosts = 1
    if hosts and (not ranks or ranks % hosts):
        hosts = 0
    gbit = nics[0] * nics[1] * hosts / ranks if nics and hosts > 1 else 0.0
    return Hardware(device=device, num_ranks=ranks, num_hosts=hosts, nic_gbit=gbit)


def family_of(collective: str, dtype: str) -> str:
    """Return the collectives that one range holds for. Switches reduce no type of one byte."""
    family = _FAMILY.get(Collective(collective), collective)
    is_one_byte = family == "all_reduce" and itemsize_of(dtype) == 1
    return "all_reduce of one byte" if is_one_byte else family


def rate(hardware: Hardware, family: str, nic_gbit: float) -> float:
    """Return the bytes/s to which a peak busbw is compared, 0 where it is not known.

    One host: the GPU's links. Several: the NICs of a host; of send-receive those of a rank. Of
    all-to-all the share of traffic that leaves the host counts: W m/(m-1) (n-1)/n with W a
    rank's NICs (https://github.com/NVIDIA/nccl-tests/issues/130).
    """
    ranks = hardware.num_ranks
    hosts = hardware.num_hosts
    if hosts == 1 and hardware.device:
        return hardware.device.link_bytes_per_s or 0.0
    if hosts < 2:
        return 0.0
    leaving = hosts / (hosts - 1) * (ranks - 1) / ranks
    nics = {"sendrecv": 1.0, "all_to_all": leaving}.get(family, ranks / hosts)
    return nics * nic_gbit / 8 * 1e9


def possible_shares(hardware: Hardware, family: str) -> Span:
    """Return the most of rate() that a busbw can reach, without and with sums in switches.

    The bytes that leave a node take their time by its links; a node is a host, on one host a
    GPU. An all-reduce of S by n ranks on m nodes sends at least 2 (m-1)/m S from each, with
    SHARP or NVLS S, and its busbw is 2 (n-1)/n S/t; a gather sends (m-1)/m S, at (n-1)/n S/t
    (nccl-tests, doc/PERFORMANCE.md, has the factors for m = n). inf where it is not known.
    """
    ranks = hardware.num_ranks
    hosts = hardware.num_hosts
    domain = (hardware.device and hardware.device.link_domain) or 0
    # A domain of several hosts leaves it by the NICs of all of them.
    if ranks < 2 or not hosts or (hosts > 1 and domain > ranks / hosts):
        return inf, inf
    nodes = hosts if hosts > 1 else ranks
    share = nodes / (nodes - 1) * (ranks - 1) / ranks
    limits = {
        "all_reduce": (share, 2 * (ranks - 1) / ranks),
        "all_reduce of one byte": (share, share),
        "gather": (share, share),
        "all_to_all": (1.0, 1.0),
        # One rank of a host may send by all its NICs.
        "sendrecv": (ranks / nodes, ranks / nodes),
    }
    return limits.get(family, (inf, inf))


def send_channel_share(num_ranks: int, nic_gbit: float) -> float:
    """Return the share of a NIC that send-receive reaches with the channels that NCCL gives it.

    As if a communicator always had the most channels.
    """
    nic_bytes_per_s = nic_gbit / 8 * 1e9
    channels = send_channels(num_ranks, nic_bytes_per_s, MAX_SEND_CHANNELS)
    return min(channels * CHANNEL_BYTES_PER_S / nic_bytes_per_s, 1.0)


def has_latency(table: Table) -> bool:
    """Return whether small times are those of the collective.

    Not where one thread launches on several GPUs in turn, or the host waits for each call.
    """
    is_queued = table.tool in ("nccl-tests", "rccl-tests") and "blocking" not in table.method
    return is_queued and table.gpus_per_thread == 1


def tuner_latency_s(family: str, hardware: Hardware) -> float:
    """Return NCCL's estimate of the shortest time with protocol LL, in seconds.

    All-to-all and send-receive have none: a ring's base and one hop. Gathers are rings.
    """
    ranks = hardware.num_ranks
    hosts = hardware.num_hosts
    if family == "gather":
        return (RING_US + ring_hops_us(ranks, hosts)) * 1e-6
    if not family.startswith("all_reduce"):
        return 10e-6
    ring_us = RING_US + 2 * ring_hops_us(ranks, hosts)
    return min(ring_us, TREE_US + tree_hops_us(ranks, hosts)) * 1e-6


def reference_range(
    healthy: Sequence[HealthyCurve], hardware: Hardware, family: str, fingerprint: str
) -> Range:
    """Return the range of this hardware, of its fastest NICs where they are not stated.

    For want of one that of other GPUs with RDMA, without a `link`; else an empty one. The curve
    that is judged, known by its fingerprint, is no reference for itself.
    """
    link = (hardware.device and hardware.device.link_kind) or ""
    same = [each for each in healthy if (each.hosts, each.family) == (hardware.hosts, family)]
    same = [each for each in same if each.fingerprint != fingerprint]
    own = [each for each in same if link and each.link == link]
    gbit = hardware.nic_gbit or max((each.nic_gbit for each in own if each.share), default=0.0)
    if own := [each for each in own if each.nic_gbit == gbit]:
        return _range_of(own, Range(family=family, link=link, nic_gbit=gbit))
    is_comparable = hardware.is_stated and "bridge" not in link
    others = [each for each in same if each.share and each.network in ("", "RDMA")]
    others = [each for each in others if is_comparable and "bridge" not in each.link]
    return _range_of(others, Range(family=family))


def _range_of(healthy: Sequence[HealthyCurve], first: Range) -> Range:
    def span(name: str) -> Span | None:
        values = [value for each in healthy if (value := getattr(each, name)) is not None]
        return (min(values), max(values)) if values else None

    return replace(
        first,
        network=" or ".join(sorted({each.network for each in healthy})),
        share=span("share"),
        latency=span("latency"),
        num_tables=len(healthy),
        sources=tuple(dict.fromkeys(each.source for each in healthy)),
    )
