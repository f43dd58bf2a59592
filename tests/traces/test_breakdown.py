"""The breakdown of a step equals a count of every nanosecond, and its parts add up."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.timeline.trace_breakdown import RankTimes, StepTimes
from stepmark.traces.kineto import idle
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import MAIN, TraceWriter
from .test_kineto_reader import LAYOUTS
from .trace_truth import breakdown as swept
from .trace_truth import gpu_events, read

TRACES = Path(__file__).parents[1] / "data" / "traces"
BASE_NS = 1_700_000_000_000_000_000
MAX_GAP_NS = 9
NAMES = {"compute": "gemm", "comm": "ncclDevKernel_X", "memory": "Memcpy DtoH", "set": "Memset"}
CATS = {"compute": "kernel", "comm": "kernel", "memory": "gpu_memcpy", "set": "gpu_memset"}


@dataclass(frozen=True)
class Work:
    """An event on a GPU with its launch call (start, end), or None; times in ns."""

    kind: str
    device: int
    start: int
    end: int
    call: tuple[int, int] | None


@dataclass(frozen=True)
class Job:
    works: tuple[Work, ...]
    marks: tuple[tuple[int, int, int], ...]  # number, start, end


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    works = []
    for _ in range(draw(st.integers(1, 14))):
        start, length = draw(st.integers(0, 150)), draw(st.integers(0, 25))
        begins, lasts = draw(st.integers(-30, 150)), draw(st.integers(0, 30))
        call = (begins, begins + lasts) if draw(st.integers(0, 5)) else None
        kind, device = draw(st.sampled_from(list(NAMES))), draw(st.sampled_from([0, 0, 0, 1]))
        works.append(Work(kind, device, start, start + length, call))
    marks, number, place = [], draw(st.integers(0, 9)), draw(st.integers(-20, 40))
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 60))
        marks.append((number, place, place + length))
        number, place = number + draw(st.sampled_from([1, 1, 4])), place + length
        place += draw(st.integers(0, 5))
    return Job(tuple(works), tuple(marks))


def events(job: Job) -> list[dict[str, Any]]:
    """Return the job as a profiler's events; times in us relative to the base."""
    items = []

    def add(cat: str, name: str, start: int, end: int, tid: int, **args: Any) -> None:
        times = {"ts": (start + 1000) / 1000, "dur": (end - start) / 1000}
        items.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid} | times)
        items[-1]["args"] = args

    for number, start, end in job.marks:
        add("user_annotation", f"ProfilerStep#{number}", start, end, 1)
    for number, work in enumerate(job.works):
        where = {"device": work.device, "stream": number, "correlation": number}
        add(CATS[work.kind], NAMES[work.kind], work.start, work.end, number, **where)
        if work.call:
            add("cuda_runtime", "cudaLaunchKernel", *work.call, 1, correlation=number)
    return items


def times_of(job: Job, path: Path, layout: Any = LAYOUTS[0]) -> RankTimes:
    header = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS - 1000}
    path.write_text(layout(events(job), header, {}))
    with mock.patch.object(idle, "MAX_KERNEL_GAP_NS", MAX_GAP_NS):
        return breakdown(read_trace(path), lambda _: True)


def step_of(job: Job, work: Work) -> int | None:
    if work.call:
        for index, (_, start, end) in enumerate(job.marks):
            if start <= work.call[0] < end and all(
                work.call[0] < later[1] for later in job.marks[index + 1 :]
            ):
                return index
    return None


def windows(job: Job, works: list[Work]) -> list[tuple[int | None, int, int]]:
    """Return (index of the mark, start, end) by the definition, in plain words of Python."""
    if not job.marks or all(step_of(job, work) is None for work in job.works):
        return [(None, min(w.start for w in works), max(w.end for w in works))]
    tiles: list[tuple[int | None, int, int]] = []
    for index, (number, mark, _) in enumerate(job.marks):
        own = [work for work in works if step_of(job, work) == index]
        if not own:
            continue
        first = min(work.start for work in own)
        earlier = [w.end for w in works if w.start < first]
        if not tiles:
            earlier += [
                w.end
                for w in works
                if w.call and w.call[0] < job.marks[0][1] and step_of(job, w) is None
            ]
            start = max(earlier) if earlier else min(mark, first)
        elif job.marks[tiles[-1][0] or 0][0] == number - 1:
            start = tiles[-1][2]
        else:
            start = max([tiles[-1][2], min(mark, first), *earlier])
        tiles.append((index, start, max(start, *(work.end for work in own))))
    return tiles


