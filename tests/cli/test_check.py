"""`check` passes against its own machine and fails against a doctored, faster one."""

import json
import subprocess
from pathlib import Path

import pytest

from .process import stepmark

SHAPE = ["op", "copy", "--num-bytes", "67108864", "--device", "cpu", "--budget", "1s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("check")
    assert stepmark(*SHAPE, cwd=made).returncode == 0
    return made


def check(folder: Path, run: Path) -> "subprocess.CompletedProcess[str]":
    arguments = ["check", "--baseline", str(run), "--launches", "4", "--budget", "4s"]
    # Other processes share this machine: only a factor counts here.
    return stepmark(*arguments, "--floor", "1", "--json", "-", cwd=folder)


def doctored(run: Path, target: Path, factor: float) -> Path:
    """The same run, `factor` times as long."""
    target.mkdir()
    (target / "run.json").write_bytes((run / "run.json").read_bytes())
    record = json.loads((run / "records.jsonl").read_text())
    samples = record["samples"]
    samples["seconds"] = [[s * factor for s in rank] for rank in samples["seconds"]]
    (target / "records.jsonl").write_text(json.dumps(record) + "\n")
    return target


def test_the_same_machine_passes(folder: Path) -> None:
    run = sorted((folder / "runs").iterdir())[0]
    done = check(folder, run)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert not row["too_slow"]
    assert "0 of 1 cases slower" in done.stderr


def test_a_faster_baseline_fails(folder: Path, tmp_path: Path) -> None:
    run = sorted((folder / "runs").iterdir())[0]
    done = check(folder, doctored(run, tmp_path / "fast", 0.01))
    assert done.returncode == 1, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["verdict"], row["too_slow"]) == ("slower", True)
    assert row["speed"] < 0.1


def test_a_slower_baseline_passes(folder: Path, tmp_path: Path) -> None:
    run = sorted((folder / "runs").iterdir())[0]
    done = check(folder, doctored(run, tmp_path / "slow", 100))
    assert done.returncode == 0, done.stderr
