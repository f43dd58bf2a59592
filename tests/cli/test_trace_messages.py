"""stepmark trace messages: its text and files, curves, a faster network, other sources."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store.writers import new_run
from tests.traces.comm_traces import MAIN, TraceWriter
from tests.training.train_records import MESSAGES, fsdp, told, train_measured, train_run

from stepmark.cases.message import Tally
from stepmark.cli.main import status

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
FSDP8 = DATA / "traces" / "fsdp8"
CURVES = DATA / "nccl-tests"
FRONTIER = ROOT / "examples" / "frontier-rccl.txt"


def messages(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    code = status(["trace", "messages", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    code, out, _ = messages(capsys, *words, "--json", "-")
    assert code == 0
    return json.loads(out)


def test_a_real_job_takes_what_its_curve_says_and_waits_for_one_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, FSDP8, "--curve", CURVES, "--by", "collective")
    sizes = [(row["collective"], row["from_bytes"], row["calls"]) for row in found["histogram"]]
    assert sizes == [
        ("all_gather", 94380032, 2 * 8 * 16),
        ("all_gather", 262148096, 2 * 8),
        ("reduce_scatter", 94380032, 2 * 8 * 8),
        ("reduce_scatter", 262148096, 2 * 8),
    ]
    assert all(0.95 < row["times_expected"] < 1.1 for row in found["histogram"])
    curve = found["curve"]
    assert curve["uncovered_calls"] == 0
    assert curve["took_per_rank_step_s"] == pytest.approx(8.284e-3, rel=1e-3)
    assert curve["expected_per_rank_step_s"] == pytest.approx(8.141e-3, rel=1e-3)
    ranks = found["ranks"]
    assert [row["arrived_last"] for row in ranks] == [0, 1, 0, 0, 0, 0, 0, 51]
    for row in ranks:
        assert row["transfer_s"] + row["waiting_s"] == pytest.approx(row["kernels_s"])
        assert row["exposed_s"] <= row["communication_s"] <= row["step_s"]
    # Rank 7 waits for nobody, so that no network makes the step shorter than its own.
    least = min(row["exposed_s"] for row in ranks)
    assert found["network"]["most_gain_s"] == pytest.approx(least)
    assert "ranks wait for one another; a network" in found["network"]["verdict"][1]
    slow = "slow rank: rank 7 arrives last in 51 of 52 collectives, and the others wait "
    assert found["network"]["verdict"][2].startswith(slow)


def test_the_text_has_each_row_and_what_another_network_gains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = messages(capsys, FSDP8, "--curve", CURVES, "--network-speedup", "4")
    assert code == 0
    assert re.search(r"all_gather +bf16 +0 default_pg +backward +8 +94380032", out)
    text = "the timed ones take 8.141 ms by it, and took 8.284 ms, 1.02 times that"
    assert text in out
    assert "a network 4 times as fast: " in out
    assert re.search(r"HtoD +64 KiB<=<1 MiB +1 ", out)


def test_messages_by_a_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The measured transfers of 8 x H200 are within 10 % of the data sheet's NVLink."""
    code, out, _ = messages(capsys, FSDP8, "--network", "dgx-h200")
    assert code == 0
    ratio = re.search(r"and took [\d.]+ ms, ([\d.]+) times that", out)
    assert ratio
    assert 0.9 < float(ratio[1]) < 1.1
    assert "the network dgx-h200: " in out
    slow = tmp_path / "slow.toml"
    slow.write_text('nics = 1\nnic = "100G"\ngpus_per_host = 1\n')
    rows = document(capsys, FSDP8, "--network", slow)["histogram"]
    for row in rows:  # busbw of a ring over one NIC of 12.5 GB/s each
        busbw = row["from_bytes"] * 7 / 8 / row["expected_per_call_s"]
        assert 0.8 * 12.5e9 < busbw < 12.5e9
    assert document(capsys, FSDP8, "--network", slow)["network"]["gains"][0]["most_gain_s"] == 0


