"""What a replay measured, as rows: iterations, messages, and what its ranks do over time.

spans: float64 [rank][pass][operation][2], start and duration in seconds, not a number where
nothing was timed. times: the durations, thus [rank][pass][operation]. The time of a message is
the longest of its ranks, time_min the shortest: that of the rank that came last, thus the
wire's share, from which bus bandwidth is where all ranks must come.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from stepmark.cases.comm_curve import MEASURED, Curve
from stepmark.cases.message import RECV, SEND
from stepmark.ground.units import format_time
from stepmark.model.collectives import is_synchronizing
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.step.rank_program import Step, program
from stepmark.step.workload import CommOp, Group, Workload, pass_of
from stepmark.timeline.ledger import work_in_trace
from stepmark.timeline.timeline import Span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.float64]

Row = dict[str, Any]
Interval = tuple[float, float]
_PASSES = ("forward", "backward", "optimizer", "step")
_OUTLIER = 1.1  # an iteration that takes so many times the median


def iterations(seconds: Sequence[Sequence[float]], blocked_s: Sequence[Sequence[float]]) -> Row:
    """Return the iterations by their slowest rank, and each rank's time in messages.

    jitter_pct: standard deviation of the iterations, of their mean.
    """
    slowest = [max(each) for each in zip(*seconds, strict=True)]
    typical = median(slowest)
    average = mean(slowest)
    return {
        "seconds": slowest,
        "median_s": typical,
        "mean_s": average,
        "min_s": min(slowest),
        "max_s": max(slowest),
        "jitter_pct": 100 * stdev(slowest) / average if len(slowest) > 1 else None,
        "outliers": [i for i, s in enumerate(slowest) if s > _OUTLIER * typical],
        "blocked_s_by_rank": [median(own) for own in blocked_s],
    }


def operation_rows(workload: Workload, times: "Times") -> list[Row]:
    """Return a row per message of each stage, in the order of its program."""
    rows = []
    for message in _messages(workload):
        op = message.op
        samples = list(_samples(message.parts, times))
        longest, shortest = (
            (median(each) for each in zip(*samples, strict=True)) if samples else (None, None)
        )
        group = workload.groups[op.group]
        wire_s = _wire_s(op, longest, shortest)
        rows.append(
            {
                "stage": message.stage,
                "operation": message.number,
                **_identity(op, workload),
                "module": op.module,
                "layer": op.layer,
                "microbatch": op.microbatch,
                "stream": op.stream,
                "time_s": longest,
                "time_min_s": shortest,
                "algbw_bytes_per_s": _rate(op.message_bytes(group), wire_s),
                "busbw_bytes_per_s": _rate(op.bus_bytes(group), wire_s),
            }
        )
    return rows


def summary_rows(workload: Workload, times: "Times", curves: Iterable[Curve] = ()) -> list[Row]:
    """Return a row per pass, collective, group, type and size, over all calls and passes.

    curves: of collectives alone. alone_pct: of the bandwidth alone, what is left in the step.
    """
    alone = {(curve.collective, curve.num_ranks): curve for curve in curves}
    samples: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    first: dict[tuple[Any, ...], CommOp] = {}
    numbers = Counter[tuple[Any, ...]]()
    for message in _messages(workload):
        if message.is_first:
            key = tuple(_identity(message.op, workload).values())
            samples[key] += _samples(message.parts, times)
            numbers[key] += 1
            first.setdefault(key, message.op)
    rows = []
    for key, own in samples.items():
        op = first[key]
        longest = sorted(each for each, _ in own)
        shortest = median(each for _, each in own) if own else None
        figures: Row = dict.fromkeys(("mean_s", "p50_s", "p99_s", "min_s", "max_s"))
        if longest:
            figures = {
                "mean_s": mean(longest),
                "p50_s": median(longest),
                "p99_s": longest[math.ceil(0.99 * len(longest)) - 1],
                "min_s": longest[0],
                "max_s": longest[-1],
            }
        wire_s = _wire_s(op, figures["p50_s"], shortest)
        rate = _rate(op.bus_bytes(workload.groups[op.group]), wire_s)
        counts = {"operations": numbers[key], "samples": len(own)}
        alone_s = _alone_s(op, workload.groups[op.group], alone)
        share = 100 * alone_s / wire_s if alone_s and wire_s else None
        more = {
            "time_min_s": shortest,
            "busbw_bytes_per_s": rate,
            "alone_s": alone_s,
            "alone_pct": share,
        }
        rows.append({**_identity(op, workload), **counts, **figures, **more})
    return sorted(rows, key=lambda row: -(row["mean_s"] or 0.0) * row["operations"])


def _alone_s(op: CommOp, group: Group, alone: dict[tuple[str, int], Curve]) -> float | None:
    """Return the time of a collective alone; None outside of what was measured."""
    curve = alone.get((op.collective, group.size))
    num_bytes = op.message_bytes(group)
    if curve is None or not num_bytes:
        return None
    time_s, mark = curve.time_s(num_bytes)
    return time_s if mark == MEASURED else None


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a stage's program. is_first: no earlier stage has the message, too.

    parts: by the ranks of each communicator, the place of the message in their programs.
    """

    stage: int
    number: int  # in the program
    op: CommOp
    parts: Mapping[tuple[int, ...], Sequence[int]]
    is_first: bool