def counted(
    job: Job, works: list[Work], step: int | None, start: int, end: int
) -> dict[str, int]:
    """Return the times of a window by looking at each nanosecond."""
    times: Counter[str] = Counter()
    order = sorted(works, key=lambda w: (w.start, -w.end))
    for now in range(start, end):
        running = [w for w in works if w.start <= now < w.end]
        kinds = {w.kind if w.kind != "set" else "memory" for w in running}
        times["compute"] += "compute" in kinds
        times["comm"] += "comm" in kinds
        times["exposed_comm"] += "comm" in kinds and "compute" not in kinds
        times["memory"] += "memory" in kinds
        times["exposed_memory"] += kinds == {"memory"}
        times["idle"] += not running
        if running and step is not None:
            times["other_steps"] += all(step_of(job, w) != step for w in running)
        queued = sum(bool(w.call and w.call[0] <= now < w.start) for w in works)
        times["depth"] += queued
        times["most"] = max(times["most"], queued)
        times["empty"] += not queued
        if not running:
            times.update(waits_for(order, now, start, end))
    return times


def sums(job: Job, works: list[Work], step: int | None) -> tuple[int, Counter[str]]:
    """Return sums over the events of a step: calls, and time by group of kernels."""
    calls = 0
    groups: Counter[str] = Counter()
    for work in works:
        if step is not None and step_of(job, work) != step:
            continue
        group = {"compute": "matrix products", "comm": "communication"}.get(work.kind, "copies")
        groups[group] += work.end - work.start
        calls += work.kind == "comm"
    return calls, groups


def waits_for(order: list[Work], now: int, start: int, end: int) -> list[str]:
    gap_end = min([end, *(w.start for w in order if w.start > now and w.end > w.start)])
    gap_start = max([start, *(w.end for w in order if w.end <= now and w.end > w.start)])
    ready = []
    for work in order:
        if work.start == gap_end and work.call:
            is_waited_for = work.kind in ("memory", "set") and work.call[1] >= work.end
            ready.append((work.call[0] if is_waited_for else work.call[1], work.call[0]))
    if not ready:
        return ["unknown"]
    done, begun = min(ready)
    if now < done:
        return ["host_bound", *["launch_call"] * (now >= begun)]
    return ["kernel_gap" if gap_end - max(gap_start, done) <= MAX_GAP_NS else "unknown"]


def shown(times: StepTimes) -> dict[str, int]:
    names = (
        "compute",
        "comm",
        "exposed_comm",
        "memory",
        "exposed_memory",
        "idle",
        "other_steps",
    )
    parts = {name: getattr(times, f"{name}_ns") for name in names}
    assert times.idle
    for name in ("host_bound", "launch_call", "kernel_gap", "unknown"):
        parts[name] = getattr(times.idle, f"{name}_ns")
    if times.queue:
        parts |= {"depth": times.queue.depth_ns, "empty": times.queue.empty_ns}
        if times.window_ns:
            parts["most"] = times.queue.max
    return parts


@pytest.mark.parametrize("layout", LAYOUTS[:4])
@given(job=jobs())
def test_times_are_those_of_counting_every_nanosecond(
    layout: Any, job: Job, tmp_path_factory: Any
) -> None:
    result = times_of(job, tmp_path_factory.mktemp("t") / "rank0.json", layout)
    expected = []
    outside: Counter[str] = Counter()
    for device in sorted({work.device for work in job.works}):
        works = [work for work in job.works if work.device == device]
        inside: set[int] = set()
        for index, start, end in windows(job, works):
            number = None if index is None else job.marks[index][0]
            count = counted(job, works, index, start, end)
            expected.append((device, number, start, end, count))
            inside.update(range(start, end))
            calls, groups = sums(job, works, index)
            own = [c for c in result.comms if (c.device, c.step) == (device, number)]
            assert sum(c.num_events for c in own) == calls
            assert sum(c.time_ns for c in own) == count["comm"]
            assert sum(c.exposed_ns for c in own) == count["exposed_comm"]
            totals = {
                k.group: k.time_ns
                for k in result.kernels
                if (k.device, k.step) == (device, number)
            }
            assert Counter(totals) == groups
        beyond = [set(range(work.start, work.end)) - inside for work in works]
        outside["ns"] += len(set().union(*beyond))
        outside["events"] += sum(
            len(rest) == work.end - work.start > 0
            for rest, work in zip(beyond, works, strict=True)
        )
    assert (result.num_outside, result.outside_ns) == (outside["events"], outside["ns"])
    steps = result.steps
    assert [(s.device, s.step, s.start_ns - BASE_NS, s.end_ns - BASE_NS) for s in steps] == [
        each[:4] for each in expected
    ]
    for times, (*_, count) in zip(steps, expected, strict=True):
        own = shown(times)
        assert own == {name: count[name] for name in own}
        parts = ("compute", "exposed_comm", "exposed_memory", "idle")
        assert sum(own[name] for name in parts) == times.window_ns
        assert sum(own[n] for n in ("host_bound", "kernel_gap", "unknown")) == times.idle_ns


