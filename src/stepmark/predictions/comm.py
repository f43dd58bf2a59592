"""Time of a collective: from a measured curve, or by the links of a network."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import log

from stepmark.cases.comm_curve import ABOVE, MEASURED, Curve
from stepmark.cases.message import RECV, SEND
from stepmark.collectives.network_fit import fitted_network, placement_of
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.nccl_tuner import latency_us
from stepmark.model.network import Network, Placement
from stepmark.model.systems import IN_HOST
from stepmark.step.workload import COMPUTE, CommOp, Group
from stepmark.timeline.step_cost import Source

_PAIRS = ("p2p", "sendrecv")
_MOST_STARTS = 4096  # ranks whose groups are compared where not all are alike


class CommCosts:
    """Seconds of collectives once all ranks have begun; `sources` say where each is from.

    A curve of as many ranks on as many hosts has its own times. Others are those of the
    network, whose constants are fitted to the curves; without one the nearest curve is scaled.
    """

    def __init__(
        self, curves: Iterable[Curve], network: Network | None, world_size: int = 0
    ) -> None:
        """world_size: ranks of the job, the last of which may not fill their host."""
        self._curves = tuple(curves)
        self._network = network
        self._fitted = frozenset[int]()  # tiers
        if network is not None:
            self._network, self._fitted = fitted_network(network, self._curves)
        self._world_size = world_size
        self.sources: dict[str, Source] = {}
        self._placement = cache(self._place)

    def __call__(self, op: CommOp, group: Group) -> float:
        """Return the seconds. Raises ConfigError where neither a curve nor a link is known."""
        num_bytes = op.message_bytes(group)
        if not num_bytes or group.size < 2:
            return 0.0
        name = Collective.SENDRECV if op.collective in (SEND, RECV) else op.collective
        names = _PAIRS if op.collective in (SEND, RECV) else (op.collective,)
        known = [curve for curve in self._curves if curve.collective in names]
        for curve in known:
            if self._is_of(curve, group, is_pair=names is _PAIRS):
                time_s, mark = curve.time_s(num_bytes)
                is_measured = mark in (MEASURED, ABOVE)
                self.sources[op.collective] = Source.MEASURED if is_measured else Source.SCALED
                return time_s
        if self._network is not None:
            placement = self._placement(group)
            is_fitted = self._network.outermost(placement) in self._fitted
            self.sources[op.collective] = Source.SCALED if is_fitted else Source.SHEET
            return self._network.time_s(name, num_bytes, placement)
        if known:
            self.sources[op.collective] = Source.SCALED
            return _scaled(known, op, group, num_bytes)
        allowed = f"one with {op.collective}, as `stepmark calibrate` measures it"
        raise ConfigError("calibration", None, allowed)

    def latency_s(self, op: CommOp, group: Group) -> float:
        """Return the part of the time that does not depend on the bandwidth."""
        name = Collective.SENDRECV if op.collective in (SEND, RECV) else op.collective
        if self._network is None:
            return latency_us(name, group.size, 1) * 1e-6
        return self._network.fixed_s(name, self._placement(group))

    def joins_hosts(self, group: Group) -> bool:
        """Return whether the ranks of a group are on several hosts or NVLink domains."""
        if self._network is None:
            return group.reach >= IN_HOST
        return self._network.num_hosts(self._placement(group)) > 1

    def _is_of(self, curve: Curve, group: Group, *, is_pair: bool) -> bool:
        """Return whether the curve was measured by ranks placed as those of the group."""
        if self._network is None:
            return is_pair or curve.num_ranks == group.size
        measured = placement_of(curve, self._network)
        if measured is None:
            return False
        own = self._placement(group)
        if is_pair:
            return self._network.outermost(measured) == self._network.outermost(own)
        return measured == own

    def _place(self, group: Group) -> Placement:
        """Return where the ranks of a group are; of several such groups the most apart."""
        assert self._network is not None
        tiers = self._network.tiers
        sizes = [tier.num_gpus for tier in tiers if tier.num_gpus]
        units = [_num_units(group, size) for size in sizes]
        if None not in units and (len(sizes) < len(tiers) or units[-1] == 1):
            counts = tuple(count or 1 for count in units) + (1,) * (len(tiers) - len(sizes))
            return Placement(num_ranks=group.size, num_units=counts)
        last = max(self._world_size - 1, group.reach)
        starts = {group.first(rank) for rank in range(min(_MOST_STARTS, last + 1))}
        placements = (
            self._network.placement([r for r in group.members(start) if r <= last])
            for start in starts
        )
        return max(placements, key=lambda own: (own.num_units, -own.fewest(0)))


def with_copies(
    comm: Callable[[CommOp, Group], float], copies: Mapping[str, float]
) -> Callable[[CommOp, Group], float]:
    """Return the seconds of collectives with those of copies on streams of their own.

    copies: seconds per byte of a message, by collective.
    """

    def seconds(op: CommOp, group: Group) -> float:
        time_s = comm(op, group)
        if op.stream == COMPUTE or op.collective not in copies:
            return time_s
        return time_s + copies[op.collective] * op.message_bytes(group)

    return seconds


def _num_units(group: Group, size: int) -> int | None:
    """Return on how many units of this many ranks a group is; None where groups differ."""
    count = 1
    for digit, stride in group.digits:
        span = digit * stride
        if stride % size == 0:
            count *= digit
        elif size % stride == 0 and span % size == 0:
            count *= span // size
        elif size % span:
            return None
    return count


def _scaled(curves: list[Curve], op: CommOp, group: Group, num_bytes: int) -> float:
    """Return the time at the bus bandwidth of the curve of the nearest number of ranks."""
    nearest = min(curves, key=lambda curve: abs(log(curve.num_ranks / group.size)))
    other = Group(digits=((nearest.num_ranks, 1),))
    time_s, _ = nearest.time_s(num_bytes)
    own = op.bus_bytes(group) / op.message_bytes(group)
    measured = 1.0
    if op.message_bytes(other):
        measured = op.bus_bytes(other) / op.message_bytes(other)
    return time_s * own / measured