def _messages(workload: Workload) -> Iterator[_Message]:
    """Yield the messages of each stage; those over several stages are matched by order."""
    per_stage = workload.world_size // len(workload.stages)
    programs = [program(workload, n * per_stage) for n in range(len(workload.stages))]
    places: list[dict[str, list[int]]] = []  # of collectives, by group
    for steps in programs:
        places.append(defaultdict(list))
        for number, step in enumerate(steps):
            if isinstance(step.op, CommOp) and step.op.collective not in (SEND, RECV):
                places[-1][step.op.group].append(number)
    for stage, steps in enumerate(programs):
        calls = Counter[str]()
        for number, step in enumerate(steps):
            op = step.op
            if not isinstance(op, CommOp):
                continue
            ranks = range(stage * per_stage, (stage + 1) * per_stage)
            call = calls[op.group]
            parts: dict[tuple[int, ...], list[int]] = {(rank,): [number] for rank in ranks}
            if op.collective not in (SEND, RECV):
                calls[op.group] += 1
                parts = {}
                for members in {workload.groups[op.group].members(rank) for rank in ranks}:
                    own = [places[rank // per_stage][op.group] for rank in members]
                    # Stages that do not agree: of the other one nothing is known.
                    parts[members] = [each[call] if call < len(each) else -1 for each in own]
            if len(step.members) > 1:
                is_first = all(members[0] >= ranks[0] for members in map(sorted, parts))
                yield _Message(stage, number, op, parts, is_first)


def _samples(
    parts: Mapping[tuple[int, ...], Sequence[int]], times: "Times"
) -> Iterator[tuple[float, float]]:
    """Yield the longest and shortest time of each call that was timed.

    A call is of one communicator in one pass. parts: as of _Message.
    """
    for members, numbers in parts.items():
        pairs = zip(members, numbers, strict=True)
        of_ranks = [times[rank, :, place].tolist() for rank, place in pairs if place >= 0]
        for own in zip(*of_ranks, strict=True):
            if timed := [each for each in own if not math.isnan(each)]:
                yield max(timed), min(timed)


def _identity(op: CommOp, workload: Workload) -> Row:
    group = workload.groups[op.group]
    return {
        "pass": pass_of(op),
        "collective": op.collective,
        "group": op.group,
        "group_size": group.size,
        "dtype": str(op.dtype),
        "message_bytes": op.message_bytes(group),
    }


def _wire_s(op: CommOp, longest: float | None, shortest: float | None) -> float | None:
    """Return the time of which the bandwidth is: the shortest only where all ranks must come.

    A rank of a broadcast may end before others begin. A send or receive may be buffered, or
    wait for the other rank: it has no bandwidth.
    """
    if op.collective in (SEND, RECV):
        return None
    return shortest if is_synchronizing(op.collective) else longest


def _rate(num_bytes: float, time_s: float | None) -> float | None:
    return num_bytes / time_s if time_s and num_bytes else None


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
        communicates = len(step.members) > 1
        interval = (start, start + time_s)
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
    total = 0.0
    end = -math.inf
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
    per_stage = workload.world_size // len(workload.stages)
    calls_of_stages = (
        (message.number, members)
        for message in _messages(workload)
        if is_synchronizing(message.op.collective)
        for members in message.parts
        # Over several stages a message has another number in each.
        if len(members) > 1 and {rank // per_stage for rank in members} == {message.stage}
    )
    for number, members in calls_of_stages:
        for sample in times[list(members), :, number].T.tolist():
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
                    kind=COMMUNICATION if isinstance(op, CommOp) else work_in_trace(op),
                    name=op.collective if isinstance(op, CommOp) else op.module,
                    module=op.module,
                    phase=pass_of(op),
                    layer=op.layer,
                    microbatch=op.microbatch,
                    start_ns=round(start * 1e9),
                    end_ns=round((start + time_s) * 1e9),
                )


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
