"""`check` passes against its own machine and fails against a doctored, faster one."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from .process import stepmark

# Launches beside other tests differ too much to tell.
pytestmark = [pytest.mark.ranks, pytest.mark.alone]

SIZES = (2**17, 2**18, 2**19)
# How much longer each took in the doctored baseline: far more than a busy machine explains.
FACTORS = (1.0, 1e-6, 1e6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three cases."""
    made = tmp_path_factory.mktemp("check")
    sizes = ",".join(map(str, SIZES))
    shape = ["op", "copy", "--num-bytes", sizes, "--device", "cpu", "--budget", "10s"]
    assert stepmark(*shape, cwd=made).returncode == 0
    return made


def check(folder: Path, run: Path, launches: int) -> "subprocess.CompletedProcess[str]":
    words = ["check", "--baseline", str(run), "--launches", str(launches), "--budget", "25s"]
    # Other processes share this machine: only a factor counts here.
    return stepmark(*words, "--floor", "1", "--json", "-", cwd=folder)


def doctored(run: Path, target: Path) -> Path:
    """The same run, in which each case took its factor as long."""
    shutil.copytree(run, target)
    lines = []
    for line in (run / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        factor = FACTORS[SIZES.index(record["case"]["op"]["num_bytes"])]
        samples = record["samples"]
        samples["seconds"] = [[s * factor for s in rank] for rank in samples["seconds"]]
        if samples.get("file"):  # of many samples the line has the largest of each
            np.save(target / samples["file"], np.load(target / samples["file"]) * factor)
        lines.append(json.dumps(record) + "\n")
    (target / "records.jsonl").write_text("".join(lines))
    return target


def test_the_same_machine_passes(folder: Path) -> None:
    run = sorted((folder / "runs").iterdir())[0]
    done = check(folder, run, 5)
    slow = [row["too_slow"] for row in json.loads(done.stdout)]
    assert True not in slow
    assert len(slow) == 3
    # On a machine that others use, launches may differ too much to tell.
    assert done.returncode == (3 if None in slow else 0), done.stderr
    assert "0 of 3 cases slower" in done.stderr


def test_a_faster_baseline_fails_and_a_slower_one_passes(folder: Path, tmp_path: Path) -> None:
    run = sorted((folder / "runs").iterdir())[0]
    done = check(folder, doctored(run, tmp_path / "doctored"), 4)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    assert [row["too_slow"] for row in rows].count(True) == 1
    (slow,) = (row for row in rows if row["too_slow"])
    assert slow["verdict"] == "slower"
    assert slow["speed"] < 0.1
    assert max(row["speed"] for row in rows) > 10
    assert "1 of 3 cases slower" in done.stderr


def test_a_baseline_of_one_launch_is_refused_and_says_how_to_make_one(folder: Path) -> None:
    (run,) = (path for path in (folder / "runs").iterdir() if path.name != "checks")
    done = stepmark("check", "--baseline", str(run), cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "it has 1 launch" in line
    assert re.search(r"`stepmark op copy --num-bytes .* --launches [2-9]`\.$", line)


def test_a_check_is_one_run_that_resume_continues_and_decides(folder: Path) -> None:
    (run,) = (path for path in (folder / "runs").iterdir() if path.name != "checks")
    before = set((folder / "runs" / "checks").glob("*"))
    done = check(folder, run, 2)
    (path,) = set((folder / "runs" / "checks").glob("*")) - before
    records = (path / "records.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(record)["launch"] for record in records] == [1, 1, 1, 2, 2, 2]
    assert json.loads((path / "run.json").read_text())["settings"]["check_of"] == run.name
    (path / "records.jsonl").write_text("".join(records[:4]))
    again = stepmark("resume", str(path), cwd=folder)
    assert again.returncode in (0, 3), again.stderr
    assert len((path / "records.jsonl").read_text().splitlines()) == 6
    assert len(json.loads(again.stdout)) == len(json.loads(done.stdout)) == 3
    assert f"of 3 cases slower than {run.name}" in again.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("comm", "all_reduce", "--nproc", "2", "-b", "64K", "-e", "64K"),
        ("train", "gpt2-125m", "--scale", "tiny", "--steps", "5"),
    ],
)
def test_collectives_and_training_are_checked(words: tuple[str, ...], tmp_path: Path) -> None:
    """Against a baseline that was faster by far more than launches beside other work differ."""
    assert stepmark(*words, "--device", "cpu", cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "records.jsonl").read_text())
    samples = record["samples"]
    samples["seconds"] = [[s * 1e-12 for s in rank] for rank in samples["seconds"]]
    (run / "records.jsonl").write_text(json.dumps(record) + "\n")
    done = check(tmp_path, run, 3)
    assert done.returncode == 1, done.stderr
    assert "1 of 1 cases slower" in done.stderr
    (again,) = (tmp_path / "runs" / "checks").iterdir()
    lines = (again / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == [record["case"]] * 3
