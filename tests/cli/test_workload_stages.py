"""A folder with a file per pipeline stage, and files that have one of several stages."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepmark.step import native
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.workloads.formats import aicb
from stepmark.workloads.formats.ranks import disagreements

from .workload_program import Program, program, refused

JOBS = {
    "plain": "--model llama-3.1-8b --scale tiny --num-layers 4 --world-size 8 --tp 2 --pp 2",
    "tied": "--model gpt2-small --scale tiny --num-layers 4 --world-size 4 --pp 4",
    "interleaved": "--model llama-3.1-8b --scale tiny --num-layers 8 --pp 4 --vpp 2",
}


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


def made(run: Program, job: str, to: str) -> Workload:
    assert run(f"generate {JOBS[job]} --gbs 16 -o w.json").code == 0
    assert run(f"convert w.json --to {to} -o all/").code == 0
    return native.read(Path("w.json"))


def sums(workload: Workload, stage: int) -> tuple[int, int]:
    """Return FLOPs of products, and bytes of transfers."""
    flops = num_bytes = 0
    for op, times in workload.tally(stage).items():
        if isinstance(op, ComputeOp):
            flops += (
                times * (getattr(op.op, "flops", None) or 0) * (type(op.op).__name__ == "Gemm")
            )
        elif op.peer is not None:
            num_bytes += times * op.message_bytes(workload.groups[op.group])
    return flops, num_bytes


@pytest.mark.parametrize("job", JOBS)
def test_stages_of_a_folder_are_one_pipeline(run: Program, job: str) -> None:
    workload = made(run, job, "aicb")
    again = aicb.read(Path("all"))
    stages = range(len(workload.stages))
    assert (len(again.stages), again.world_size) == (len(stages), workload.world_size)
    assert again.num_microbatches == workload.num_microbatches
    assert [sums(again, stage) for stage in stages] == [sums(workload, n) for n in stages]
    assert disagreements(again) == ()
    texts = [Path(f"all/stage{stage}.csv").read_text() for stage in stages]
    assert "".join(aicb.write(again)) == "".join(texts)
    # Its stages wait for each other as those of the workload do, so that it can be predicted.
    done = run("all --device h100-sxm --stages", verb="predict")
    assert (done.code, "waiting for other ranks" in done.text) == (0, True), done.err


def test_the_first_and_the_last_stage_share_an_embedding(run: Program) -> None:
    workload = made(run, "tied", "aicb")
    groups = [
        {
            workload.groups[op.group].members(rank)
            for rank in (0, 3)
            for op in workload.expand(rank)
            if isinstance(op, CommOp) and op.group in ("embd", "embedding")
        }
        for workload in (workload, aicb.read(Path("all")))
    ]
    assert groups[0] == groups[1] == {(0, 3)}


def test_an_incomplete_folder_says_what_is_missing(run: Program) -> None:
    made(run, "tied", "aicb")
    shutil.copytree("all", "broken")
    with Path("broken/stage2.csv").open("a") as file:
        file.write("nonsense\n")
    lines = Path("broken/stage2.csv").read_text().count("\n")
    refused(run("show broken"), f"broken: stage2.csv, line {lines}", "12 columns")
    Path("all/stage3.csv").unlink()
    refused(run("show all"), "stage2.csv", "stages 0 to 3")
    Path("all/stage1.csv").unlink()
    refused(run("show all"), "all", "stage1.csv is missing")


def test_one_text_of_simai_is_asked_for(run: Program) -> None:
    made(run, "plain", "simai")
    for line in ("show all", "convert all -o x.json"):
        refused(run(line), "workload all is invalid", "all/stage0.txt")
    Path("all/stage1.txt").unlink()
    assert run("show all").code == 0


@pytest.mark.parametrize("to", ["aicb", "simai"])
def test_only_what_a_file_has_is_shown(run: Program, to: str) -> None:
    """AICB does not number layers, and SimAI not without the first of its rows."""
    workload = made(run, "plain", to)
    suffix = {"aicb": "csv", "simai": "txt"}[to]
    for stage in (0, 1):
        text = run(f"show all/stage{stage}.{suffix} --json s.json").text
        has_layers = to == "simai" and stage == 0
        layers = json.loads(Path("s.json").read_text())["stages"][0]["layers"]
        assert layers == (len(workload.stages[0].layers) if has_layers else None)
        assert ("Layers (each of them" in text) is has_layers
        assert "one of 2 stages, 8 micro-batches per step" in text


def test_a_number_out_of_range_is_one_sentence(run: Program) -> None:
    made(run, "plain", "aicb")
    for flag, last in (("stage", 1), ("rank", 7)):
        for number in (-1, last + 1):
            for line in ("convert w.json -o -", "convert all --to aicb -o -"):
                refused(run(f"{line} --{flag} {number}"), f"--{flag} {number}", f"0 to {last}")
    refused(run("show w.json --stage -1"), "--stage -1", "from 0 to 1")
    refused(run("show all/stage0.csv --stage 1"), "--stage 1", "0, the only stage")


def test_a_file_of_all_stages_is_written_whole(run: Program) -> None:
    made(run, "plain", "aicb")
    done = run("convert all --to aicb --stage 1 -o one.csv")
    assert "--stage: no effect: aicb holds all stages" in done.err
    assert "alone" not in done.err
    assert "is written" not in done.err
    assert len(aicb.read(Path("one.csv")).stages) == 2
