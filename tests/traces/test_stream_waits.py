"""Waits of streams for events of others, against a plain loop over what the host issued."""

import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.traces.trace_scripts import Script

from stepmark.timeline.trace_columns import NONE, RankTrace
from stepmark.traces.kineto.links import launches
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.stream_waits import awaited, made_to_wait

STREAMS = (7, 8, 9)


class Launch(NamedTuple):
    """A kernel: when the host launched it, and when it ended."""

    stream: int
    at: float
    end: float


class Wait(NamedTuple):
    """A wait of one stream for an event that was recorded in another."""

    stream: int
    at: float
    other: int
    recorded: float


def add_wait(script: Script, wait: Wait, record: int) -> None:
    call = script.call("cudaStreamWaitEvent", wait.at, wait.at + 0.5)
    script.add(
        *("cuda_sync", "Stream Wait Event", (0, wait.stream), (wait.at, wait.at + 0.5)),
        **{"stream": wait.stream, "device": 0, "correlation": call},
        **{"wait_on_stream": wait.other, "wait_on_cuda_event_record_corr_id": record},
    )


def issued(seed: int) -> tuple[Script, list[Launch], list[Wait]]:
    """Return what a host issues, one thing per microsecond."""
    rng = random.Random(seed)
    script, kernels, waits = Script(), list[Launch](), list[Wait]()
    records: list[tuple[int, float, int]] = []  # stream, when, the call
    for now in range(1, 60):
        kind = rng.choice(("kernel", "kernel", "record", "wait"))
        stream = rng.choice(STREAMS)
        if kind == "kernel":
            kernel = Launch(stream, now, now + rng.randrange(2, 40))
            kernels.append(kernel)
            script.kernel(f"k{now}", now, (now + 1, kernel.end), stream)
        elif kind == "record":
            records.append((stream, now, script.call("cudaEventRecord", now, now + 0.5)))
        elif records:
            other, recorded, call = rng.choice(records)
            waits.append(Wait(stream, now, other, recorded))
            add_wait(script, waits[-1], call)
    return script, kernels, waits


def causes(kernels: list[Launch], waits: list[Wait]) -> dict[float, float]:
    """Return which launch each launch waits for: of several, the one that ends last."""
    result: dict[float, Launch] = {}
    for wait in waits:
        first = [k for k in kernels if k.stream == wait.stream and k.at > wait.at]
        last = [k for k in kernels if k.stream == wait.other and k.at < wait.recorded]
        if first and last:
            old = result.get(first[0].at)
            if old is None or last[-1].end > old.end:
                result[first[0].at] = last[-1]
    return {launch: kernel.at for launch, kernel in result.items()}


def by_launch(trace: RankTrace) -> list[float]:
    """Return when the host launched each GPU event, in microseconds."""
    return (trace.calls.start[launches(trace)] / 1000).tolist()


@pytest.mark.parametrize("seed", range(25))
def test_recorded_waits_are_for_the_last_launch_before_the_event(
    seed: int, tmp_path: Path
) -> None:
    script, kernels, waits = issued(seed)
    trace = read_trace(script.write(tmp_path))
    at = by_launch(trace)
    after = awaited(trace, launches(trace), np.arange(len(at)))
    expected = causes(kernels, waits)
    assert {at[row]: at[other] for row, other in enumerate(after) if other != NONE} == expected
    flags = dict(zip(at, made_to_wait(trace, launches(trace)).tolist(), strict=True))
    for stream in STREAMS:
        own = [-1.0, *(k.at for k in kernels if k.stream == stream)]
        for before, launch in pairwise(own):
            has_wait = any(w.stream == stream and before < w.at < launch for w in waits)
            assert flags[launch] is (has_wait or not waits), launch


def test_any_stream_may_have_to_wait_where_a_trace_does_not_tell_which(tmp_path: Path) -> None:
    """Only the calls are there; the kernels of a graph wait inside of it."""
    script = Script()
    for place, stream in enumerate(STREAMS[:2]):
        script.kernel("before", 1 + place, (3, 4), stream)
    script.call("cudaStreamWaitEvent", 5, 6)
    for place, stream in enumerate(STREAMS[:2]):
        script.kernel("next", 7 + place, (9, 10), stream)
        script.kernel("later", 11 + place, (13, 14), stream)
    graph = script.call("cudaGraphLaunch", 15, 16)
    for stream in STREAMS[:2]:
        where = {"device": 0, "stream": stream, "correlation": graph}
        script.add("kernel", "inside", (0, stream), (17, 18), **where)
    trace = read_trace(script.write(tmp_path))
    flags = made_to_wait(trace, launches(trace)).tolist()
    names = [trace.names[name] for name in trace.gpu.name]
    assert {*zip(names, flags, strict=True)} == {
        ("before", False),
        ("next", True),
        ("later", False),
        ("inside", True),
    }


def test_all_events_may_have_waited_where_no_wait_is_in_the_trace(tmp_path: Path) -> None:
    script = Script()
    script.kernel("gemm", 1, (3, 4))
    trace = read_trace(script.write(tmp_path))
    assert made_to_wait(trace, launches(trace)).tolist() == [True]
