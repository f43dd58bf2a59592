"""stepmark trace kernels and compare, and the profile of stepmark train."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.traces.trace_scripts import Script

from stepmark.cases.train_case import TrainCase
from stepmark.cli.main import status
from stepmark.model.ops import Gemm
from stepmark.step.workload import ComputeOp
from stepmark.store.reader import read_records
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.kineto.reader import read_trace
from stepmark.workloads.rules.pytorch.case import of_case

from .process import stepmark

pytestmark = pytest.mark.ranks

DATA = Path(__file__).parents[1] / "data" / "traces"
PRODUCTS = ("aten::mm", "aten::addmm")


def read(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert status(["trace", *words, "--jobs", "1", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_product_of_a_step_has_its_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models over two ranks: as many calls by role, layer and phase as in the workload."""
    words = ["--strategy", "fsdp", "--nproc", "2", "--steps", "3", "--out", "runs"]
    words += ["--device", "cpu", "--scale", "tiny", "--profile", "--profile-ranks", "0,1"]
    done = stepmark("train", "gpt2-125m,llama-3.1-8b", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profiled step ") == 2
    assert "ms, unprofiled " in done.stdout
    assert "attention.qkv" in done.stdout
    assert "note:" not in done.stdout.partition("profiled step")[2]
    (run,) = (tmp_path / "runs").iterdir()
    for record in read_records(run):
        assert isinstance(record.case, TrainCase)
        expected: Counter[tuple[object, ...]] = Counter()
        for op in of_case(record.case).expand():
            if isinstance(op, ComputeOp) and isinstance(op.op, Gemm):
                expected[op.module, op.layer, op.phase] += 3
        files = sorted((run / "traces").glob(f"*{record.case.case_id[:16]}*"))
        assert [file.suffix for file in files] == [".gz", ".gz"]
        for rank, file in enumerate(files):
            trace = read_trace(file)
            assert (trace.info.rank, trace.info.world_size) == (rank, 2)
            table = measured_ops(trace)
            assert len(table.steps) == 3
            ops = list(table.ops)
            calls: Counter[tuple[object, ...]] = Counter()
            for each in ops:
                if each.key.op in PRODUCTS:
                    calls[each.key.role, each.key.layer, each.key.phase] += each.calls
            assert calls == expected
            total = sum(each.time_ns for each in ops)
            known = sum(each.time_ns for each in ops if each.key.role)
            assert known > 0.95 * total
    assert not list((run / "traces").glob("*.txt"))
    name = f"{run}/traces/*{record.case.case_id[:16]}*"
    report = read(capsys, "kernels", name, "--by", "layer", "--steps", "1-2")
    assert report["num_steps"] == 4
    assert {row["layer"] for row in report["rows"]} >= {"0", "1", "outside blocks"}


def test_kernels_of_eight_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(DATA / "fsdp8")
    totals = set()
    for by in ("role", "layer", "module", "op", "group", "name"):
        report = read(capsys, "kernels", f"{folder}/rank1.json.gz", "--by", by)
        totals.add(sum(row["total_ns"] for row in report["rows"]))
        assert sum(row["share_pct"] for row in report["rows"]) == pytest.approx(100)
        assert report["num_steps"] == 2
    assert len(totals) == 1
    assert read(capsys, "kernels", folder)["num_steps"] == 16
    csv = tmp_path / "kernels.csv"
    assert status(["trace", "kernels", folder, "--ranks", "1", "--csv", str(csv)]) == 0
    assert "unattributed" in csv.read_text()
    text = capsys.readouterr().out
    assert "kernels and copies: " in text
    assert "blocks and root are FSDP's gathers" in text
    assert status(["trace", "kernels", str(DATA / "cpu-only"), "--by", "op"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if "mean us" in line)
    assert "operations" in header
    assert "kernels" not in header


def test_a_trace_beside_another(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(DATA / "fsdp8" / f"rank{rank}.json.gz") for rank in (1, 2)]
    report = read(capsys, "compare", *files, "--by", "name")
    differences = [row["b_ns"] - row["a_ns"] for row in report["rows"]]
    assert report["total"]["difference_ns"] == pytest.approx(sum(differences), abs=0.1)
    assert [row["a_total_ns"] for row in report["rows"]] != []
    of_one_job = [*report["rows"], *report["step"], report["total"]]
    assert {row["verdict"] for row in of_one_job} <= {"", "cannot tell"}
    assert any(note.endswith(f"breakdown {DATA / 'fsdp8'}") for note in report["notes"])
    same = read(capsys, "compare", files[0], files[0])
    assert any("both sides have the same traces" in note for note in same["notes"])
    assert {row["difference_ns"] for row in same["rows"]} == {0.0}
    assert {row["verdict"] for row in same["step"]} >= {"cannot tell"}
    assert "two states" not in str(same)
    assert {row["reason"] for row in same["rows"]} == {"one launch"}
    assert status(["trace", "compare", files[0]]) == 2
    assert "two" in capsys.readouterr().err
    assert status(["trace", "kernels", files[0], "--steps", "99"]) == 2
    assert "steps" in capsys.readouterr().err
    unmarked = str(DATA / "b200-vllm")
    assert status(["trace", "kernels", unmarked, "--steps", "1"]) == 2
    assert "ProfilerStep" in capsys.readouterr().err


def test_ranks_whose_gpu_work_is_missing_have_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launches without GPU events; and a rank that ran on its host beside one with a GPU."""
    for rank in range(3):
        script = Script(rank, 3)
        script.step(0, 50)
        script.op("aten::mm", 1, 40)
        if rank == 0:
            script.kernel("gemm", 2, (10, 20))
        elif rank == 1:
            script.call("cudaLaunchKernel", 2, 3)
        script.write(tmp_path)
    report = read(capsys, "kernels", str(tmp_path), "--by", "op")
    assert (report["ranks"], report["num_steps"]) == ([0], 1)
    assert [(row["op"], row["total_ns"]) for row in report["rows"]] == [("aten::mm", 10_000)]
    notes = "\n".join(report["notes"])
    assert "rank 1: it has launches and no GPU events" in notes
    assert "rank 2: no GPU events, as other ranks have" in notes
    assert status(["trace", "kernels", str(tmp_path / "rank1.json"), "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("no times of any step\nnote: ")


def test_a_comparison_begins_with_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are those of breakdown; the host's lateness is idle time of the GPU."""
    files = []
    for name, late in (("a", 0), ("b", 30)):
        script = Script()
        for start in (0, 100, 203 + late):
            number = 1 + sum(each["cat"] == "user_annotation" for each in script.events)
            script.add(
                "user_annotation", f"ProfilerStep#{number}", (9, 9), (start, start + 40 + late)
            )
            script.op("aten::mm", start + 1, start + 39 + late)
            script.kernel("gemm", start + 2 + late, (start + 10 + late, start + 38 + late))
        (tmp_path / name).mkdir()
        files.append(str(script.write(tmp_path / name)))
    report = read(capsys, "compare", *files)
    parts = {row["part"].strip(): row for row in report["step"]}
    assert list(parts)[:4] == ["step", "compute", "idle", "host-bound"]
    assert list(parts)[4:] == ["during the launch call", "kernel gaps"]
    assert parts["compute"]["difference_ns"] == 0
    for side, file in zip("ab", files, strict=True):
        steps = read(capsys, "breakdown", file)["steps"]
        for name, column in (("step", "window_ns"), ("idle", "idle_ns")):
            assert parts[name][f"{side}_total_ns"] == sum(row[column] for row in steps) > 0
    assert parts["idle"]["difference_ns"] == parts["step"]["difference_ns"] > 0
    assert status(["trace", "compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step: B / A ")
    assert lines[0].endswith("cannot tell (one launch)")
    assert lines[3].startswith("A ms/step")
    assert lines[4].endswith(" step")


def test_launches_of_a_side_give_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two launches a side, joined by commas; a launch given twice is no second one."""

    def launch(name: str, start: float, took: float) -> str:
        script = Script(0, 1)
        script.step(start, start + 1000)
        script.op("aten::mm", start + 10, start + 10 + took)
        (tmp_path / name).mkdir()
        return str(script.write(tmp_path / name))

    a = [launch(f"a{n}", 1e6 * n, 400 + n) for n in range(5)]
    b = [launch(f"b{n}", 1e6 * (n + 10), 100 + n) for n in range(5)]
    report = read(capsys, "compare", ",".join(a), ",".join(b))
    assert (report["a_launches"], report["a_steps"], report["b_steps"]) == (5, 5, 5)
    (row,) = report["rows"]
    assert (row["verdict"], row["reason"]) == ("faster", "5 and 5 launches")
    assert row["a_ns"] == pytest.approx(402_000)
    patterns = read(capsys, "compare", str(tmp_path / "a?"), str(tmp_path / "b[0-4]"))
    assert patterns["rows"] == report["rows"]
    assert status(["trace", "compare", f"{a[0]},{a[0]}", b[0]]) == 2
    assert "the two ran at the same time" in capsys.readouterr().err


def test_traces_that_do_not_compare_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, host = str(DATA / "mi250"), str(DATA / "cpu-only")
    for words in ((gpu, host), (host, gpu)):
        assert status(["trace", "compare", *words]) == 2
        error = capsys.readouterr().err
        assert f"trace {host} is invalid" in error
        assert "host and GPU times do not compare" in error
    files = (str(DATA / "fsdp8" / "rank0.json.gz"), str(DATA / "a100-nccl"))
    notes = " ".join(read(capsys, "compare", *files)["notes"])
    assert "the sides differ in their number of ranks: A 8, B 2" in notes
    assert "their GPU: A NVIDIA H200, B NVIDIA A100-PG509-200" in notes
    assert status(["trace", "compare", gpu, str(DATA / "mtia")]) == 2
    assert "events of its device are not read" in capsys.readouterr().err
