"""--compute-from: times of computation from a rule, a data sheet, an AIOB profile and a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases.record import Measured
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.device import load_devices
from stepmark.model.ops import Attention, Gemm, Phase
from stepmark.step import native
from stepmark.step.workload import ComputeOp, Workload
from stepmark.store.reader import read_records
from stepmark.workloads.formats import aiob

from .process import ROOT
from .workload_program import AICB, Program, program, refused

LLAMA = "--model llama-3.1-70b --framework fsdp --world-size 8"
GPT = (
    "-m 7 --world_size 4096 --tp_num 4 --global_batch 8192 --micro_batch 1 --seq_length 4096 "
    "--swiglu"
)
PROFILE = AICB / "aiob_example.txt"
RUN = ROOT / "results" / "h200-op-all-llama-3.1-70b"


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


def computed(workload: Workload) -> list[ComputeOp]:
    """What is not only waiting."""
    return [one for one in workload.tally(0) if isinstance(one, ComputeOp) and not one.is_wait]


def test_without_it_there_are_no_times(run: Program) -> None:
    workload = run.made(LLAMA).workload
    assert all(one.time_s is None for one in computed(workload))
    assert "time each" not in run(f"generate {LLAMA}").text


def test_a_fixed_time(run: Program) -> None:
    workload = run.made(f"{LLAMA} --compute-from fixed:3us").workload
    assert {one.time_s for one in computed(workload)} == {3e-6}


def test_a_data_sheet(run: Program) -> None:
    workload = run.made(f"{LLAMA} --compute-from roofline:h100-sxm").workload
    peak = next(
        value
        for key, value in load_devices()["h100-sxm"].peak_flops_per_s.items()
        if key == "bf16"
    )
    down = [one for one in computed(workload) if one.module == "mlp.down"]
    assert {one.time_s for one in down} == {2 * 8192 * 8192 * 28672 / peak}
    assert "roofline" in run(f"generate {LLAMA} --compute-from roofline:h100-sxm").text


def test_a_runs_medians_then_a_data_sheet(run: Program) -> None:
    measured = {
        record.operator.op: summarize(slowest_per_sample(record.samples.seconds)).median
        for record in read_records(RUN)
        if isinstance(record, Measured)
    }
    workload = run.made(f"{LLAMA} --compute-from {RUN},roofline:h200-sxm").workload
    for one in computed(workload):
        assert one.time_s
        if isinstance(one.op, (Gemm, Attention)) and one.op in measured:
            assert one.time_s <= measured[one.op]  # of several backends the fastest
    (down,) = (
        one for one in computed(workload) if one.module == "mlp.down" and one.phase is Phase.FWD
    )
    assert down.time_s == min(
        summarize(slowest_per_sample(record.samples.seconds)).median
        for record in read_records(RUN)
        if isinstance(record, Measured) and record.operator.op == down.op
    )


def test_what_a_run_has_not_measured_is_named(run: Program) -> None:
    done = run(f"generate {LLAMA} --compute-from {RUN} -o w.json")
    refused(done, "h200-op-all-llama-3.1-70b", "without a time are", "(embedding)", "more")
    assert not Path("w.json").exists()


def test_an_aiob_profile_for_simai(run: Program) -> None:
    """The profile's mean of atten_qkv, in every pass; what it has not is filled and named."""
    refused(run(f"generate {GPT} --compute-from {PROFILE} -o -"), "without a time are", "add")
    done = run.made(f"{GPT} --aiob_enable --comp_filepath {PROFILE}")
    assert "does not time: attention.residual" in done.err
    assert "aiob_enable" not in done.err
    ops = computed(done.workload)
    assert {one.time_s for one in ops if one.module == "attention.qkv"} == {889e-6}
    named = done.err.partition("does not time: ")[2].splitlines()[0].split(", ")
    assert {one.module for one in ops if one.time_s == 1e-9} == set(named)
    simai = run(f"generate {GPT} --comp_filepath {PROFILE} --format simai -o -")
    rows = [line.split("\t") for line in simai.text.splitlines()[2:]]
    assert {row[2] for row in rows if row[0] == "embedding_layer"} == {"799000"}


def test_times_as_an_aiob_profile(run: Program) -> None:
    """What was filled in from a profile comes back; and what is written can be filled in."""
    Path("w.json").write_bytes(run.made(f"{GPT} --comp_filepath {PROFILE}").out)
    written = run("convert w.json --to aiob -o back.txt")
    assert "aiob cannot carry: mlp.residual: " in written.err
    before, after = aiob.read(PROFILE).parts, aiob.read(Path("back.txt")).parts
    assert len(after) > 8
    for name, part in after.items():
        assert part.avg_s == pytest.approx(before[name].avg_s)
    again = run.made(f"{GPT} --comp_filepath back.txt").workload
    first = native.decode(Path("w.json").read_bytes())
    assert [one.time_s for one in computed(again)] == pytest.approx(
        [one.time_s for one in computed(first)]
    )
    Path("none.json").write_bytes(run.made(GPT).out)
    refused(run("convert none.json --to aiob -o -"), "compute-from")


def test_convert_fills_in_times_too(run: Program) -> None:
    Path("w.json").write_bytes(run.made(LLAMA).out)
    done = run("convert w.json --compute-from fixed:2ns -o -")
    assert {one.time_s for one in computed(done.workload)} == {2e-9}
    shown = json.loads(run(f"generate {LLAMA} --compute-from fixed:2ns --json -").out)
    assert {row["time_s"] for row in shown["computation"]} == {2e-9}
    calls = sum(row["calls"] for row in shown["computation"])
    assert shown["stages"][0]["time_s"] == pytest.approx(2e-9 * calls)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("fixed:0", "above 0"),
        ("fixed:soon", "fixed:1ns"),
        ("roofline:abacus", "h100-sxm"),
        ("none", "latest"),
        (",", "roofline:DEVICE"),
        (str(ROOT / "README.md"), "train_iter:N"),
        (str(ROOT / "results" / "h200-x4-comm-graph-1"), "without a time are"),
    ],
)
def test_bad_sources(run: Program, source: str, word: str) -> None:
    refused(run(f"generate {LLAMA} -o w.json --compute-from", source), word)
    assert not Path("w.json").exists()
