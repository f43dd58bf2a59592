"""Tables of a replay: iterations, messages by kind and size, and every operation.

times: seconds as float64 [rank][pass][operation], not a number where nothing was timed. The
time of a message is the longest of its ranks, time_min the shortest: that of the rank that came
last, thus the wire's share, from which bus bandwidth is where all ranks must come.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from stepmark.core.collectives import FACTS, Collective
from stepmark.core.columns import aligned
from stepmark.core.message import RECV, SEND
from stepmark.core.rank_program import program
from stepmark.core.units import format_bytes, format_time
from stepmark.core.workload import COMPUTE, CommOp, Workload, pass_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.float64]

Row = dict[str, Any]
Interval = tuple[float, float]
_TIMES = ("mean_s", "p50_s", "p99_s", "max_s", "time_min_s")
_OUTLIER = 1.1  # an iteration that takes so many times the median


def iterations(seconds: Sequence[Sequence[float]], blocked_s: Sequence[Sequence[float]]) -> Row:
    """Return the iterations by their slowest rank, and each rank's time in messages."""
    slowest = [max(each) for each in zip(*seconds, strict=True)]
    typical = median(slowest)
    return {
        "seconds": slowest,
        "median_s": typical,
        "mean_s": mean(slowest),
        "min_s": min(slowest),
        "max_s": max(slowest),
        "outliers": [i for i, s in enumerate(slowest) if s > _OUTLIER * typical],
        "blocked_s_by_rank": [median(own) for own in blocked_s],
    }


