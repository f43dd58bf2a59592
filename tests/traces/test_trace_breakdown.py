"""stepmark trace breakdown: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.traces.comm_traces import MAIN, TraceWriter

from stepmark.cli.main import status

pytestmark = pytest.mark.ranks

TRACES = Path(__file__).parents[1] / "data" / "traces"
GLOO = TRACES.parent / "gloo-traces"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = status(["trace", "breakdown", *map(str, words)])
    return code, *capsys.readouterr()


def document(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(run(capsys, *words, "--json", "-")[1])


def test_every_part_of_every_step_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, TRACES / "fsdp8", "--jobs", "1")
    assert len(report["steps"]) == 16
    for row in report["steps"]:
        parts = ("compute_ns", "exposed_comm_ns", "exposed_copies_ns", "idle_ns")
        assert (
            sum(row[name] for name in parts)
            == row["window_ns"]
            == row["end_ns"] - row["start_ns"]
        )
        kinds = [
            c
            for c in report["communication"]
            if (c["rank"], c["step"]) == (row["rank"], row["step"])
        ]
        assert {kind["collective"] for kind in kinds} == {
            "_allgather_base",
            "_reduce_scatter_base",
        }
        assert sum(kind["num_events"] for kind in kinds) == 26
    assert report["definitions"] == "docs/traces.md"
    # Rank 7 is the one whose host is slow.
    idle = {row["rank"]: row["host_bound_ns"] for row in report["steps"]}
    assert idle[7] > 30e6
    assert max(idle[rank] for rank in range(7)) < 1e6


def test_the_text_names_step_rank_window_and_definition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (TRACES / "a100-nccl", "--steps", "5")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert out.startswith("step 5 of rank 0: 219.818 ms: compute 17.5 %, exposed communication")
    assert "(how much of it is waiting for other ranks is not known)" in out.splitlines()[0]
    assert "\nallreduce, group " in out
    assert "Definitions: docs/traces.md" in out
    only_in_details = ("Memcpy DtoD (Device -> Device)", "\nLaunch calls", " deepest")
    details = run(capsys, *words, "--details")[1]
    for text in only_in_details:
        assert text in details
        assert text not in out


def test_gloo_traces_are_broken_down_by_operators(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, GLOO)
    assert [(row["rank"], row["step"], row["clock"]) for row in report["steps"]] == [
        (rank, step, "host") for rank in (0, 1) for step in (1, 2)
    ]
    for row in report["steps"]:
        parts = row["compute_ns"] + row["exposed_comm_ns"] + row["idle_ns"]
        assert parts == row["window_ns"]
        assert row["comm_ns"] > row["window_ns"] / 2 > row["compute_ns"] > 0
        assert row["device"] is row["host_bound_ns"] is None
    assert "of ranks 0-1 on the host (no GPU events): " in run(capsys, GLOO)[1]


def test_many_windows_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(30):
        writer = TraceWriter(rank=rank, world_size=30)
        writer.step(1, 0, 100)
        writer.kernel("gemm", 5, 10, 50 + rank)
        writer.write(tmp_path)
    _, out, _ = run(capsys, tmp_path, "--jobs", "1")
    assert "the slowest is rank 29 with 0.089 ms" in out.splitlines()[0]
    assert "The slowest 16 of 30" in out
    assert "clocks are not known to agree" in out
    rows = [
        line.split()[0] for line in out.splitlines() if line.endswith(" 1") and " 1 " in line
    ]
    assert rows[:16] == [str(rank) for rank in range(29, 13, -1)]
    _, out, _ = run(capsys, tmp_path, "--jobs", "1", "--ranks", "28,29")
    assert "slowest" not in out  # by less than 1 %


def test_waits_at_once_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [(name, name, (0, 1)) for name in ("dp", "tp")]
    for rank, (arrives, lasts) in enumerate([(100, 100), (190, 10)]):
        writer = TraceWriter(rank=rank, world_size=2, groups=groups)
        writer.step(1, 0, 300)
        writer.kernel("gemm", 5, 60, 20 + 80 * rank)  # rank 1 computes 80 us longer
        for number, (name, _, ranks) in enumerate(groups):
            issued = 20 + 10 * number
            group: dict[str, Any] = {"group": name, "desc": name, "ranks": ranks}
            writer.collective("allreduce", 1024, 1024, issued, arrives, lasts, **group)
        writer.write(tmp_path)
    report = document(capsys, tmp_path)
    assert [row["waiting_ns"] for row in report["steps"]] == [90_000, 0]
    arrivals = [(row["waiting_ns"], row["caused_ns"]) for row in report["arrivals"]]
    assert arrivals == [(90_000, 0), (0, 90_000)]
    assert [row["from_ns"] for row in report["steps"]] == [0, 0]
    out = run(capsys, tmp_path)[1]
    cause = "mostly for rank 1, which computes longer: 0.100 ms, others 0.020 ms"
    assert f"(0.045 of 0.055 ms is waiting, {cause})" in out.splitlines()[0]
    assert "slowest" not in out
    assert "'from' counts from the first of all ranks:" in out


def test_waits_of_gloo_at_once_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = {"Input Dims": [[4]], "Input type": ["float"]}
    shapes = {"Input Dims": [[[4]], []], "Input type": ["TensorList", ""]}
    for rank, arrives in enumerate([30, 120]):
        writer = TraceWriter(rank=rank, world_size=2, backend="gloo")
        writer.step(1, 0, 200)
        writer.add("cpu_op", "aten::mm", 40, 20, MAIN)
        for number in range(2):
            start = arrives + number
            writer.add("cpu_op", "c10d::allreduce_", start - 10 + number * 5, 5, MAIN, **shapes)
            span = (start, 130 + number - start, 21 + number)
            writer.add("user_annotation", "gloo:all_reduce", *span, **work)
        writer.write(tmp_path)
    report = document(capsys, tmp_path)
    waits = [(row["waiting_ns"], row["exposed_waiting_ns"]) for row in report["steps"]]
    assert waits == [(91_000, 71_000), (0, 0)]
    times = {
        (row["rank"], row["kernel"]): (row["num_events"], row["time_ns"], row["exposed_ns"])
        for row in report["communication"]
    }
    assert times[0, "gloo:all_reduce"] == (2, 101_000, 81_000)
    assert times[1, "gloo:all_reduce"] == (2, 11_000, 11_000)


def test_events_of_a_collective_that_run_at_once_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = TraceWriter(rank=0, world_size=2)
    writer.step(1, 0, 300)
    for issued, stream in ((10, 8), (20, 9)):
        writer.collective("allreduce", 1024, 1024, issued, 100, 50)
        writer.events[-1]["args"]["stream"] = stream
    writer.write(tmp_path)
    report = document(capsys, tmp_path)
    (comm,) = report["communication"]
    assert (comm["num_events"], comm["time_ns"], comm["exposed_ns"]) == (2, 50_000, 50_000)


@pytest.mark.parametrize(
    ("folder", "steps", "words"),
    [
        ("a100-nccl", "7", "--steps 7 is invalid: it must be among those of the traces: 4-5."),
        ("b200-vllm", "7", "without ProfilerStep marks"),
    ],
)
def test_steps_that_are_not_there_are_refused(
    folder: str, steps: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, TRACES / folder, "--steps", steps)
    assert code == 2
    assert words in err


def test_what_is_wrong_with_a_trace_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("gemm", 0, 10, 50)
    writer.add("cuda_runtime", "cudaLaunchKernel", 70, 1, 11, correlation=999)
    writer.write(tmp_path)
    report = document(capsys, tmp_path)
    assert report["notes"] == [
        "rank 0: launches have no GPU event (1 cudaLaunchKernel): work of the GPU is missing"
    ]


def test_tables_are_written_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, TRACES / "a100-nccl", "--csv", f"{tmp_path}/out/")[0] == 0
    names = ["communication", "copies", "kernels", "launches", "steps"]
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == names


def test_ranks_of_two_jobs_do_not_wait_for_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        writer = TraceWriter(rank=rank, world_size=2)
        begin = 9_000 * rank
        writer.step(1, begin, 300 - 250 * rank)
        writer.collective("allreduce", 1024, 1024, begin + 5, begin + 10, 200 - 190 * rank)
        writer.write(tmp_path)
    report = document(capsys, tmp_path)
    assert report["disjoint"].startswith("The traces of ranks 0 and 1 do not overlap in time")
    assert report["arrivals"] == []
    out = run(capsys, tmp_path)[1]
    assert out.splitlines()[0] == report["disjoint"]
    assert "if rank 1" not in out
    assert "slow" not in out
    assert status(["trace", "messages", str(tmp_path)]) == 0
    assert "slow rank: not known" in capsys.readouterr().out
    assert status(["trace", "critical-path", str(tmp_path)]) == 2


def test_who_waits_for_whom_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, (arrives, lasts) in enumerate([(100, 100), (150, 50)]):
        writer = TraceWriter(rank=rank, world_size=2)
        writer.step(1, 0, 300)
        writer.kernel("gemm", 5, 60, 60)  # on rank 0 it hides 20 us of 50 us of waiting
        writer.collective("allreduce", 1024, 1024, 20, arrives, lasts)
        writer.write(tmp_path)
    report = document(capsys, tmp_path)
    steps = [(row["waiting_ns"], row["exposed_waiting_ns"]) for row in report["steps"]]
    assert steps == [(50_000, 30_000), (0, 0)]
    assert [row["exposed_comm_ns"] for row in report["steps"]] == [80_000, 50_000]
    arrivals = [(row["num_last"], row["caused_ns"]) for row in report["arrivals"]]
    assert arrivals == [(0, 0), (1, 50_000)]
    out = run(capsys, tmp_path)[1]
    waits = (
        "slow rank: rank 1 arrives last in 1 of 1 collectives, and the others wait 50 us per"
    )
    assert f"{waits} step, 30 us of it exposed" in out
    gain = "if rank 1 arrived with the others, the step would be at most 0.030 ms (15.0 %)"
    assert gain in out.splitlines()[1]
    assert (
        "(0.015 of 0.065 ms is waiting, mostly for rank 1, which is idle longer"
        in out.splitlines()[0]
    )
    assert [row["early_ns"] for row in report["arrivals"]] == [50_000, 0]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "exposed communication 0.065 32.5 % 0.050 0.065 0.080" in lines
    assert "waiting for other ranks 0.015 7.5 % 0.000 0.015 0.030" in lines
    assert "allreduce, group default_pg of 2 1 0.075 0.065 0.050 0.100" in lines
    assert "matrix products 1 0.060 0.060 0.060" in lines


def test_arrivals_need_clocks_that_agree_and_one_gpu_per_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, arrives in enumerate([100, 5_000]):
        writer = TraceWriter(rank=rank, world_size=2)
        writer.collective("allreduce", 1024, 1024, 20, arrives, 100 - rank)
        writer.write(tmp_path)
    report = document(capsys, tmp_path)
    assert [row["early_ns"] for row in report["arrivals"]] == [None, None]
    assert [row["caused_ns"] for row in report["arrivals"]] == [0, 1_000]
    writer.kernel("gemm", 0, 6000, 10)
    writer.events[-1]["args"]["device"] = 1
    writer.write(tmp_path)
    report = document(capsys, tmp_path)
    assert [row["rank"] for row in report["arrivals"]] == [0]


def test_copies_have_a_bandwidth_where_their_bytes_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = TraceWriter(rank=0, world_size=1)
    writer.kernel("Memcpy HtoD", 0, 10, 20, bytes=4_000)
    writer.kernel("Memcpy DtoH", 30, 40, 20)
    writer.write(tmp_path)
    out = run(capsys, tmp_path, "--details")[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "waiting" not in out
    assert "Memcpy HtoD 1 3.906 KiB 0.020 0.2" in lines
    assert "Memcpy DtoH 1 unknown 0.020 unknown" in lines


def test_what_is_in_no_window_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = document(capsys, TRACES / "mi300-rccl")["notes"]
    outside = (
        "968 GPU events (27.768 ms) lie outside the windows of all steps: they are not counted"
    )
    assert f"rank 0: {outside}" in notes
    first = run(capsys, TRACES / "hip-graph")[1].splitlines()[0]
    assert first.endswith("idle 97.9 % (463.252 ms is of unknown cause)")
    notes = document(capsys, TRACES / "mi250")["notes"]
    assert "rank 0: no window of step 2, which launched nothing" in notes


def test_the_slow_host_of_a_real_job_is_the_one_that_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = document(capsys, TRACES / "fsdp8", "--jobs", "1")
    first = run(capsys, TRACES / "fsdp8", "--jobs", "1")[1].splitlines()[0]
    assert "mostly for rank 7, whose host is late: host-bound for 39." in first
    worst = max(report["arrivals"], key=lambda row: row["caused_ns"])
    assert (worst["rank"], worst["num_last"], worst["num_calls"]) == (7, 51, 52)
    for row in report["steps"]:
        assert row["exposed_waiting_ns"] <= min(row["waiting_ns"], row["exposed_comm_ns"])
        assert row["waiting_ns"] <= row["comm_ns"]


def test_old_traces_say_why_waiting_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, TRACES / "dlrm8", "--jobs", "1")
    assert report["arrivals"] == []
    assert {row["waiting_ns"] for row in report["steps"]} == {None}
    assert any("how ranks wait for each other is not known" in note for note in report["notes"])
    headline = run(capsys, TRACES / "dlrm8", "--jobs", "1")[1].splitlines()[0]
    slowest = "the slowest is rank 5 with 11.485 ms without exposed communication"
    assert headline.endswith(slowest)
    assert status(["trace", "messages", str(TRACES / "dlrm8"), "--json", "-"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert {row["calls_per_step"] for row in ranks} == {None}


def test_tables_of_a_profiler_as_text_are_read_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "examples/frontier-profiler-table.txt")
    assert code == 0
    assert "communication-bound: yes" in out
    assert (
        "! lines 9-10, 12, 16, 18-20 (7 figures), first: hipStreamWaitEvent: Self CUDA" in out
    )
    assert out.count("[concurrent]") == 1
    assert run(capsys, "examples/frontier-profiler-table.txt", "--steps", "1")[0] == 2


def test_breakdown_and_messages_name_the_same_slow_rank_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrivals = [(100, 160, 400, 500), (100, 150, 450, 500), (110, 150, 400, 510)]
    for rank, places in enumerate(arrivals):
        writer = TraceWriter(rank=rank, world_size=3)
        writer.step(1, 0, 700)
        for number, start in enumerate(places):
            end = (120, 180, 470, 530)[number]
            writer.collective("allreduce", 1024, 1024, 20 + number, start, end - start)
        writer.write(tmp_path)
    out = run(capsys, tmp_path)[1]
    assert "ms is waiting; slow rank: none)" in out.splitlines()[0]
    line = "slow rank: none; rank 0 arrives last in 1 of 2 collectives"
    assert line in out.splitlines()
    assert status(["trace", "messages", str(tmp_path)]) == 0
    assert line in capsys.readouterr().out.splitlines()
