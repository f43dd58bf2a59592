"""Workloads of measured steps: the messages, times, products, streams and stages of traces."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.traces.trace_scripts import AUTOGRAD, Script

from stepmark.cli.main import status
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.device import load_devices
from stepmark.model.ops import Bmm, Gemm, Layout
from stepmark.model.systems import network_of
from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Kernel, Workload
from stepmark.timeline.trace_columns import GpuKind
from stepmark.traces.kineto import links
from stepmark.traces.kineto.ledger import ledgers
from stepmark.traces.kineto.matching import match
from stepmark.traces.kineto.messages import rank_messages
from stepmark.traces.kineto.program import program
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_options import ToWorkloadOptions, TraceInputs
from stepmark.traces.trace_workload import read

DATA = Path(__file__).parents[1] / "data" / "traces"


def options(*files: Path, **more: Any) -> TraceInputs:
    return ToWorkloadOptions(files=tuple(map(str, files)), out="-", jobs=1, **more)


def workload_of(folder: Path, *scripts: Script) -> Workload:
    for script in scripts:
        script.write(folder)
    workload = read(options(folder))
    assert workload is not None
    assert native.decode(native.encode(workload)) == workload
    return workload


@pytest.mark.parametrize(("name", "step"), [("fsdp8", 5), ("a100-nccl", 5), ("mi300-rccl", 15)])
def test_messages_are_those_that_are_counted(name: str, step: int) -> None:
    workload = read(options(DATA / name, steps=(step,)))
    assert workload is not None
    assert len(workload.stages) == 1
    files = sorted((DATA / name).iterdir())
    traces = [read_trace(file) for file in files]
    by_rank = {rank: (trace.info, rank_messages(trace)) for rank, trace in enumerate(traces)}
    found = match(by_rank, lambda number: number == step)
    counted: Counter[tuple[str, str, int | None]] = Counter()
    for kind, tally in found.histogram.items():
        counted[kind.collective, kind.dtype, kind.message_bytes] += tally.calls
    messages = Counter(
        (op.collective, str(op.dtype), op.message_bytes(workload.groups[op.group]))
        for op in workload.expand()
        if isinstance(op, CommOp)
    )
    assert messages
    assert {key: times * len(files) for key, times in messages.items()} == counted


def test_times_are_those_of_the_gpu_events() -> None:
    """Of one rank: nothing is lost, nothing counted twice."""
    trace = read_trace(DATA / "mi300-rccl" / "rank0.json.gz")
    (number,) = links.steps(trace).numbers
    made = program(trace, number)
    assert made is not None
    gpu = trace.gpu
    own = (links.steps(trace).of_gpu == 0) & ~is_communication(trace)
    times = [
        time
        for op, time in zip(made.operations, made.times, strict=True)
        if isinstance(op, ComputeOp)
    ]
    assert sum(time or 0 for time in times) == (gpu.end[own] - gpu.start[own]).sum()
    assert GpuKind.MEMCPY in gpu.kind[own]
    workload = read(options(DATA / "mi300-rccl"))
    assert workload is not None
    total = sum(op.time_s or 0 for op in workload.expand() if isinstance(op, ComputeOp))
    assert total == pytest.approx(sum(time or 0 for time in times) / 1e9)


def product(name: str, dims: list[list[int]], strides: list[list[int]], kind: str) -> object:
    types = ["", kind, kind] if len(dims) == 3 else [kind, kind]
    script = Script()
    script.step(0, 50)
    args = {"Input Dims": dims, "Input Strides": strides, "Input type": types}
    script.op(name, 1, 9, **args)
    script.kernel("gemm", 2, (10, 20))
    script.kernel("reduce", 4, (21, 23))
    return script


@pytest.mark.parametrize(
    ("name", "dims", "strides", "kind", "expected"),
    [
        (
            *("aten::mm", [[8, 32], [32, 16]], [[32, 1], [1, 32]], "c10::BFloat16"),
            Gemm(m=8, n=16, k=32, dtype=DType.BF16, layout=Layout.NT),
        ),
        (
            *("aten::mm", [[8, 32], [32, 16]], [[1, 8], [16, 1]], "float"),
            Gemm(m=8, n=16, k=32, dtype=DType.FP32, layout=Layout.TN),
        ),
        (
            *("aten::addmm", [[16], [8, 32], [32, 16]], [[1], [32, 1], [16, 1]], "c10::Half"),
            Gemm(m=8, n=16, k=32, dtype=DType.FP16, layout=Layout.NN),
        ),
        (
            *("aten::bmm", [[4, 8, 32], [4, 32, 16]], [[256, 32, 1], [512, 1, 32]], "float"),
            Bmm(batch=4, m=8, n=16, k=32, dtype=DType.FP32, layout=Layout.NT),
        ),
        # Neither rows nor columns are contiguous; a type that no product here has; no types.
        ("aten::mm", [[8, 32], [32, 16]], [[64, 2], [16, 1]], "float", Kernel(name="aten::mm")),
        ("aten::mm", [[8, 32], [32, 16]], [[32, 1], [16, 1]], "long", Kernel(name="aten::mm")),
        (
            "aten::mul",
            [[8, 32], [32, 16]],
            [[32, 1], [16, 1]],
            "float",
            Kernel(name="aten::mul"),
        ),
    ],
)
def test_products_have_their_shape_type_and_layout(
    tmp_path: Path, name: str, dims: Any, strides: Any, kind: str, expected: object
) -> None:
    """Two kernels of one operation are one computation."""
    script = product(name, dims, strides, kind)
    assert isinstance(script, Script)
    workload = workload_of(tmp_path, script)
    (op,) = workload.expand()
    assert isinstance(op, ComputeOp)
    assert op.op == expected
    assert (op.module, op.time_s) == (name, 12e-6)


def test_waits_between_streams_are_those_the_host_made(tmp_path: Path) -> None:
    """The sum waits for `a` and `c` for the sum; `b`, beside it, waits for nothing."""
    script = Script(0, 2)
    script.step(0, 50)
    script.kernel("a", 1, (10, 20))
    script.call("cudaStreamWaitEvent", 2.5, 3)
    script.all_reduce(4, (22, 60))
    script.kernel("b", 6, (21, 40))
    script.kernel("late", 8, (61, 62))
    script.call("cudaStreamWaitEvent", 10, 11)
    script.kernel("c", 12, (63, 70))
    script.call("cudaStreamWaitEvent", 13.5, 14)
    script.kernel("d", 15, (71, 75))
    (tmp_path / "one").mkdir()
    workload = workload_of(tmp_path / "one", script)
    operations = list(workload.expand())
    assert [(op.stream, op.after) for op in operations] == [
        ("compute", ()),
        ("stream 1", ("compute",)),
        *(("compute", ()), ("compute", ())),  # late: the host made no stream wait before it
        ("compute", ("stream 1",)),
        ("compute", ()),  # d: c waited for the same
    ]
    # Two sums, the second of which `c` must not wait for: it goes back to the first.
    script.all_reduce(11.5, (64, 90))
    workload = workload_of(tmp_path / "one", script)
    assert list(workload.expand())[-2].after == ("stream 1~1",)


def test_two_pipeline_stages(tmp_path: Path) -> None:
    """Ranks 0 and 1 send to 2 and 3: two programs of two ranks each."""
    for rank in range(4):
        script = Script(rank, 4)
        script.step(0, 50)
        pair = (rank % 2, rank % 2 + 2)
        if rank < 2:
            script.kernel("first", 1, (10, 20 + rank))
            end = 30 - rank  # rank 1 waits less
            script.message("send", 4, (22, end), pair, **{"Dst Rank": 1, "Src Rank": 0})
        else:
            script.message("recv", 1, (22, 30), pair, **{"Dst Rank": 1, "Src Rank": 0})
            script.op("autograd::engine::evaluate_function: X", 2, 9, AUTOGRAD)
            script.kernel("second", 4, (31, 40 + rank), thread=AUTOGRAD)
        script.write(tmp_path)
    workload = read(options(tmp_path))
    assert workload is not None
    assert len(workload.stages) == 2
    assert workload.world_size == 4
    first, second = list(workload.expand(0)), list(workload.expand(1))
    assert [op.module for op in first] == ["", "send"]
    assert first[0].time_s == pytest.approx(11e-6)  # of the rank that waits less
    assert isinstance(first[1], CommOp)
    assert isinstance(second[0], CommOp)
    assert (first[1].peer, second[0].peer) == (1, 1)
    assert workload.groups[first[1].group].members(1) == (1, 3)
    assert first[1].time_s is second[0].time_s is None  # it may wait for the other side
    assert second[1].phase == "bwd"
    assert not any("disagree" in note for note in workload.notes)


def test_times_are_those_of_the_rank_that_waits_least(tmp_path: Path) -> None:
    """Rank 1 is late: its host needs 35 us for the sum; a wait for the GPU is none of it."""
    scripts = [Script(rank, 2) for rank in range(2)]
    for rank, script in enumerate(scripts):
        script.step(0, 100)
        script.kernel("a", 5, (10, 20 + rank))
        script.all_reduce(10 + 30 * rank, (22 + 30 * rank, 62))
        script.call("cudaDeviceSynchronize", 60, 90)
    workload = workload_of(tmp_path, *scripts)
    computed, summed = workload.expand()
    assert computed.time_s == pytest.approx(11e-6)
    assert summed.time_s == pytest.approx(10e-6)
    host_s = {key: time for key, time in workload.settings.items() if key.startswith("host")}
    # Of the 100 us, 30 are the wait.
    assert host_s == {"host step, s": pytest.approx(70e-6)}
    (tmp_path / "rank1.json").unlink()
    lone = read(options(tmp_path))
    assert lone is not None
    assert [op.time_s for op in lone.expand()] == [pytest.approx(10e-6), None]


def test_a_traced_step_is_predicted_with_its_own_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 H200, FSDP2: the lines are those of the rank that the others wait for."""
    workload = read(options(DATA / "fsdp8", steps=(6,)))
    assert workload is not None
    file, out = tmp_path / "step.json", tmp_path / "out.json"
    file.write_bytes(native.encode(workload))
    ((_, measured),) = ledgers(
        read_trace(DATA / "fsdp8" / "rank7.json.gz"), lambda number: number == 6
    )
    predict = ["predict", str(file), "--json", str(out)]
    assert status(predict) == 0
    assert re.search(r"bound by the host \(device idle 39\.0 %", capsys.readouterr().out)
    found = json.loads(out.read_text())
    assert found["device"] == "NVIDIA H200"
    assert found["bound"] == "host"
    assert found["step_s"] == pytest.approx(measured.window_ns / 1e9, rel=0.005)
    lines = {(row["group"], row["line"]): row["time_ns"] for row in found["ledger"]}
    for line in {*lines, *measured.lines}:
        difference_ns = lines.get(line, 0) - measured.lines.get(line, 0)
        assert abs(difference_ns) < 0.007 * measured.window_ns, line
    assert any("792 of 792 computations and 26 of 26 messages" in n for n in found["notes"])
    assert not any("not measured" in n or "not known:" in n for n in found["notes"])
    assert found["sources_s"].keys() == {"file"}
    # Links of half the speed: twice the time, but for the latency of each of the messages.
    assert status([*predict, "--what-if", "link=0.5x"]) == 0
    network = network_of(load_devices()["h200-sxm"], 8)
    assert network is not None
    fixed_s = network.fixed_s("all_gather", network.placement(range(8)))
    comm_s = 2 * found["comm_s"] - 26 * fixed_s
    assert json.loads(out.read_text())["comm_s"] == pytest.approx(comm_s, rel=1e-3)
    # A NIC of 12.5 GB/s per GPU in place of NVLink: messages by it, computation as it was.
    slow = tmp_path / "slow.toml"
    slow.write_text('nics = 1\nnic = "100G"\ngpus_per_host = 1\n')
    assert status([*predict, "--network", str(slow)]) == 0
    sent = json.loads(out.read_text())
    ops = [op for op in workload.expand() if isinstance(op, CommOp)]
    sizes = [op.message_bytes(workload.groups[op.group]) for op in ops]
    wire_s = sum(sizes) * 7 / 8 / 12.5e9  # of gathers and reduce-scatters
    assert wire_s < sent["comm_s"] < 1.2 * wire_s
    assert sent["sources_s"] == found["sources_s"]
    assert any("times of 792 of 792 computations are the work" in n for n in sent["notes"])
    assert status([*predict, "--device", "h200"]) == 0
    assert json.loads(out.read_text())["step_s"] == found["step_s"]
    assert status([*predict, "--device", "h100-sxm"]) == 0
    other = json.loads(out.read_text())
    assert other["sources_s"].keys() == {"file"}  # no operation of this file has a shape
    assert any("times are those of NVIDIA H200" in note for note in other["notes"])
    assert other["bound"] == "host"  # that of the trace
    assert not any("host time" in note for note in other["notes"])
    capsys.readouterr()


