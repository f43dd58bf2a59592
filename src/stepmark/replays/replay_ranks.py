"""What the ranks of a replay do over time: computation, messages, waiting for the last rank.

spans: float64 [rank][pass][operation][2], start and duration in seconds, not a number where
nothing was timed.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from stepmark.cases.message import RECV, SEND
from stepmark.ground.units import format_time
from stepmark.model.collectives import FACTS, Collective
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.step.rank_program import Step, program
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload, pass_of
from stepmark.timeline.ledger import Work, work_of, work_of_op
from stepmark.timeline.timeline import Span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.float64]

Row = dict[str, Any]
Interval = tuple[float, float]
_PASSES = ("forward", "backward", "optimizer", "step")


def phase_rows(workload: Workload, spans: "Times", event_s: float = 0.0) -> list[Row]:
    """Return a row per rank and pass: medians of its times over the timed passes.

    computing_s: in which it computes, without event_s per operation; messages_s: in which
    messages run, as far as they were timed, else None; exposed_comm_s: the part in which
    nothing computes. The pass "" is all.
    """
    rows = []
    for rank in range(workload.world_size):
        steps = program(workload, rank)
        passes = [name for name in _PASSES if any(pass_of(step.op) == name for step in steps)]
        for name in ("", *passes):
            samples = [
                _phase(steps, own, name, event_s)
                for own in spans[rank, :, : len(steps)].tolist()
            ]
            computing, messages, exposed = zip(*samples, strict=True)
            rows.append(
                {
                    "rank": rank,
                    "pass": name,
                    "computing_s": median(computing),
                    "messages_s": _known(messages),
                    "exposed_comm_s": _known(exposed),
                }
            )
    return rows


def _known(times: Sequence[float]) -> float | None:
    return None if any(map(math.isnan, times)) else median(times)


def _phase(
    steps: Sequence[Step], own: Sequence[Interval], name: str, event_s: float
) -> tuple[float, float, float]:
    """Return the seconds of computation, of messages, and of exposed ones, of a pass."""
    compute: list[Interval] = []
    sides: tuple[list[Interval], list[Interval]] = ([], [])
    for step, (start, time_s) in zip(steps, own, strict=True):
        communicates, interval = len(step.members) > 1, (start, start + time_s)
        if not communicates and math.isnan(time_s):
            continue
        if not communicates:
            compute.append(interval)
        if name in ("", pass_of(step.op)):
            sides[communicates].append(interval)
    exposed_s = _covered([*compute, *sides[True]]) - _covered(compute)
    computing_s = max(0.0, _covered(sides[False]) - len(sides[False]) * event_s)
    return computing_s, _covered(sides[True]), exposed_s


def _covered(intervals: Sequence[Interval]) -> float:
    """Return the time in which any of them runs; not a number if one is none."""
    total, end = 0.0, -math.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    is_known = not any(math.isnan(last) for _, last in intervals)
    return total if is_known else math.nan


def arrival_rows(workload: Workload, times: "Times") -> list[Row]:
    """Return a row per rank: of how many collectives it was the last to come, and what it cost.

    Only collectives that no rank can end before all have come tell, and that all of their
    ranks timed: the one with the shortest time came last. waited_s: mean of the others' longer
    times, summed over a step.
    """
    calls = [0] * workload.world_size
    last = [0] * workload.world_size
    waited_s = [0.0] * workload.world_size
    num_passes = times.shape[1]
    for members, own in _synchronizing(workload, times):
        for sample in own:
            shortest = min(sample)
            if math.isnan(sum(sample)):
                continue
            rank = members[sample.index(shortest)]
            last[rank] += 1
            waited_s[rank] += (sum(sample) - len(sample) * shortest) / (len(sample) - 1)
            for member in members:
                calls[member] += 1
    return [
        {
            "rank": rank,
            "collectives": calls[rank],
            "last": last[rank],
            "waited_s": waited_s[rank] / num_passes,
        }
        for rank in range(workload.world_size)
    ]


def _synchronizing(
    workload: Workload, times: "Times"
) -> Iterator[tuple[tuple[int, ...], list[list[float]]]]:
    """Yield the ranks of each collective of each communicator, and their times by pass."""
    per_stage = workload.world_size // len(workload.stages)
    for stage in range(len(workload.stages)):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        programs = {rank: program(workload, rank) for rank in ranks}
        for number, step in enumerate(programs[ranks[0]]):
            op = step.op
            if not isinstance(op, CommOp) or op.collective in (SEND, RECV):
                continue
            is_waiting = FACTS[Collective(op.collective)].synchronizing
            for members in dict.fromkeys(programs[rank][number].members for rank in ranks):
                # Over several stages a message has another number in each.
                if is_waiting and len(members) > 1 and set(members) <= set(ranks):
                    yield members, times[list(members), :, number].T.tolist()


def spans_of(workload: Workload, spans: "Times") -> Iterator[Span]:
    """Yield the timed operations of the last pass."""
    for rank in range(workload.world_size):
        steps = program(workload, rank)
        for step, (start, time_s) in zip(steps, spans[rank, -1].tolist(), strict=False):
            op = step.op
            if not math.isnan(time_s):
                yield Span(
                    rank=rank,
                    stream=op.stream,
                    kind=COMMUNICATION if isinstance(op, CommOp) else _work(op),
                    name=op.collective if isinstance(op, CommOp) else op.module,
                    module=op.module,
                    phase=pass_of(op),
                    layer=op.layer,
                    microbatch=op.microbatch,
                    start_ns=round(start * 1e9),
                    end_ns=round((start + time_s) * 1e9),
                )


def _work(op: ComputeOp) -> Work:
    if isinstance(op.op, Kernel):
        return work_of(op.op.name, op.module, op.phase)
    return work_of_op(op)


def slow_rank(rows: Sequence[Row]) -> str:
    """Return a sentence on the rank that others wait for; "" where no collective tells."""
    ranks = [row for row in rows if row["collectives"]]
    if not ranks:
        return ""
    slow = max(ranks, key=lambda row: row["waited_s"])
    share = slow["last"] / slow["collectives"]
    fair = mean(row["last"] / row["collectives"] for row in ranks)
    wait = f"others waited {format_time(slow['waited_s'])} for it in a step"
    often = f"came last to {share:.0%} of its collectives (mean of ranks {fair:.0%})"
    return f"rank {slow['rank']} {often}; {wait}"
