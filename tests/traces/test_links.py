"""Joins between tables of a trace, against plain loops that decide row by row."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stepmark.timeline.trace_columns import NONE
from stepmark.traces.kineto import links
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import MAIN, TraceWriter

Interval = tuple[int, int]
US = 1000


def nested(rng: random.Random, start: int, end: int, depth: int = 0) -> list[Interval]:
    """Return intervals that lie in one another or apart, in the order of (start, -end).

    Of few places, so that many begin or end together, or are empty.
    """
    own = [(start, end)] * rng.choice((1, 1, 1, 2)) if depth else []
    if depth < 4:
        cuts = sorted(rng.choices(range(start, end + 1), k=2 * rng.randrange(4)))
        for low, high in zip(cuts[::2], cuts[1::2], strict=True):
            own += nested(rng, low, high, depth + 1)
    return sorted(own, key=lambda item: (item[0], -item[1]))


def columns(intervals: Sequence[Interval]) -> tuple[np.ndarray, np.ndarray]:
    start, end = np.array(intervals, np.int64).reshape(-1, 2).T
    return start, end


@pytest.mark.parametrize("seed", range(60))
def test_parents_and_what_holds_a_place_are_those_of_a_loop(seed: int) -> None:
    """An interval ends before its end; of equal ones the later row is inside."""
    rng = random.Random(seed)
    threads = {number: nested(rng, 0, 14) for number in (3, 7)}
    rows = sorted(
        ((start, -end, number) for number, own in threads.items() for start, end in own),
        key=lambda row: row[:2],
    )
    start, end = columns([(first, -last) for first, last, _ in rows])
    thread = np.array([number for *_, number in rows], np.int64)
    expected = []
    for row in range(len(rows)):
        holders = [
            other
            for other in range(row)
            if thread[other] == thread[row]
            and start[row] < end[other]
            and end[row] <= end[other]
        ]
        expected.append(max(holders, default=NONE))
    assert links.parents_by_thread(start, end, thread).tolist() == expected
    places = [(place, number) for place in range(-1, 17) for number in (3, 7, 9)]
    innermost = links.innermost(start, end, thread, *np.array(places, np.int64).T)
    for (place, number), row in zip(places, innermost.tolist(), strict=True):
        holders = [
            other
            for other in range(len(rows))
            if thread[other] == number and start[other] <= place < end[other]
        ]
        assert row == max(holders, default=NONE), (place, number)


@pytest.mark.parametrize("seed", range(30))
def test_lookups_are_those_of_a_loop(seed: int) -> None:
    """The first of equal keys; NONE is no key, although several rows may have it."""
    rng = random.Random(seed)
    keys = [rng.choice((NONE, *range(6))) for _ in range(rng.randrange(8))]
    values = [NONE, *range(-3, 9)]
    expected = [keys.index(v) if v in keys and v != NONE else NONE for v in values]
    rows = links.lookup(np.array(keys, np.int64), np.array(values, np.int64))
    assert rows.tolist() == expected


@pytest.mark.parametrize("seed", range(30))
def test_a_span_has_its_start_and_not_its_end(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(20), 8))
    spans = [*zip(cuts[::2], cuts[1::2], strict=True)]
    if seed % 2:  # as steps are: each begins where the one before it ends
        spans = [*pairwise(cuts)]
    expected = [
        next((row for row, (low, high) in enumerate(spans) if low <= time < high), NONE)
        for time in range(-1, 21)
    ]
    rows = links.span_of(*columns(spans), np.arange(-1, 21))
    assert rows.tolist() == expected


def test_work_that_is_launched_as_a_step_begins_is_of_that_step(tmp_path: Path) -> None:
    job = TraceWriter(rank=0, world_size=1)
    job.step(4, 100, 100)
    job.step(5, 200, 100)
    launched = (99, 100, 199, 200, 299, 300)
    for place, time in enumerate(launched):
        job.kernel("gemm", time, 400 + 10 * place, 5)
    steps = links.steps(read_trace(job.write(tmp_path)))
    assert steps.is_marked
    assert steps.of_gpu.tolist() == [NONE, 0, 0, 1, 1, NONE]


@pytest.mark.parametrize(("overlap_us", "is_marked"), [(0, True), (2, True), (2.001, False)])
def test_steps_may_overlap_by_the_rounding_of_old_traces(
    overlap_us: float, is_marked: bool, tmp_path: Path
) -> None:
    """Times were in whole microseconds: a start and an end are off by one at most, each."""
    job = TraceWriter(rank=0, world_size=1)
    job.step(4, 100, 100 + overlap_us)
    job.step(5, 200, 100)
    job.kernel("gemm", 150, 210, 5)
    assert links.steps(read_trace(job.write(tmp_path))).is_marked is is_marked


def test_a_trace_without_steps_lasts_from_its_first_start_to_its_last_end(
    tmp_path: Path,
) -> None:
    job = TraceWriter(rank=0, world_size=1)
    job.add("cpu_op", "aten::mm", 40, 10, MAIN)
    job.kernel("long", 50, 60, 300)  # it ends after what begins later
    job.kernel("short", 52, 100, 5)
    first, last = links.first_and_last(read_trace(job.write(tmp_path)))
    assert last - first == 320 * US


def test_starts_and_waits_of_a_collective_send_nothing(tmp_path: Path) -> None:
    job = TraceWriter(rank=0, world_size=2)
    names = ("init", "allreduce", "wait", "send", "finalize")
    for place, name in enumerate(names):
        job.collective(name, 4, 4, 10 * place, None)
    trace = read_trace(job.write(tmp_path))
    sent = trace.comms.comm[links.sends(trace)]
    assert [trace.comm_args[number].collective for number in sent] == ["allreduce", "send"]


def test_a_kernel_has_the_call_around_its_launch(tmp_path: Path) -> None:
    """From its start to before its end. A kernel whose launch is not in the trace has none."""
    job = TraceWriter(rank=0, world_size=2)
    job.collective("allreduce", 4, 4, 100, None)  # until 105
    job.collective("broadcast", 4, 4, 105, None)
    for place, launched in enumerate((90, 99, 100, 104, 105)):
        job.kernel("Memcpy DtoD", launched, 200 + 10 * place, 5)
    where = {"device": 0, "stream": 1, "correlation": 999}
    job.add("kernel", "gemm", 300, 5, 1, **where)
    trace = read_trace(job.write(tmp_path))
    args, _ = links.gpu_comms(trace)
    names = [trace.comm_args[n].collective if n != NONE else "" for n in args.tolist()]
    assert names == ["", "", "allreduce", "allreduce", "broadcast", ""]