def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state the messages"):
        read(options(DATA / "dlrm8"))
    with pytest.raises(ConfigError, match="one step"):
        read(options(DATA / "fsdp8", steps=(5, 6)))
    with pytest.raises(ConfigError, match="a step of all ranks"):
        read(options(DATA / "fsdp8", steps=(9,)))
    script = Script(0, 4)
    script.step(0, 50)
    script.message("allreduce", 4, (22, 30), (0, 1, 3))
    script.write(tmp_path)
    with pytest.raises(ConfigError, match="regular grid"):
        read(options(tmp_path))
    # Two ranks of four that differ: those of the others are not known.
    for rank in range(2):
        script = Script(rank, 4)
        script.step(0, 50)
        for number in range(1 + rank):
            script.all_reduce(4 + 3 * number, (22 + 10 * number, 30 + 10 * number))
        script.write(tmp_path)
    with pytest.raises(ConfigError, match="ranks 0 and 1 differ"):
        read(options(tmp_path))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        script = Script(rank, 2)
        script.step(0, 50)
        script.kernel("a", 1, (10, 20))
        script.all_reduce(4, (22, 30))
        script.write(tmp_path / "traces")
    file, folder = tmp_path / "step.json", tmp_path / "chakra"
    traces = [str(tmp_path / "traces"), "--jobs", "1"]
    assert status(["trace", "to-workload", *traces, "--out", str(file)]) == 0
    assert json.loads(file.read_text())["settings"]["step"] == 1
    assert status(["trace", "convert", *traces, "--to", "chakra", "--out", str(folder)]) == 0
    assert {each.name for each in folder.glob("*.et")} == {"workload.0.et", "workload.1.et"}
    for workload in (file, folder):
        capsys.readouterr()
        assert status(["workload", "show", str(workload)]) == 0
        text = capsys.readouterr().out
        assert "2 ranks" in text
        assert "all_reduce" in text
