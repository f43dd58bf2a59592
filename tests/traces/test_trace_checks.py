"""Events that are shifted, dropped or duplicated are noticed, and real traces are clean."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.timeline.trace_columns import NONE, GpuKind, RankTrace
from stepmark.traces.kineto import links
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.checks import check, checked
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import TraceWriter

TRACES = Path(__file__).parents[1] / "data" / "traces"


@cache
def sample(name: str = "a100-nccl/rank0") -> RankTrace:
    return read_trace(TRACES / f"{name}.json.gz")


def with_rows(trace: RankTrace, table: str, rows: Any) -> RankTrace:
    """Return the trace with these rows of a table, in the order of their times."""
    columns = getattr(trace, table)
    chosen = {field.name: getattr(columns, field.name)[rows] for field in fields(columns)}
    return in_order(replace(trace, **{table: replace(columns, **chosen)}), table)


def in_order(trace: RankTrace, table: str) -> RankTrace:
    columns = getattr(trace, table)
    order = np.lexsort((-columns.end, columns.start))
    chosen = {field.name: getattr(columns, field.name)[order] for field in fields(columns)}
    return replace(trace, **{table: replace(columns, **chosen)})


def shifted(trace: RankTrace, row: int, by: int) -> RankTrace:
    start, end = trace.gpu.start.copy(), trace.gpu.end.copy()
    start[row], end[row] = start[row] + by, end[row] + by
    return in_order(replace(trace, gpu=replace(trace.gpu, start=start, end=end)), "gpu")


def flags(trace: RankTrace) -> set[str]:
    """Return what is flagged; the parts of every step add up whatever the damage."""
    times = breakdown(trace, lambda _: True)
    for step in times.steps:
        parts = step.compute_ns + step.exposed_comm_ns + step.exposed_memory_ns + step.idle_ns
        assert parts == step.window_ns
        assert step.idle
        gaps = step.idle.host_bound_ns + step.idle.kernel_gap_ns + step.idle.unknown_ns
        assert gaps == step.idle_ns
    return {damage.kind for damage in checked(trace).info.damage}


@pytest.mark.parametrize(
    "file", sorted(TRACES.glob("*/*.json.gz")), ids=lambda p: p.parent.name
)
def test_traces_of_real_profilers_are_clean(file: Path) -> None:
    trace = read_trace(file)
    assert not list(check(trace, links.launches(trace)))
    kinds = [damage.kind for damage in breakdown(trace, lambda _: True).damage]
    # The work of an MTIA device is not read, and its host cannot stand in for it.
    assert kinds == ["no-device-times"] * (file.parent.name == "mtia")


ROWS = st.integers(0, sample().gpu.start.size - 1)


@given(row=ROWS)
@settings(max_examples=15, deadline=None)
def test_a_duplicated_event_is_flagged(row: int) -> None:
    rows = np.append(np.arange(sample().gpu.start.size), row)
    kinds = flags(with_rows(sample(), "gpu", rows))
    assert "overlap" in kinds
    is_kernel = sample().gpu.kind[row] == GpuKind.KERNEL
    assert ("duplicate-launch" in kinds) == is_kernel


@given(row=ROWS)
@settings(max_examples=15, deadline=None)
def test_a_dropped_event_is_flagged(row: int) -> None:
    trace = sample()
    call = int(links.launches(trace)[row])
    is_memset = "Memset" in trace.names[trace.calls.name[call]]  # some reach no GPU
    rows = np.delete(np.arange(trace.gpu.start.size), row)
    assert ("lost-gpu-events" in flags(with_rows(trace, "gpu", rows))) == (not is_memset)


@given(row=ROWS)
@settings(max_examples=15, deadline=None)
def test_a_dropped_launch_is_flagged_unless_the_trace_may_begin_after_it(row: int) -> None:
    trace = sample()
    call = int(links.launches(trace)[row])
    stream = np.flatnonzero(trace.gpu.stream == trace.gpu.stream[row])
    rows = np.delete(np.arange(trace.calls.start.size), call)
    assert ("lost-launches" in flags(with_rows(trace, "calls", rows))) == (row > stream[0])
    assert "lost-launches" in flags(with_rows(trace, "calls", rows[:0]))


@given(row=ROWS, beyond=st.integers(1_001, 10**9))
@settings(max_examples=15, deadline=None)
def test_an_event_before_its_launch_is_flagged(row: int, beyond: int) -> None:
    trace = sample()
    ahead = int(trace.gpu.start[row] - trace.calls.start[links.launches(trace)[row]])
    assert "before-launch" in flags(shifted(trace, row, -ahead - beyond))


@given(row=ROWS, steps_over=st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_an_event_after_later_ones_of_its_stream_is_flagged(row: int, steps_over: int) -> None:
    trace = sample()
    own = np.flatnonzero(trace.gpu.stream == trace.gpu.stream[row])
    later = own[min(np.searchsorted(own, row) + steps_over, own.size - 1)]
    kinds = flags(shifted(trace, row, int(trace.gpu.end[later] - trace.gpu.start[row])))
    if later != row:
        assert "out-of-order" in kinds


def test_streams_that_overlap_are_flagged(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.kernel("gemm", 2, 35, 50)
    assert flags(read_trace(writer.write(tmp_path))) == {"overlap"}


def test_launches_that_a_graph_records_have_no_events(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    for name, at in (("BeginCapture", 20), ("LaunchKernel", 22), ("EndCapture", 24)):
        writer.add("cuda_runtime", f"cudaStream{name}", at, 1, 11, correlation=100 + at)
    assert flags(read_trace(writer.write(tmp_path))) == set()


def test_overlapping_marks_and_several_processes_are_flagged(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.kernel("gemm", 50, 65, 50)
    writer.step(1, 0, 100)
    writer.step(2, 50, 100)
    calls = [event for event in writer.events if event["cat"] == "cuda_runtime"]
    calls[1]["pid"] = 2
    trace = read_trace(writer.write(tmp_path))
    assert flags(trace) == {"steps-overlap", "processes"}
    assert breakdown(trace, lambda _: True).steps[0].step is None
    assert (links.steps(trace).of_gpu != NONE).all()


def test_each_of_several_gpus_has_rows_of_its_own(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.kernel("gemm", 50, 65, 70)
    writer.events[-1]["args"]["device"] = 1
    trace = read_trace(writer.write(tmp_path))
    assert flags(trace) == {"devices"}
    steps = breakdown(trace, lambda _: True).steps
    assert [(step.device, step.compute_ns) for step in steps] == [(0, 50_000), (1, 70_000)]


def test_times_that_lie_hours_apart_are_flagged(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.kernel("gemm", 7.2e9, 7.2e9 + 10, 50)
    assert flags(read_trace(writer.write(tmp_path))) == {"span"}
