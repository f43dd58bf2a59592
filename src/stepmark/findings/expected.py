"""Expected times of messages: from a measured curve of as many ranks, or by a network."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from stepmark.cases.comm_curve import ABOVE, BELOW, Curve
from stepmark.cases.message import RECV, SEND, Histogram, MessageKind
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, busbw_factor
from stepmark.model.network import Network

SCALED = "other number of ranks"
BY_NETWORK = "network"
# One side of a pair is compared with a pair's transfer, else with the ring of sends.
_PAIRS = ("p2p", "sendrecv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected seconds of one call, and their source."""

    seconds: float
    mark: str


def expected(
    histogram: Histogram, curves: Sequence[Curve], *, force: bool = False
) -> dict[MessageKind, Expected]:
    """Return the times of kinds that a curve covers.

    Raises ConfigError where none is covered, where the number of ranks is unknown, and,
    without `force`, where the curve has another number.
    """
    times = {}
    for kind in histogram:
        if not any(curve.collective in _names(kind) for curve in curves):
            continue
        if kind.message_bytes is None or (kind.num_ranks is None and not _is_side(kind)):
            allowed = (
                f"a number, --ranks N: what was read does not tell it for {kind.collective}"
            )
            raise ConfigError("ranks", "unknown", allowed)
        if not kind.message_bytes:
            continue
        times[kind] = _expected(kind, _chosen(kind, curves, force))
    if not times:
        names = sorted({curve.collective for curve in curves})
        collectives = sorted({kind.collective for kind in histogram})
        allowed = f"times of {', '.join(collectives)}; it has {', '.join(names) or 'none'}"
        raise ConfigError("curve", _sources(curves), allowed)
    return times


def by_network(
    histogram: Histogram,
    groups: Mapping[MessageKind, Collection[tuple[int, ...]]],
    network: Network,
) -> dict[MessageKind, Expected]:
    """Return the times of kinds whose size and ranks are known.

    groups: ranks between which a kind is sent; of several the slowest counts. Raises
    ConfigError where the network does not join them.
    """
    times = {}
    for kind in histogram:
        known = [ranks for ranks in groups.get(kind, ()) if len(ranks) > 1]
        name = Collective.SENDRECV if _is_side(kind) else kind.collective
        if kind.message_bytes and known and name in (*Collective,):
            seconds = max(
                network.time_s(name, kind.message_bytes, network.placement(ranks))
                for ranks in known
            )
            times[kind] = Expected(seconds=seconds, mark=BY_NETWORK)
    return times


def _is_side(kind: MessageKind) -> bool:
    return kind.collective in (SEND, RECV)


def _names(kind: MessageKind) -> tuple[str, ...]:
    return _PAIRS if _is_side(kind) else (kind.collective,)


def _chosen(kind: MessageKind, curves: Sequence[Curve], force: bool) -> Curve:
    """Return the curve of the same number of ranks; with force the nearest in ratio."""
    names = _names(kind)
    candidates = [curve for curve in curves if curve.collective in names]
    if _is_side(kind):
        return min(candidates, key=lambda curve: names.index(curve.collective))
    assert kind.num_ranks is not None
    num_ranks = kind.num_ranks
    nearest = min(candidates, key=lambda curve: abs(log(curve.num_ranks / num_ranks)))
    if nearest.num_ranks != num_ranks and not force:
        rank_counts = ", ".join(str(curve.num_ranks) for curve in candidates)
        allowed = f"{kind.collective} of {num_ranks} ranks, not of {rank_counts}; or --force"
        raise ConfigError("curve", _sources(candidates), allowed)
    return nearest


def _expected(kind: MessageKind, curve: Curve) -> Expected:
    """Assume the curve's bus bandwidth at another number of ranks, which is a guess."""
    assert kind.message_bytes
    seconds, mark = curve.time_s(kind.message_bytes)
    if _is_side(kind) or curve.num_ranks == kind.num_ranks:
        return Expected(seconds=seconds, mark=mark)
    assert kind.num_ranks
    name = Collective(kind.collective)
    curve_factor = busbw_factor(name, curve.num_ranks)
    ratio = busbw_factor(name, kind.num_ranks) / curve_factor if curve_factor else 1.0
    return Expected(seconds=seconds * ratio, mark=f"{mark}, {SCALED}")


def _sources(curves: Sequence[Curve]) -> str:
    return ", ".join(dict.fromkeys(curve.source for curve in curves)) or "empty"


def totals(
    histogram: Histogram, times: Mapping[MessageKind, Expected], num_ranks_seen: int
) -> dict[str, float | int]:
    """Return seconds per rank, calls covered and not, and calls beyond the curve.

    Links carry both directions at once, so only the longer of sends and receives counts.
    """
    by_name: dict[str, float] = defaultdict(float)
    for kind, time in times.items():
        by_name[kind.collective] += histogram[kind].calls * time.seconds
    pairs = max(by_name.pop(name, 0.0) for name in (SEND, RECV))
    seconds = sum(by_name.values()) + pairs
    calls = sum(tally.calls for tally in histogram.values())

    def calls_of(mark: str) -> int:
        return sum(histogram[kind].calls for kind, time in times.items() if mark in time.mark)

    covered = calls_of("")
    return {
        "seconds_per_rank": seconds / max(num_ranks_seen, 1),
        "covered_calls": covered,
        "uncovered_calls": calls - covered,
        "extrapolated_calls": calls_of(ABOVE),
        "below_calls": calls_of(BELOW),
    }


def beyond_curve(totals: Mapping[str, float | int]) -> Iterator[str]:
    """Yield which calls the curve does not cover, by `totals`."""
    for key, reason in (
        ("uncovered_calls", "calls are of collectives that it has no times of"),
        ("below_calls", "calls are smaller than its smallest size, whose time is used"),
        ("extrapolated_calls", "calls are larger than its largest size, whose rate is used"),
    ):
        if totals[key]:
            yield f"# {totals[key]} {reason}"