@given(
    job=jobs(),
    more=st.tuples(st.sampled_from(list(NAMES)), st.integers(0, 150), st.integers(1, 25)),
)
def test_more_work_in_a_window_leaves_less_idle(
    job: Job, more: Any, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    job = replace(job, marks=())
    (before, *_) = times_of(job, path).steps
    start = min(before.end_ns - BASE_NS, max(more[1], before.start_ns - BASE_NS))
    end = min(before.end_ns - BASE_NS, start + more[2])
    added = Work(more[0], before.device or 0, start, end, None)
    (after, *_) = times_of(replace(job, works=(*job.works, added)), path).steps
    assert (after.start_ns, after.end_ns) == (before.start_ns, before.end_ns)
    assert after.idle_ns <= before.idle_ns
    if more[0] == "compute":
        assert after.exposed_comm_ns <= before.exposed_comm_ns
    if more[0] == "comm":
        assert after.exposed_comm_ns >= before.exposed_comm_ns
        assert after.compute_ns == before.compute_ns


@pytest.mark.parametrize(
    "name", ["fsdp8/rank3", "a100-nccl/rank0", "mi300-rccl/rank0", "dlrm8/worker5"]
)
def test_windows_of_real_traces_equal_a_sweep(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    trace, truth = read_trace(path), gpu_events(read(path))
    base = int(trace.gpu.start[0]) - truth[0].start
    steps = breakdown(trace, lambda _: True).steps
    assert steps
    for step in steps:
        plain = swept(truth, (step.start_ns - base, step.end_ns - base))
        assert plain["compute"] == step.compute_ns
        assert plain["exposed_communication"] == step.exposed_comm_ns
        assert plain["exposed_memory"] == step.exposed_memory_ns
        assert plain["idle"] == step.idle_ns
        assert plain["overlap"] == step.overlap_ns


@given(job=jobs())
@settings(max_examples=20, deadline=None)
def test_steps_that_are_selected_are_as_among_all(job: Job, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    everything = times_of(job, path)
    trace = read_trace(path)
    with mock.patch.object(idle, "MAX_KERNEL_GAP_NS", MAX_GAP_NS):
        for number in everything.all_steps:
            alone = breakdown(trace, lambda n, number=number: n == number)
            assert alone.steps == tuple(
                step for step in everything.steps if step.step in (None, number)
            )


def test_work_of_steps_that_were_not_profiled_between_is_in_no_window(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    for number, at in ((3, 0), (4, 100), (8, 1000)):
        writer.step(number, at, 100)
        writer.kernel("gemm", at + 5, at + 20, 60)
    steps = breakdown(read_trace(writer.write(tmp_path)), lambda _: True).steps
    assert [(s.step, s.start_ns - BASE_NS, s.end_ns - BASE_NS) for s in steps] == [
        (3, 0, 80_000),
        (4, 80_000, 180_000),
        (8, 1_000_000, 1_080_000),
    ]
    assert [s.idle.host_bound_ns for s in steps if s.idle] == [6_000, 26_000, 6_000]
    assert [s.idle.kernel_gap_ns for s in steps if s.idle] == [14_000] * 3


def test_launch_statistics_count_calls_and_what_they_launched(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.kernel("gemm", 2, 60, 0.5)  # its launch of 1 us takes longer
    times = breakdown(read_trace(writer.write(tmp_path)), lambda _: True)
    (launch,) = times.launches
    assert (launch.call, launch.num_calls, launch.num_events) == ("cudaLaunchKernel", 2, 2)
    assert (launch.total_ns, launch.max_ns, launch.median_delay_ns) == (2000, 1000, 10_000)
    assert launch.num_short == 1


def test_a_copy_is_communication_where_a_collective_launched_it(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=2)
    own = {"Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 16}
    writer.kernel("Memcpy DtoD", 0, 10, 50, **own | {"dtype": "Float", "Group size": 2})
    writer.kernel("Memcpy HtoD", 2, 60, 20, bytes=4_000)
    writer.kernel("Memcpy DtoH", 3, 90, 5)
    times = breakdown(read_trace(writer.write(tmp_path)), lambda _: True)
    assert (times.steps[0].comm_ns, times.steps[0].memory_ns) == (50_000, 25_000)
    assert [comm.collective for comm in times.comms] == ["_allgather_base"]
    assert [copy.num_bytes for copy in times.copies] == [None, 4_000, None]


HOST_NAMES = {
    "aten::mm": "compute",
    "fsdp::chunk_cat": "compute",
    "c10d::_allgather_base_": "comm",
    "_c10d_functional::wait_tensor": "comm",
    "gloo:all_reduce": "comm",
    "PythonSubclass": "other",
    "autograd::engine::evaluate_function: MmBackward0": "other",
    "Optimizer.step#AdamW.step": "other",
}


@given(
    ops=st.lists(
        st.tuples(
            st.sampled_from(list(HOST_NAMES)),
            st.sampled_from([1, 2]),
            st.integers(0, 90),
            st.integers(0, 30),
        ),
        max_size=12,
    ),
    steps=st.lists(st.integers(1, 50), max_size=2),
)
def test_times_of_a_host_are_those_of_counting(
    ops: list[tuple[str, int, int, int]], steps: list[int], tmp_path_factory: Any
) -> None:
    items, at, marks = [], 5, {}
    for number, length in enumerate(steps):
        items.append(("user_annotation", f"ProfilerStep#{number}", 1, at, length))
        marks[number] = range(at, at + length)
        at += length + 1
    for name, *where in ops:
        is_span = name.startswith(("gloo:", "Optimizer"))
        items.append(("user_annotation" if is_span else "cpu_op", name, *where))
    shown_items = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": {}}
        | {"ts": start / 1000, "dur": length / 1000}
        for cat, name, tid, start, length in items
    ]
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    path.write_text(LAYOUTS[0](shown_items, {"schemaVersion": 1}, {}))
    result = breakdown(read_trace(path), lambda _: True)
    # A step has times where an operator starts in it, or communication goes on in it.
    seen = [range(start, start + 1) for cat, _, _, start, _ in items if cat == "cpu_op"]
    seen += [range(a, a + d) for name, _, a, d in ops if HOST_NAMES[name] == "comm"]
    if steps:
        expected = [
            number
            for number, mark in marks.items()
            if any(max(a.start, mark.start) < min(a.stop, mark.stop) for a in seen)
        ]
        assert [step.step for step in result.steps] == expected
    for step in result.steps:
        count: Counter[str] = Counter()
        for now in range(step.start_ns, step.end_ns):
            running = [(n, tid) for n, tid, a, d in ops if a <= now < a + d]
            talking = {tid for name, tid in running if HOST_NAMES[name] == "comm"}
            computing = any(
                HOST_NAMES[name] == "compute" and tid not in talking for name, tid in running
            )
            count["compute"] += computing
            count["comm"] += bool(talking)
            count["exposed"] += bool(talking) and not computing
            count["idle"] += not talking and not computing
        assert step.device is None
        assert count == {
            "compute": step.compute_ns,
            "comm": step.comm_ns,
            "exposed": step.exposed_comm_ns,
            "idle": step.idle_ns,
        }


def test_operators_on_a_host_are_summed_without_those_inside(tmp_path: Path) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    for name, start, length in (
        ("aten::linear", 0, 100),
        ("aten::addmm", 20, 50),
        ("_c10d_functional::all_reduce", 200, 40),
        ("c10d::allreduce_", 210, 20),
    ):
        writer.add("cpu_op", name, start, length, 11)
    times = breakdown(read_trace(writer.write(tmp_path)), lambda _: True)
    assert {k.group: (k.num_events, k.time_ns) for k in times.kernels} == {
        "matrix products": (2, 100_000),
        "communication": (2, 40_000),
    }
    (comm,) = times.comms
    assert (comm.kernel, comm.time_ns) == ("_c10d_functional::all_reduce", 40_000)


def test_all_work_in_the_step_of_the_optimizer_is_its(tmp_path: Path) -> None:
    """By names a sqrt is other work, and a foreach kernel that clips is the optimizer's."""
    host = TraceWriter(rank=0, world_size=1)
    gpu = TraceWriter(rank=1, world_size=1)
    mark = ("user_annotation", "Optimizer.step#AdamW.step", 100, 50, MAIN)
    for writer in (host, gpu):
        writer.add(*mark)
    for name, start in (("aten::_foreach_mul_", 10), ("aten::sqrt", 110), ("aten::copy_", 120)):
        host.add("cpu_op", name, start, 5, MAIN)
    for name, start in (
        ("void multi_tensor_apply_kernel<>", 10),
        ("void vectorized_elementwise_kernel<sqrt>", 110),
        ("ncclDevKernel_AllReduce", 120),
    ):
        gpu.kernel(name, start, start + 100, 5)
    groups = [
        {
            (kernels.group, kernels.num_events)
            for kernels in breakdown(read_trace(writer.write(tmp_path)), lambda _: True).kernels
        }
        for writer in (host, gpu)
    ]
    assert groups[0] == {("elementwise", 1), ("optimizer", 2)}
    assert groups[1] == {("elementwise", 1), ("optimizer", 1), ("communication", 1)}