def test_other_sources_of_the_job_stand_beside_the_traces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, source in (("logs", "nccl-logs/fsdp8"), ("dumps", "flight-recorder")):
        shutil.copytree(DATA / source, tmp_path / name)
    shutil.copytree(FSDP8, tmp_path / "traces-of-it")
    quoted = json.dumps({"evidence": "host:1:2 [0] NCCL INFO comm 0x1"}, indent=2)
    (tmp_path / "watch.json").write_text(quoted)  # a report that quotes a log is none
    _, out, _ = messages(capsys, tmp_path)
    agree = "agrees: 4 of 4 kinds of message are there as often as in 10 steps"
    assert f"NCCL log (8 files) {agree}" in out
    assert f"flight recorder (4 files) {agree}" in out
    found = document(capsys, FSDP8, tmp_path / "logs")
    assert {row["steps_worth"] for row in found["sources"]} == {10}


def test_what_a_run_recorded_stands_beside_its_traces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {("all_gather", 94380032): 16, ("reduce_scatter", 94380032): 8}
    sizes |= {("all_gather", 262148096): 1, ("reduce_scatter", 262148096): 2}  # one too many
    kind = MESSAGES[0][0]
    recorded = tuple(
        (replace(kind, collective=name, message_bytes=size), Tally(calls=8 * calls, ranks=8))
        for (name, size), calls in sizes.items()
    )
    writer = new_run(tmp_path / "runs", train_run())
    folder = next((tmp_path / "runs").iterdir())
    shutil.copytree(FSDP8, folder / "traces")
    names = tuple(f"traces/rank{rank}.json.gz" for rank in range(8))
    case, seconds = fsdp(), [[0.7] * 6] * 8
    training = told(case, seconds, messages=recorded, traces=names)
    writer.append(train_measured(case, seconds, training=training))
    _, out, _ = messages(capsys, "latest", "--runs", tmp_path / "runs")
    agreeing = "3 of 4 kinds of message are there as often as in 1 step"
    assert f"record of the run (1 file) disagrees: {agreeing}" in out
    assert "reduce_scatter of 250 MiB over 8 ranks: 2 per rank, where the traces have 1" in out


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = messages(
        capsys, FSDP8, "--csv", f"{tmp_path}/", "--html", tmp_path / "m.html"
    )
    assert code == 0
    assert "reduce_scatter" in out
    with (tmp_path / "histogram.csv").open() as file:
        assert sum(int(row["calls"]) for row in csv.DictReader(file)) == 2 * 8 * 26
    assert (tmp_path / "ranks.csv").exists()
    assert (tmp_path / "copies.csv").exists()
    page = (tmp_path / "m.html").read_text()
    assert re.search(r'<pre class="table">collective .*\nall_gather', page), "folded"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--curve", FRONTIER], "one of them"),
        (
            ["--curve", f"{FRONTIER}:2"],
            "times of all_gather, reduce_scatter; it has all_reduce",
        ),
        (["--other-curve", CURVES], "it must be given with --curve."),
        (["--steps", "9"], "--steps 9 is invalid: it must be among those of the traces: 5-6."),
        (["--network-speedup", "0.5"], "from 1 to 1000"),
        (["--network-speedup", "3", "--network", "p5"], "given without --network"),
        (["--network", "dgx-h10"], "did you mean dgx-h100?"),
        (["--force"], "it must be given with --curve."),
        (["--by", "rank"], "some of collective"),
    ],
    ids=[
        *("settings", "collectives", "no-curve", "steps", "speedup", "both", "network"),
        *("force", "by"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[object], text: str) -> None:
    code, _, err = messages(capsys, FSDP8, *words)
    assert code == 2
    assert text in err
    lines = [line for line in err.splitlines() if not line.startswith("# reading")]
    assert len(lines) == 1


def test_a_curve_of_another_number_of_ranks_is_refused_or_forced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("all_gather", "reduce_scatter"):
        text = (CURVES / f"8xH200-{name}.txt").read_text()
        lines = [line for line in text.splitlines() if not re.match(r"#  Rank  [4-7]", line)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines).replace("nGpus 8", "nGpus 4"))
    code, _, err = messages(capsys, FSDP8, "--curve", tmp_path)
    assert code == 2
    assert "all_gather of 8 ranks, not of 4" in err
    found = document(capsys, FSDP8, "--curve", tmp_path, "--force")
    assert "other number of ranks" in found["histogram"][0]["curve"]


