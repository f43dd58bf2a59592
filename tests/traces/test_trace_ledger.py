"""The ledger of a trace: totals are the breakdown's, lines those of a sweep over time."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from tests.timeline.swept_ledger import Event
from tests.timeline.swept_ledger import ledger as swept

from stepmark.cli.main import status
from stepmark.step.trace_ops import COMPUTE
from stepmark.timeline.ledger import WAITING, Group, Idle, Ledger, Work, work_of
from stepmark.timeline.trace_breakdown import StepTimes
from stepmark.traces.kineto import idle
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.kineto.ledger import ledgers
from stepmark.traces.kineto.reader import read_trace

from .comm_traces import AUTOGRAD, MAIN, TraceWriter
from .test_breakdown import BASE_NS, MAX_GAP_NS, TRACES, Job, events, jobs, waits_for
from .test_breakdown import Work as GpuWork
from .test_kineto_reader import LAYOUTS

FILES = sorted([*TRACES.glob("*/*.json.gz"), *TRACES.parent.glob("gloo-traces/*.json.gz")])
KERNELS = {
    "gemm": Work.MATMUL,
    "flash_fwd": Work.ATTENTION,
    "vectorized_elementwise_kernel": Work.ELEMENTWISE,
}
COMMS = ("ncclDevKernel_X", "ncclDevKernel_Y")
CAUSES = {
    "host_bound": Idle.HOST,
    "launch_call": Idle.HOST,
    "kernel_gap": Idle.LAUNCH_GAP,
    "unknown": Idle.UNKNOWN,
}


def assert_totals_are_those_of(times: StepTimes, own: Ledger) -> None:
    assert own.window_ns == times.window_ns
    assert own.total(Group.COMPUTE) + own.total(Group.OVERLAPPED) == times.compute_ns
    assert own.total(Group.OVERLAPPED) == times.overlap_ns
    assert own.total(Group.COMM) == times.exposed_comm_ns
    assert own.total(Group.COPIES) == times.exposed_memory_ns
    assert own.total(Group.IDLE) == times.idle_ns
    if times.idle is not None:
        causes = Counter({cause: own.lines.get((Group.IDLE, cause), 0) for cause in Idle})
        assert causes[Idle.HOST] + causes[Idle.DATA] == times.idle.host_bound_ns
        assert causes[Idle.LAUNCH_GAP] == times.idle.kernel_gap_ns
        assert causes[Idle.UNKNOWN] == times.idle.unknown_ns


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_totals_are_those_of_the_breakdown(file: Path) -> None:
    trace = read_trace(file)
    own, steps = ledgers(trace, lambda _: True), breakdown(trace, lambda _: True).steps
    assert [number for number, _ in own] == [step.step for step in steps]
    for (_, each), step in zip(own, steps, strict=True):
        assert_totals_are_those_of(step, each)


def test_ranks_that_wait_for_none_count_in_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger and the breakdown of the same trace say how long ranks wait for each other."""
    shown = []
    for verb, title in (("breakdown", f"    {WAITING}"), ("ledger", f"of which {WAITING}")):
        assert status(["trace", verb, str(TRACES / "fsdp8")]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith(title)]
        shown.append(line.removeprefix(title).split())
    assert shown[0] == shown[1]


def named(job: Job) -> dict[int, str]:
    """Return the name of each work, several of a kind."""
    names = {}
    for number, work in enumerate(job.works):
        kinds = {"compute": tuple(KERNELS), "comm": COMMS}.get(work.kind, (work.kind,))
        names[number] = kinds[number % len(kinds)]
    return names


def by_sweep(job: Job, works: list[tuple[int, GpuWork]], step: StepTimes) -> Ledger:
    """Return the ledger of a window by a sweep; idle times nanosecond by nanosecond."""
    names = named(job)
    groups = {"compute": Group.COMPUTE, "comm": Group.COMM}
    labels = {"memory": "copy", "set": "copy"} | {k: str(work) for k, work in KERNELS.items()}
    start, end = step.start_ns - BASE_NS, step.end_ns - BASE_NS
    in_order = sorted(works, key=lambda item: (item[1].start, -item[1].end))
    order = [work for _, work in in_order]

    def causes(first: int, last: int) -> list[tuple[Idle, int]]:
        words = (waits_for(order, now, start, end)[0] for now in range(first, last))
        return list(Counter(CAUSES[word] for word in words).items())

    items = [
        Event(
            groups.get(work.kind, Group.COPIES),
            labels.get(names[number], names[number]),
            work.start,
            work.end,
        )
        for number, work in in_order
    ]
    return swept(items, start, end, causes)


@given(job=jobs())
def test_lines_are_those_of_the_sweep(job: Job, tmp_path_factory: Any) -> None:
    items, names = events(job), named(job)
    number = -1
    for item in items:
        if item["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            number += 1
            item["name"] = names.get(number) if item["cat"] == "kernel" else item["name"]
    path = tmp_path_factory.mktemp("t") / "rank0.json"
    header = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS - 1000}
    path.write_text(LAYOUTS[0](items, header, {}))
    trace = read_trace(path)
    with mock.patch.object(idle, "MAX_KERNEL_GAP_NS", MAX_GAP_NS):
        own, steps = ledgers(trace, lambda _: True), breakdown(trace, lambda _: True).steps
    assert [step for step, _ in own] == [step.step for step in steps]
    for (_, each), step in zip(own, steps, strict=True):
        works = [(n, work) for n, work in enumerate(job.works) if work.device == step.device]
        expected = by_sweep(job, works, step)
        assert each.lines == expected.lines
        assert_totals_are_those_of(step, each)


