"""Which rank the others wait for, from calls of torch.distributed matched over ranks."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stepmark.timeline.trace_breakdown import Arrivals, RankTimes
from stepmark.timeline.trace_columns import RankInfo, RankTrace
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.intervals import Intervals, common, union
from stepmark.traces.kineto.matching import Messages, match
from stepmark.traces.kineto.messages import RankMessages, rank_messages
from stepmark.traces.kineto.windows import Windows, in_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What is kept of one trace. exposed: when communication runs and no compute."""

    times: RankTimes
    messages: RankMessages
    exposed: Intervals


def rank_parts(trace: RankTrace, selects: Callable[[int], bool]) -> RankParts:
    """Reduce a trace to its breakdown, and what tells how it waits for other ranks."""
    messages = rank_messages(trace)
    return RankParts(
        times=breakdown(trace, selects),
        messages=messages,
        exposed=messages.times.exposed
        if messages.times
        else union(*np.empty((2, 0), np.int64)),
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
    the shortest one of the call; calls that wait at once are one wait. Ranks whose trace has
    several GPUs are not known.
    """
    known = {
        rank: (
            np.array(messages.ranks[rank].waiting, np.int64).T,
            Windows(*np.array([(s.start_ns, s.end_ns) for s in part.times.steps], np.int64).T),
        )
        for rank, (_, part) in parts.items()
        if messages.ranks[rank].timed and len({step.device for step in part.times.steps}) == 1
    }
    caused = Counter[int]()
    for (start, end, last), windows in known.values():
        for other in np.unique(last).tolist():
            waits = union(start[last == other], end[last == other])
            caused[other] += int(in_windows(waits, windows).sum())
    result = {rank: part.times for rank, (_, part) in parts.items()}
    for rank, ((start, end, _), windows) in known.items():
        times = result[rank]
        sums = messages.ranks[rank]
        waits = union(start, end)
        waits_ns = in_windows(waits, windows).tolist()
        exposed_ns = in_windows(common(waits, parts[rank][1].exposed), windows).tolist()
        result[rank] = replace(
            times,
            steps=tuple(
                replace(step, waiting_ns=waits_ns[n], exposed_waiting_ns=exposed_ns[n])
                for n, step in enumerate(times.steps)
            ),
            arrivals=Arrivals(
                num_calls=sums.timed,
                waiting_ns=sum(waits_ns),
                unmatched_ns=sums.other_kernels,
                num_last=sums.last,
                caused_ns=caused[rank],
                early_ns=sums.early if messages.clocks_agree else None,
            ),
        )
    return result
