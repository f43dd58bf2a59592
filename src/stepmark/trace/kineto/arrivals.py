"""Which rank the others wait for, from calls of torch.distributed matched over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stepmark.core.trace_breakdown import Arrivals, RankTimes
from stepmark.core.trace_columns import RankInfo, RankTrace
from stepmark.trace.kineto.breakdown import breakdown
from stepmark.trace.kineto.instances import comm_calls
from stepmark.trace.kineto.intervals import Intervals, clip, common, union, without
from stepmark.trace.kineto.links import steps
from stepmark.trace.kineto.matching import Messages, match
from stepmark.trace.kineto.messages import RankMessages
from stepmark.trace.kineto.windows import communication_and_compute


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What is kept of one trace. exposed: when communication runs and no compute."""

    times: RankTimes
    messages: RankMessages
    exposed: Intervals


def rank_parts(trace: RankTrace, selects: Callable[[int], bool]) -> RankParts:
    """Reduce a trace to its breakdown, and what tells how it waits for other ranks."""
    own = steps(trace)
    return RankParts(
        times=breakdown(trace, selects),
        messages=RankMessages(
            calls=comm_calls(trace, own),
            numbers=own.numbers,
            is_marked=own.is_marked,
            times=None,
            copies=(),
        ),
        exposed=without(*communication_and_compute(trace)),
    )


def matched(
    parts: Mapping[int, tuple[RankInfo, RankParts]], selects: Callable[[int], bool]
) -> Messages:
    """Return the calls of the selected steps, matched over ranks."""
    return match({r: (info, part.messages) for r, (info, part) in parts.items()}, selects)


def with_arrivals(
    parts: Mapping[int, tuple[RankInfo, RankParts]], messages: Messages
) -> dict[int, RankTimes]:
    """Return the breakdown by rank, with how ranks wait for each other where that is known.

    A rank waits in a call from the start of its kernel for what the kernel takes longer than
    the shortest one of the call. Ranks whose trace has several GPUs are not told.
    """
    result = {}
    for rank, (_, part) in parts.items():
        times, waits = part.times, messages.ranks[rank]
        if waits.timed and len({step.device for step in times.steps}) == 1:
            table = np.array(waits.waiting, np.int64)
            waiting = union(table[:, 0], table[:, 1])
            exposed = common(waiting, part.exposed)
            times = replace(
                times,
                steps=tuple(
                    replace(
                        step,
                        waiting_ns=clip(waiting, step.start_ns, step.end_ns).total,
                        exposed_waiting_ns=clip(exposed, step.start_ns, step.end_ns).total,
                    )
                    for step in times.steps
                ),
                arrivals=Arrivals(
                    num_calls=waits.timed,
                    comm_ns=waits.kernels,
                    waiting_ns=waits.kernels - waits.transfer,
                    unmatched_ns=waits.other_kernels,
                    num_last=waits.last,
                    caused_ns=waits.caused,
                    early_ns=waits.early if messages.clocks_agree else None,
                ),
            )
        result[rank] = times
    return result
