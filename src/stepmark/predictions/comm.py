"""Time of a collective: from a measured curve, or from the device's links."""

from collections.abc import Iterable, Sequence
from functools import cache
from math import log

from stepmark.cases.comm_curve import ABOVE, MEASURED, Curve
from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.device import DeviceSpec
from stepmark.model.nccl_tuner import fewest_hops_us
from stepmark.step.workload import CommOp, Group
from stepmark.timeline.step_cost import Source

# Inside a host: share of the links that large collectives reach (480 of 900 GB/s busbw of an
# all-reduce, 8 x H100, nccl-tests' published outputs), and the latency of one hop of a ring.
_LINK_SHARE = 0.8
_HOP_S = 2.5e-6
# Over hosts, whose network is not known: the least bytes that a GPU sends, by the data sheet's
# rate. Switches of NVLink (NVLS) sum what a ring of all-reduce passes on a second time.
_SUMMED_IN_SWITCH = 0.5
_PAIRS = ("p2p", "sendrecv")


class CommCosts:
    """Seconds of collectives once all ranks have begun; notes say where each is from."""

    def __init__(
        self,
        curves: Iterable[Curve],
        device: DeviceSpec | None,
        link_domain: int | None = None,
    ) -> None:
        """link_domain: most GPUs that links connect; a group that reaches further than a host
        takes curves over hosts, if there are. None: all groups are inside a host.
        """
        own = tuple(curves)
        self._ranks_per_host = link_domain and ranks_per_host(own, link_domain)
        self._curves: dict[str, list[Curve]] = {}
        for curve in own:
            self._curves.setdefault(curve.collective, []).append(curve)
        self._device = device
        self.sources: dict[str, Source] = {}
        self.of_one_host: set[str] = set()  # collectives over hosts, by curves inside of one

    def __call__(self, op: CommOp, group: Group) -> float:
        """Return the seconds. Raises ConfigError where neither a curve nor a link is known."""
        num_bytes = op.message_bytes(group)
        if not num_bytes or group.size < 2:
            return 0.0
        names = _PAIRS if op.collective in (SEND, RECV) else (op.collective,)
        known = [curve for name in names for curve in self._curves.get(name, ())]
        # Those over hosts for a group over hosts, else those inside one.
        spans = self._num_hosts(group) > 1
        curves = [
            c
            for c in known
            if self._ranks_per_host is None or not c.num_hosts or (c.num_hosts > 1) == spans
        ]
        if spans and known and not curves:
            self.of_one_host.add(op.collective)
        same = [c for c in curves if c.num_ranks == group.size or op.collective in (SEND, RECV)]
        if same:
            time_s, mark = same[0].time_s(num_bytes)
            is_measured = mark in (MEASURED, ABOVE)
            self.sources[op.collective] = Source.MEASURED if is_measured else Source.SCALED
            return time_s
        if known:
            self.sources[op.collective] = Source.SCALED
            return _scaled(curves or known, op, group, num_bytes)
        link = self._device.link_bytes_per_s if self._device else None
        if link is None:
            if self._device is None:
                allowed = f"one with {op.collective}, as `stepmark calibrate` measures it"
                raise ConfigError("calibration", "missing", allowed)
            raise ConfigError("device", self._device.key, "a device whose links are known")
        self.sources[op.collective] = Source.ROOFLINE
        sent_bytes = op.bus_bytes(group)
        if not spans:
            link *= _LINK_SHARE
        elif op.collective == Collective.ALL_REDUCE:
            sent_bytes *= _SUMMED_IN_SWITCH
        return self.latency_s(op, group) + sent_bytes / link

    def latency_s(self, op: CommOp, group: Group) -> float:
        """Return the part of the time that does not depend on the bandwidth.

        Inside a host the hops of a ring, over hosts the fewest of NCCL's algorithms.
        """
        num_hosts = self._num_hosts(group)
        if num_hosts > 1:
            return fewest_hops_us(op.collective, group.size, num_hosts) * 1e-6
        if op.collective in (SEND, RECV):
            return _HOP_S
        passes = 2 if op.collective == Collective.ALL_REDUCE else 1
        return passes * (group.size - 1) * _HOP_S

    def _num_hosts(self, group: Group) -> int:
        return num_hosts(group, self._ranks_per_host) if self._ranks_per_host else 1


def ranks_per_host(curves: Sequence[Curve], link_domain: int) -> int:
    """Return the ranks of a host where curves were measured over hosts, else the domain."""
    pairs = (Collective.P2P, Collective.P2P_BOTH)
    known = [curve for curve in curves if curve.num_hosts and curve.collective not in pairs]
    if all(curve.num_hosts == 1 for curve in known):
        return link_domain
    return max(curve.num_ranks // (curve.num_hosts or 1) for curve in known)


@cache
def num_hosts(group: Group, ranks_per_host: int) -> int:
    """Return the number of hosts of the first rank's group."""
    return len({rank // ranks_per_host for rank in group.members(0)})


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
