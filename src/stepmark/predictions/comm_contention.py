"""Contention of communication, from the traces of all ranks of a step."""

from collections.abc import Iterable, Mapping

from stepmark.cases.comm_curve import Curve
from stepmark.predictions import contention
from stepmark.timeline.trace_columns import RankInfo
from stepmark.traces.kineto.arrivals import RankParts, matched
from stepmark.traces.kineto.intervals import clip


def comm_slowdown(
    by_rank: Mapping[int, tuple[RankInfo, RankParts]], curves: Iterable[Curve]
) -> float | None:
    """Return what transfers take longer while computation runs; None: it is not known.

    Counted is the computation of the rank that arrived last. Messages of one collective are
    equal work in multiples of its curve, which are 1 alone; without a curve, those of one size.
    """
    by_name: dict[tuple[str, int | None], Curve] = {
        (each.collective, each.num_ranks): each for each in curves
    }
    samples, scaled = list[contention.Sample](), list[contention.Sample]()
    alone = set[contention.Sample]()
    for rank, own in matched(by_rank, lambda _number: True).ranks.items():
        exposed = by_rank[rank][1].exposed
        for kind, start, end in own.transfers:
            name, size = (kind.collective, kind.num_ranks), kind.message_bytes or 0
            times = end - start, end - start - clip(exposed, start, end).total
            if curve := by_name.get(name):
                alone_ns = 1e9 * curve.time_s(size)[0]
                samples.append(contention.Sample(name, *times))
                scaled.append(contention.Sample(name, *(time / alone_ns for time in times)))
                alone.add(contention.Sample(name, 1.0, 0.0))
            else:
                samples.append(contention.Sample((*name, size), *times))
                scaled.append(samples[-1])
    return contention.slowdown(samples, contention.fit([*scaled, *alone]))