def operation_rows(workload: Workload, times: "Times") -> list[Row]:
    """Return a row per message of each stage, in the order of its program."""
    rows = []
    for stage, number, op, samples in _messages(workload, times):
        longest, shortest = (
            (median(each) for each in zip(*samples, strict=True)) if samples else (None, None)
        )
        group, wire_s = workload.groups[op.group], _wire_s(op, longest, shortest)
        rows.append(
            {
                "stage": stage,
                "operation": number,
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


def summary_rows(workload: Workload, times: "Times") -> list[Row]:
    """Return a row per pass, collective, group, type and size, over all calls and passes."""
    samples: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    first: dict[tuple[Any, ...], CommOp] = {}
    numbers = Counter[tuple[Any, ...]]()
    for _, _, op, own in _messages(workload, times):
        key = tuple(_identity(op, workload).values())
        samples[key] += own
        numbers[key] += 1
        first.setdefault(key, op)
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
        more = {"time_min_s": shortest, "busbw_bytes_per_s": rate}
        rows.append({**_identity(op, workload), **counts, **figures, **more})
    return sorted(rows, key=lambda row: -(row["mean_s"] or 0.0) * row["operations"])


def lines(iterations: Row, summary: Sequence[Row], workload: Workload) -> Iterator[str]:
    """Yield the iterations and the table of messages, those that take longest first."""
    times = ", ".join(format_time(each) for each in iterations["seconds"])
    yield f"iterations  median {format_time(iterations['median_s'])} ({times})"
    for index in iterations["outliers"]:
        share = iterations["seconds"][index] / iterations["median_s"] - 1
        yield f"outlier     iteration {index} takes {share:.0%} longer than the median"
    if exposed := iterations.get("exposed_comm_s_by_rank"):
        times = ", ".join(
            f"rank {rank} {'unknown' if own is None else format_time(own)}"
            for rank, own in enumerate(exposed)
        )
        yield f"exposed     communication without computation, in a timed pass: {times}"
    if blocked := iterations["blocked_s_by_rank"]:
        shares = ", ".join(
            f"rank {rank} {own / iterations['median_s']:.0%}"
            for rank, own in enumerate(blocked)
        )
        yield f"waiting     share of the median iteration in messages: {shares}"
    heads = ("pass", "collective", "group", "ranks", "type", "size", "number")
    cells = [[*heads, "mean", "p50", "p99", "max", "shortest", "busbw GB/s"]]
    for row in summary:
        rate = row["busbw_bytes_per_s"]
        cells.append(
            [
                *(str(row[name]) for name in ("pass", "collective", "group", "group_size")),
                *(
                    str(row["dtype"]),
                    format_bytes(row["message_bytes"]),
                    str(row["operations"]),
                ),
                *("" if row[n] is None else format_time(row[n]) for n in _TIMES),
                "" if rate is None else f"{rate / 1e9:.2f}",
            ]
        )
    yield from aligned(cells, [False] * 3 + [True, False] + [True] * 8)
    yield f"{workload.name}: {workload.rules}, {workload.world_size} ranks"


def exposed_s(workload: Workload, spans: "Times") -> list[float | None]:
    """Return each rank's time in which messages run and nothing computes, median of its passes.

    spans: [rank][pass][operation][2], start and duration. None where a message was not timed.
    """
    result: list[float | None] = []
    for rank in range(workload.world_size):
        steps = program(workload, rank)
        is_comm = [len(step.members) > 1 for step in steps]
        by_pass = []
        for own in spans[rank, :, : len(steps)].tolist():
            sides: tuple[list[Interval], list[Interval]] = ([], [])
            for (start, time_s), communicates in zip(own, is_comm, strict=True):
                if communicates or not math.isnan(time_s):
                    sides[communicates].append((start, start + time_s))
            compute, comm = sides
            both_s = _covered([*compute, *comm])
            by_pass.append(both_s - _covered(compute))
        known = not any(map(math.isnan, by_pass))
        result.append(median(by_pass) if known else None)
    return result


def _covered(intervals: Sequence[Interval]) -> float:
    """Return the time in which any of them runs; not a number if one is none."""
    total, end = 0.0, -math.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    is_known = not any(math.isnan(last) for _, last in intervals)
    return total if is_known else math.nan


def timeline(workload: Workload, spans: "Times") -> Row:
    """Return the last pass in Chrome's trace format: ranks are processes, streams threads."""
    events: list[Row] = []
    for rank in range(workload.world_size):
        steps = program(workload, rank)
        streams = dict.fromkeys((COMPUTE, *(step.op.stream for step in steps)))
        threads = {stream: number for number, stream in enumerate(streams, 1)}
        for stream, thread in threads.items():
            names = ("process_name", f"rank {rank}"), ("thread_name", stream)
            for name, value in names:
                place = {"ph": "M", "name": name, "pid": rank, "tid": thread}
                events.append({**place, "args": {"name": value}})
        for step, (start, time_s) in zip(steps, spans[rank, -1].tolist(), strict=False):
            if math.isnan(time_s):
                continue
            op = step.op
            words = [op.collective] if isinstance(op, CommOp) else []
            numbers = {"layer": op.layer, "microbatch": op.microbatch}
            known = {name: value for name, value in numbers.items() if value is not None}
            events.append(
                {
                    "ph": "X",
                    "cat": "communication" if words else "computation",
                    "name": " ".join((*words, op.module)),
                    "pid": rank,
                    "tid": threads[op.stream],
                    "ts": start * 1e6,
                    "dur": time_s * 1e6,
                    "args": {"pass": pass_of(op), **known},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _messages(
    workload: Workload, times: "Times"
) -> Iterator[tuple[int, int, CommOp, list[tuple[float, float]]]]:
    """Yield stage, index, message, and the longest and shortest time of its ranks by call.

    Without calls nothing was timed. A call is of one communicator in one pass. Of communicators
    over several stages only the ranks of the stage count, whose programs are the same.
    """
    per_stage = workload.world_size // len(workload.stages)
    for stage in range(len(workload.stages)):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        for number, step in enumerate(program(workload, ranks[0])):
            op = step.op
            if not isinstance(op, CommOp) or len(step.members) == 1:
                continue
            group = workload.groups[op.group]
            alone = op.collective in (SEND, RECV)
            parts: dict[int, list[int]] = defaultdict(list)
            for rank in ranks:
                parts[rank if alone else group.first(rank)].append(rank)
            samples = []
            for members in parts.values():
                for own in times[members, :, number].T.tolist():
                    timed = [each for each in own if not math.isnan(each)]
                    if timed:
                        samples.append((max(timed), min(timed)))
            yield stage, number, op, samples


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
    return shortest if FACTS[Collective(op.collective)].synchronizing else longest


def _rate(num_bytes: float, time_s: float | None) -> float | None:
    return num_bytes / time_s if time_s and num_bytes else None