@pytest.mark.parametrize("name", ["a100-nccl/rank0", "fsdp8/rank7", "mi300-rccl/rank0"])
def test_overlapped_time_of_operations_adds_up_to_the_lines(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.json.gz")
    lines: Counter[str] = Counter()
    for _, own in ledgers(trace, lambda _: True):
        lines.update({n: ns for (g, n), ns in own.lines.items() if g is Group.OVERLAPPED})
    sums: Counter[str] = Counter()
    for op in measured_ops(trace).ops:
        assert 0 <= op.overlapped_ns <= op.time_ns
        if op.key.kind == COMPUTE:
            sums[work_of(op.key.name, op.key.role, op.key.phase)] += op.overlapped_ns
    assert +sums == lines
    assert lines


class Step(TraceWriter):
    def mark(self, name: str, ts: float, dur: float) -> None:
        self.add("user_annotation", f"stepmark::{name}", ts, dur, MAIN)

    def launched(self, name: str, launched: float, ts: float, dur: float) -> None:
        """Add a kernel with an operation of its name around the launch."""
        self.add("cpu_op", name, launched - 1, 3, MAIN)
        self.kernel(name, launched, ts, dur)


def test_lines_have_the_names_of_a_workload(tmp_path: Path) -> None:
    """Roles and phases decide the kind of work, arguments the collective."""
    step = Step(rank=0, world_size=2)
    step.step(4, 0, 2000)
    step.mark("data", 10, 60)
    step.mark("forward", 100, 300)
    step.mark("output", 100, 80)
    step.launched("triton_red_fused_0", 110, 120, 30)  # idle for 120: data from 10 to 70
    step.mark("blocks.0", 200, 80)
    step.launched("triton_red_fused_1", 210, 212, 28)
    step.launched("nvjet_tst", 220, 300, 60)  # long before: a gap of 60
    step.mark("optimizer", 500, 300)
    step.launched("triton_poi_fused_2", 510, 511, 9)
    step.collective("_allgather_base", 8, 16, 400, 350, 170)
    step.kernel("ncclDevKernel_Reduce(void*)", 530, 540, 10)
    step.kernel("Memcpy DtoH", 560, 560, 5)
    ((number, own),) = ledgers(read_trace(step.write(tmp_path)), lambda _: True)
    assert number == 4
    us = {(str(group), name): time / 1000 for (group, name), time in own.lines.items()}
    assert us == {
        ("compute", "loss"): 30,
        ("compute", "norm and elementwise"): 28,
        ("compute", "matmul"): 50,
        ("compute under communication", "matmul"): 10,
        ("compute under communication", "optimizer"): 9,
        ("exposed communication", "all_gather"): 151,
        ("exposed communication", "ncclDevKernel_Reduce"): 10,
        ("copies", "copy"): 5,
        ("idle", "data"): 60,
        # until its call returns at 111, 211, 531 and 560 (a copy waits for itself)
        ("idle", "host"): 51 + 61 + 11 + 10,
        ("idle", "launch gap"): 9 + 1 + 60 + 9,
    }


def test_recomputed_compute_is_a_part_of_its_line(tmp_path: Path) -> None:
    step = Step(rank=0, world_size=1)
    step.step(4, 0, 900)
    node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
    step.add("cpu_op", node, 100, 90, AUTOGRAD)
    step.add("user_annotation", "stepmark::blocks.0", 110, 60, AUTOGRAD)
    for ts in (120, 180):  # the second is the gradient
        step.add("cpu_op", "aten::mm", ts - 2, 5, AUTOGRAD)
        step.kernel("gemm", ts, ts + 1, 7, tid=AUTOGRAD)
    ((_, own),) = ledgers(read_trace(step.write(tmp_path)), lambda _: True)
    assert own.lines[Group.COMPUTE, "matmul"] == 14_000
    assert own.within == {"recomputed": 7_000}


def test_a_wait_counts_as_the_collective_that_runs(tmp_path: Path) -> None:
    """What is left of it, before gloo's thread begins and after it ends, is the wait's own."""
    step = Step(rank=0, world_size=2, backend="gloo")
    step.step(1, 0, 1000)
    step.add("cpu_op", "_c10d_functional::all_reduce", 100, 20, MAIN)
    step.add("cpu_op", "_c10d_functional::wait_tensor", 150, 400, MAIN)
    step.add("user_annotation", "gloo:all_reduce", 160, 300, 77)
    ((_, own),) = ledgers(read_trace(step.write(tmp_path)), lambda _: True)
    times = {name: ns / 1000 for (group, name), ns in own.lines.items() if group is Group.COMM}
    assert times == {"all_reduce": 20 + 300, "wait_tensor": 10 + 90}


def test_a_host_computes_by_outermost_operations(tmp_path: Path) -> None:
    step = Step(rank=0, world_size=2, backend="gloo")
    step.step(1, 0, 1000)
    step.mark("data", 0, 100)
    step.mark("forward", 100, 300)
    step.add("cpu_op", "aten::scaled_dot_product_attention", 150, 50, MAIN)
    step.add("cpu_op", "aten::mm", 160, 30, MAIN)
    step.add("cpu_op", "aten::mm", 200, 100, MAIN)
    step.add("cpu_op", "c10d::allreduce_", 210, 10, MAIN)
    step.add("user_annotation", "gloo:all_reduce", 215, 300, 77)
    ((number, own),) = ledgers(read_trace(step.write(tmp_path)), lambda _: True)
    us = {(str(group), name): time / 1000 for (group, name), time in own.lines.items()}
    assert number == 1
    assert us == {
        ("compute", "attention"): 50,
        ("compute", "matmul"): 10,
        ("compute under communication", "matmul"): 80,
        ("exposed communication", "all_reduce"): 10 + 215,
        ("idle", "data"): 100,
        ("idle", "host"): 50 + 485,
    }