def test_waiting_and_transfer_of_one_rank_alone_are_not_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One rank of 300: of gloo's calls an old trace has the work alone."""
    found = document(capsys, DATA / "traces" / "cpu-only")
    for row, size in zip(found["histogram"], (1285084, 8329644), strict=True):
        assert (row["collective"], row["from_bytes"]) == ("all_reduce", size)
        assert (row["num_ranks"], row["waiting_s"]) == (300, None)
    text = "perhaps communication-bound: a network without transfer time takes at most 85"
    assert found["network"]["verdict"][1].startswith(text)


def test_communication_of_unknown_calls_may_be_transfer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for rank in range(2):
        job = TraceWriter(rank=rank, world_size=2)
        job.step(1, 0, 100)
        job.kernel("ncclDevKernel_AllReduce", 1, 10, 80)  # of a replayed graph
        job.write(tmp_path)
    found = document(capsys, tmp_path)
    assert found["network"]["verdict"][1].startswith("perhaps communication-bound")
    assert "their sizes are not known" in found["notes"][0]


def test_a_faster_network_saves_no_time_of_the_host_in_calls(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Calls take 60 us of the host, transfers 20 us: at most these are saved."""
    work = {"Input Dims": [[4]], "Input type": ["float"]}
    shapes = {"Input Dims": [[[4]], []], "Input type": ["TensorList", ""]}
    for rank in range(2):
        job = TraceWriter(rank=rank, world_size=2, backend="gloo")
        job.step(1, 0, 200)
        job.add("cpu_op", "aten::mm", 0, 40, MAIN)
        job.add("cpu_op", "c10d::allreduce_", 50, 60, MAIN, **shapes)
        job.add("user_annotation", "gloo:all_reduce", 110, 20, 21, **work)
        job.write(tmp_path)
    gains = []
    for speedup in (1, 2, 4, 1000):
        report = document(capsys, tmp_path, "--network-speedup", speedup)
        (gain,) = report["network"]["gains"]
        gains.append(gain["most_gain_s"])
        assert gains[-1] <= 20e-6 * (1 - 1 / speedup) + 1e-12
    assert gains == sorted(gains)
    assert gains[1] == pytest.approx(10e-6)
    words = "partly communication-bound (10% to 50% of the step): a network without"
    assert report["network"]["verdict"][1].startswith(words)


def test_exposed_waiting_is_that_of_the_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, FSDP8)
    assert status(["trace", "breakdown", str(FSDP8), "--json", "-"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    for row in found["ranks"]:
        own = [s["exposed_waiting_ns"] for s in steps if s["rank"] == row["rank"]]
        assert row["exposed_waiting_s"] == pytest.approx(sum(own) / len(own) * 1e-9)
    share = "84% of it waiting for other ranks"
    assert share in found["network"]["verdict"][0]


def test_steps_without_any_work_have_no_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = TraceWriter(rank=0, world_size=1)
    job.step(1, 0, 100)
    job.step(2, 100, 100)
    job.write(tmp_path)
    for words in ((), ("--steps", "2")):
        code, out, err = messages(capsys, tmp_path, *words)
        assert (code, err) == (0, "")
        assert "no message of torch.distributed is in these steps" in out
        assert (
            "communication-bound: not known, because no step with work is in the traces" in out
        )


def test_without_communication_one_line_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = TraceWriter(rank=0, world_size=1)
    job.step(1, 0, 100)
    job.kernel("gemm", 1, 10, 80)
    job.write(tmp_path)
    code, out, _ = messages(capsys, tmp_path)
    assert code == 0
    assert re.search(r"\nnot communication-bound: nothing is sent in \S+ us per step\n", out)
    assert not re.search("a network|exposed communication", out)


def test_calls_whose_times_no_gpu_shows_give_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Gloo sends from the host, beside a GPU."""
    job = TraceWriter(rank=0, world_size=2)
    job.step(1, 0, 100)
    job.kernel("gemm", 1, 10, 80)
    job.collective("allreduce", 8, 8, 20, None)
    job.write(tmp_path)
    reason = "calls between ranks have no times in these steps"
    found = document(capsys, tmp_path)["network"]
    assert found["verdict"] == [f"communication-bound: not known, because {reason}"]
    assert found["gains"] == []


def test_a_page_that_cannot_be_written_leaves_no_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = messages(capsys, FSDP8, "--html", tmp_path, "--json", tmp_path / "m.json")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "a file that can be written" in err


def test_ranks_without_their_gpu_work_are_left_out_and_give_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for rank in range(3):
        job = TraceWriter(rank=rank, world_size=3)
        for step in range(1 if rank == 2 else 3):
            start = 1000 * step
            job.step(step, start, 1000)
            job.add("cpu_op", "aten::mm", start + 5, 20, 1)
            call_start = None if rank == 2 else start + 500
            job.collective("allreduce", 512, 512, start + 30, call_start, 100 + rank)
        job.add("cpu_op", "nccl:all_reduce", 60, 5, 1)
        job.write(tmp_path)
    reason = "rank 2: it has calls of NCCL and no GPU events"
    found = document(capsys, tmp_path)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert found["rank_steps"] == 6
    assert any(note.startswith(reason) for note in found["notes"])
    _, out, _ = messages(capsys, tmp_path)
    assert out.startswith("# 2 of 3 ranks, 3 steps each")
    found = document(capsys, tmp_path, "--ranks", "2")
    assert found["network"]["verdict"] == [
        f"communication-bound: not known, because no step has times ({reason}: times of the "
        "host do not show where the step went)"
    ]
    assert found["histogram"][0]["calls"] == 1


def test_a_curve_of_messages_of_unknown_size_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = messages(capsys, DATA / "traces" / "dlrm8", "--curve", CURVES)
    assert code == 2
    assert "given for traces with messages of several ranks and known size" in err


def test_without_traces_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = messages(capsys, DATA / "nccl-logs" / "fsdp8")
    assert code == 2
    assert "a folder or file with profiler traces" in err


# The argument of the talk on Frontier: GPT-J gains by the plugin, BigBird does not.


def job(folder: Path, *, compute_us: float, exposed_us: float) -> None:
    """16 ranks whose all-reduces of 16 MiB take exposed_us that no compute hides."""
    for rank in range(16):
        trace = TraceWriter(rank=rank, world_size=16)
        trace.step(1, 0, compute_us + exposed_us)
        trace.kernel("gemm", 5, 10, compute_us)
        start = 10 + compute_us - 1000
        size = 2**22
        duration = exposed_us + 1000
        trace.collective("allreduce", size, size, 20, start, duration, dtype="Float")
        trace.write(folder)


def test_a_job_of_exposed_transfers_gains_and_one_of_compute_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job(tmp_path / "gpt-j", compute_us=5_000, exposed_us=95_000)
    job(tmp_path / "bigbird", compute_us=98_000, exposed_us=2_000)
    curves = ("--curve", f"{FRONTIER}:2", "--other-curve", f"{FRONTIER}:4")
    gains = {}
    for name, verdict, share in (
        ("gpt-j", "communication-bound", 0.95),
        ("bigbird", "not communication-bound", 0.02),
    ):
        found = document(capsys, tmp_path / name, *curves)
        assert found["network"]["verdict"][1].startswith(verdict)
        step = found["network"]["step_s"]
        assert found["network"]["most_gain_s"] / step == pytest.approx(share, abs=1e-3)
        twice, plugin = (each["most_gain_s"] / step for each in found["network"]["gains"])
        gains[name] = plugin
        assert twice == pytest.approx(min(share, (share + 0.01) / 2), abs=1e-3)
    # By the talk's own tables 16 MiB take 549.5 us instead of 4069.6 us.
    saved = 1 - 549.5 / 4069.6
    assert gains["gpt-j"] == pytest.approx(0.96 * saved, abs=2e-3)
    assert gains["bigbird"] == pytest.approx(0.02, abs=1e-3)
