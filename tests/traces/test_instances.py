"""Calls of torch.distributed of one process, their kernels and phases, and windows of steps."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stepmark.timeline.trace_columns import NONE, RankTrace
from stepmark.traces.kineto.instances import PHASES, CommCalls, comm_calls
from stepmark.traces.kineto.intervals import without
from stepmark.traces.kineto.links import steps
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.windows import (
    communication_and_compute,
    gpu_windows,
    in_windows,
)

from .comm_traces import AUTOGRAD, BASE_NS, TraceWriter
from .trace_truth import COMPUTE, breakdown, gpu_events, messages, read

TRACES = Path(__file__).parents[1] / "data" / "traces"
WITH_ARGS = ["fsdp8/rank3", "a100-nccl/rank0", "mi300-rccl/rank0", "b200-vllm/rank0"]


def calls_of(trace: RankTrace) -> CommCalls:
    return comm_calls(trace, steps(trace))


@pytest.mark.parametrize("name", WITH_ARGS)
def test_calls_and_kernels_are_those_that_a_plain_reading_of_the_file_counts(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    trace, truth = read_trace(path), messages(read(path))
    calls = calls_of(trace)
    timed = Counter(calls.args[i].collective for i in calls.comm[calls.end != NONE])
    plain: Counter[str] = Counter()
    for key, count in truth["kernels"].items():
        if key != "unknown":
            plain[key.split()[0]] += count
    assert timed == plain
    issued = Counter(calls.args[i].collective for i in calls.comm)
    plain = Counter()
    for key, count in truth["calls"].items():
        plain[key.split()[0]] += count
    del plain["wait"]
    assert issued == plain


@pytest.mark.parametrize("name", WITH_ARGS)
def test_exposed_communication_is_that_of_a_plain_sweep_over_each_window(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    trace, events = read_trace(path), gpu_events(read(path))
    windows = gpu_windows(trace, steps(trace))
    assert (windows.start[1:] == windows.end[:-1]).all()
    # The file's own times are relative to its base; windows of the reader are absolute.
    base = int(trace.gpu.start[0]) - events[0].start
    communication, compute = communication_and_compute(trace)
    hidden = in_windows(without(communication, compute), windows)
    for number, (start, end) in enumerate(zip(*windows, strict=True)):
        window = (int(start) - base, int(end) - base)
        # A kernel of a group without a name like nccl's is communication here.
        is_plain = all("multimem" not in event.name for event in events)
        plain = breakdown(events, window)
        if is_plain:
            assert hidden[number] == plain["exposed_communication"]
            assert in_windows(compute, windows)[number] == plain[COMPUTE]


def test_a_call_without_a_kernel_is_untimed_and_a_kernel_without_a_call_is_unlinked(
    tmp_path: Path,
) -> None:
    job = TraceWriter(rank=0, world_size=2)
    job.step(1, 0, 1000)
    job.collective("send", 100, 100, 10, None)
    job.collective("recv", 100, 100, 20, None)
    job.kernel("ncclDevKernel_SendRecv", 30, 100, 50)  # of both, launched after them
    job.collective("wait", 0, 0, 200, None)
    calls = calls_of(read_trace(job.write(tmp_path)))
    assert [calls.args[i].collective for i in calls.comm] == ["send", "recv"]
    assert (calls.end == NONE).all()
    assert calls.unlinked == (("ncclDevKernel_SendRecv", 1, 50_000),)


def test_a_barrier_of_nccl_is_the_all_reduce_inside(tmp_path: Path) -> None:
    job = TraceWriter(rank=0, world_size=2)
    job.step(1, 0, 1000)
    job.collective("allreduce", 1, 1, 11, 50, 7, dtype="Byte")
    job.add(
        *("cpu_op", "record_param_comms", 10, 20, 11),
        **{"Collective name": "barrier", "In msg nelems": 0, "Out msg nelems": 0},
    )
    calls = calls_of(read_trace(job.write(tmp_path)))
    assert [calls.args[i].collective for i in calls.comm] == ["allreduce"]
    assert (calls.start[0], calls.end[0]) == (BASE_NS + 50_000, BASE_NS + 57_000)


def test_phases_are_those_of_autograd_annotations_and_threads(tmp_path: Path) -> None:
    job = TraceWriter(rank=0, world_size=2)
    job.step(1, 0, 1000)
    job.add("user_annotation", "DistributedDataParallel.forward", 0, 100, 11)
    job.add("user_annotation", "Optimizer.step#Adam.step", 600, 100, 11)
    job.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 200, 50, AUTOGRAD)
    job.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 400, 50, 11)
    job.add("user_annotation", "nn.Module: Block_0", 205, 40, AUTOGRAD)  # recomputed
    places = [(10, 11), (150, 11), (210, AUTOGRAD), (300, AUTOGRAD), (410, 11), (650, 11)]
    for ts, tid in places:
        job.collective("allreduce", 4, 4, ts, ts + 5, 3, tid=tid)
    calls = calls_of(read_trace(job.write(tmp_path)))
    assert [PHASES[number] for number in calls.phase] == [
        *("forward", "", "backward", "backward", "backward", "optimizer")
    ]


def test_a_call_belongs_to_the_step_in_which_it_was_issued(tmp_path: Path) -> None:
    job = TraceWriter(rank=0, world_size=2)
    job.step(4, 0, 100)
    job.step(5, 100, 100)
    for ts in (50, 99, 100, 150, 250):
        job.collective("allreduce", 4, 4, ts, ts + 500, 3)
    calls = calls_of(read_trace(job.write(tmp_path)))
    np.testing.assert_array_equal(calls.step, [0, 0, 1, 1, NONE])


def test_an_operator_of_torch_is_a_call_only_where_the_backend_records_none(
    tmp_path: Path,
) -> None:
    job = TraceWriter(rank=0, world_size=2)
    shapes = {"Input Dims": [[[4]], []], "Input type": ["TensorList", ""]}
    for ts in (10, 100):
        job.add("cpu_op", "c10d::allreduce_", ts, 40, 11, **shapes)
    job.collective("allreduce", 4, 4, 20, 30, 3)  # of NCCL, inside the first
    work = {"Input Dims": [[4]], "Input type": ["float"]}
    job.add("user_annotation", "gloo:all_reduce", 120, 7, 13, **work)
    calls = calls_of(read_trace(job.write(tmp_path)))
    found = [calls.args[number] for number in calls.comm]
    assert [(args.collective, args.group, args.in_elements) for args in found] == [
        ("allreduce", "0", 4),
        ("all_reduce", "", 4),
    ]
    # One annotation, one operator of gloo: they belong together.
    assert found[1].dtype == "float"
    assert (calls.end - calls.start).tolist() == [3000, 7000]


def test_calls_that_old_versions_record_without_sizes_have_those_of_the_operator(
    tmp_path: Path,
) -> None:
    job = TraceWriter(rank=0, world_size=2)
    shapes = {"Input Dims": [[12], [8]], "Input type": ["int", "int"]}
    for ts in (10, 100):
        job.add("cpu_op", "record_param_comms", ts + 2, 30, 11)
        job.kernel("ncclKernel_SendRecv", ts + 5, ts + 20, 9)
    job.add("cpu_op", "c10d::alltoall_base_", 10, 40, 11, **shapes)
    calls = calls_of(read_trace(job.write(tmp_path)))
    (args,) = (calls.args[number] for number in calls.comm)
    assert (args.collective, args.dtype) == ("all_to_all", "int")
    assert (args.in_elements, args.out_elements) == (8, 12)
    assert (calls.end - calls.start).tolist() == [9000]
    assert calls.without_args == 1
    assert calls.unlinked == (("ncclKernel_SendRecv", 1, 9000),)
