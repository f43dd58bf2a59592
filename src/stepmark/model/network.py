"""Networks: the tiers of a cluster's links, and how long collectives take on them.

docs/network.md derives the formulas, with their sources and errors.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, busbw_factor
from stepmark.model.nccl_tuner import latency_us

_EIGHT = 8  # ranks, from which NCCL reduces in NVLink's switches
CHANNEL_BYTES_PER_S = 13e9  # of a send: measured, 400G
MAX_SEND_CHANNELS = 16  # of a communicator
_PAIRS = (Collective.SENDRECV, Collective.P2P, Collective.P2P_BOTH, Collective.PING_PONG)
_APART = (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V, Collective.GATHER, Collective.SCATTER)


class Reduction(StrEnum):
    """Switches that sum what an all-reduce sends, so that it crosses their links once."""

    NONE = "none"
    NVLS = "nvls"  # NVLink's
    SHARP = "sharp"  # NVLink's and the network's


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Constants of the time of a collective: latency a + transfer b + ramp a^(2/3) b^(1/3).

    a: latency of NCCL's tuner for the smallest message; b: seconds of the bytes at the rate of
    the links. shares: of the rate inside an NVLink domain, by kind of collective and ranks.
    """

    latency: float = 1.0
    transfer: float = 1.0
    ramp: float = 0.0
    shares: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def time_s(self, latency_s: float, transfer_s: float) -> float:
        """Return the seconds of a collective."""
        ramp_s = math.cbrt(latency_s * latency_s * transfer_s)
        return self.latency * latency_s + self.transfer * transfer_s + self.ramp * ramp_s

    def share(self, kind: str, num_ranks: int) -> float:
        """Return the share of the rate for the nearest known number of ranks."""
        known = self.shares.get(kind) or {1: 1.0}
        return known[min(known, key=lambda ranks: abs(math.log(ranks / num_ranks)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Links that join the units of the tier below, GPUs at first, to larger units.

    num_gpus: of such a unit; None: of the whole cluster. bytes_per_s: per GPU and direction.
    hop_s: latency of a hop in addition to that of NCCL's tuner.
    """

    name: str
    num_gpus: int | None
    bytes_per_s: float
    law: Law
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks of a group: their number, and how many units of each tier they are on.

    per_unit: of each tier the fewest and the most ranks on a unit; (): equally many on each.
    """

    num_ranks: int
    num_units: tuple[int, ...]
    per_unit: tuple[tuple[int, int], ...] = ()

    def fewest(self, tier: int) -> float:
        """Return the ranks of the group on the unit of a tier that has the fewest."""
        return (
            self.per_unit[tier][0] if self.per_unit else self.num_ranks / self.num_units[tier]
        )

    def most(self, tier: int) -> float:
        """Return the ranks of the group on the unit of a tier that has the most."""
        return (
            self.per_unit[tier][1] if self.per_unit else self.num_ranks / self.num_units[tier]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Tiers from the GPU outwards; ranks lie on them in their order.

    num_inner: tiers of links inside a host or NVLink domain, two where bridges join some GPUs
    of a host and PCIe the others. about: why it is this one, in words.
    """

    name: str
    tiers: tuple[Tier, ...]
    gpus_per_host: int
    reduction: Reduction = Reduction.NONE
    num_inner: int = 1
    about: str = ""

    def placement(self, ranks: Sequence[int]) -> Placement:
        """Return where ranks of a group are. Raises ConfigError where no tier joins them."""
        counts = [
            Counter(rank // tier.num_gpus if tier.num_gpus else 0 for rank in ranks)
            for tier in self.tiers
        ]
        units = tuple(map(len, counts))
        if units[-1] > 1:
            size = self.tiers[-1].num_gpus
            allowed = f"one that joins rank {max(ranks)}: its last tier has {size} GPUs"
            raise ConfigError("network", self.name, allowed)
        per_unit = tuple((min(own.values()), max(own.values())) for own in counts)
        is_even = all(fewest == most for fewest, most in per_unit)
        return Placement(
            num_ranks=len(ranks), num_units=units, per_unit=() if is_even else per_unit
        )

    def num_hosts(self, placement: Placement) -> int:
        """Return on how many hosts, or NVLink domains, the ranks of the group are."""
        return placement.num_units[self.num_inner - 1]

    def outermost(self, placement: Placement) -> int:
        """Return the index of the tier that joins all ranks of the group."""
        return placement.num_units.index(1)

    def time_s(self, collective: str, message_bytes: float, placement: Placement) -> float:
        """Return the seconds of a collective once all ranks have begun it."""
        latency_s = self.latency_s(collective, placement)
        transfer_s = self.transfer_s(collective, message_bytes, placement)
        law = self.tiers[self.outermost(placement)].law
        return law.time_s(latency_s, transfer_s)

    def fixed_s(self, collective: str, placement: Placement) -> float:
        """Return the part of the time that does not depend on the bandwidth."""
        law = self.tiers[self.outermost(placement)].law
        return law.latency * self.latency_s(collective, placement)

    def latency_s(self, collective: str, placement: Placement) -> float:
        """Return the latency of the smallest message by NCCL's tuner, and of farther hops."""
        if placement.num_ranks == 1:
            return 0.0
        units = placement.num_units
        crossed = range(1, self.outermost(placement) + 1)
        ring_s = sum((units[i - 1] - units[i]) * self.tiers[i].hop_s for i in crossed)
        tree_s = sum(math.log2(units[i - 1] / units[i]) * self.tiers[i].hop_s for i in crossed)
        hosts = self.num_hosts(placement)
        return 1e-6 * latency_us(
            collective, placement.num_ranks, hosts, 1e6 * ring_s, 1e6 * tree_s
        )

    def transfer_s(self, collective: str, message_bytes: float, placement: Placement) -> float:
        """Return the seconds of the bytes on the slowest of the links that they cross."""
        below = (placement.num_ranks, *placement.num_units)
        return max(
            (
                self._crossing_bytes(collective, message_bytes, placement, index)
                / self._bytes_per_s(index, collective, placement)
                for index in range(self.outermost(placement) + 1)
                if below[index] > below[index + 1]
            ),
            default=0.0,  # of one rank
        )

    def _bytes_per_s(self, index: int, collective: str, placement: Placement) -> float:
        """Return the rate at which a rank sends by the links of a tier."""
        tier = self.tiers[index]
        if index < self.num_inner:
            num_inside = int(placement.fewest(index))
            kind = _kind(collective)
            has_switches = self.reduction is not Reduction.NONE and num_inside >= _EIGHT
            if kind == "all_reduce" and has_switches and "nvls" in tier.law.shares:
                kind = "nvls"
            return tier.bytes_per_s * tier.law.share(kind, num_inside)
        num_hosts = self.num_hosts(placement)
        num_inside = placement.num_ranks // num_hosts
        if collective in _PAIRS:
            sending = sending_bytes_per_s(placement.num_ranks, num_inside, tier.bytes_per_s)
            return min(tier.bytes_per_s, sending)
        if collective != Collective.ALL_REDUCE:
            return tier.bytes_per_s
        # Summed in the switches of the network; or of two domains, which swap their sums.
        is_tree = self.reduction is Reduction.NVLS and num_hosts == 2 <= num_inside
        is_summed = self.reduction is Reduction.SHARP or is_tree
        return tier.bytes_per_s * (2 if is_summed else 1)

    def _crossing_bytes(
        self, collective: str, message_bytes: float, placement: Placement, index: int
    ) -> float:
        """Return the bytes that the busiest rank sends by the links of a tier.

        A ring passes the message on from unit to unit, by the links of all ranks of a unit at
        the same time, so the unit with the fewest ranks bounds it; an all-to-all sends each
        rank its part by the links that reach it.
        """
        if collective in _PAIRS:
            return message_bytes
        num_ranks = placement.num_ranks
        inside = placement.fewest(index - 1) if index else 1.0
        if collective in _APART:
            reached = placement.most(index) if index < self.num_inner else num_ranks
            return message_bytes * (reached - inside) / num_ranks
        return message_bytes * busbw_factor(Collective(collective), num_ranks) / inside


def _kind(collective: str) -> str:
    if collective == Collective.ALL_REDUCE:
        return "all_reduce"
    return "pairs" if collective in (*_PAIRS, *_APART) else "gather"


def sending_bytes_per_s(num_ranks: int, per_host: int, nic_bytes_per_s: float) -> float:
    """Return the rate of send-receive to a peer on another host, of a group's ranks.

    The total of four channels per rank of a host is inferred from published runs of 2 to 80
    ranks, which validation/network_laws.py also scores.
    """
    total = min(MAX_SEND_CHANNELS, 4 * per_host)
    return CHANNEL_BYTES_PER_S * send_channels(num_ranks, nic_bytes_per_s, total)


def send_channels(num_ranks: int, nic_bytes_per_s: float, total: int) -> int:
    """Return the channels that NCCL gives a peer on another host.

    One for each 14 GB/s of a NIC, halved while the total of a communicator does not suffice for
    all peers in rounds of eight. Source: NVIDIA/nccl 2.30.7, src/graph/paths.cc.
    """
    channels = 1 << (math.ceil(nic_bytes_per_s / 14e9) - 1).bit_length()
    while channels > 1 and channels * math.ceil(num_ranks / 8) > total:
        channels //= 2
    return channels
