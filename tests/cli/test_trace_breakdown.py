"""stepmark trace breakdown of a run, and under a launcher."""

import json
from pathlib import Path

import pytest

from .comm_process import Running
from .process import ROOT, stepmark

pytestmark = pytest.mark.ranks

FSDP8 = ROOT / "tests" / "data" / "traces" / "fsdp8"


def test_a_profiled_run_is_broken_down(tmp_path: Path) -> None:
    train = "train gpt2-125m --device cpu --scale tiny --strategy fsdp --nproc 2 --steps 5"
    profile = ("--profile", "--profile-ranks", "0,1", "--out", "runs/", "--json", "train.json")
    done = stepmark(*train.split(), *profile, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = stepmark("trace", "breakdown", "latest", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [(row["rank"], row["step"]) for row in steps] == [
        (rank, step) for rank in (0, 1) for step in (1, 2, 3)
    ]
    (rows,) = json.loads((tmp_path / "train.json").read_text()).values()
    measured = 1e9 * next(row["time_s"] for row in rows if row["rank"] is None)
    for row in steps:
        parts = row["compute_ns"] + row["exposed_comm_ns"] + row["idle_ns"]
        assert parts == row["window_ns"]
        assert row["compute_ns"] > 0 < row["comm_ns"]
    # The profiler slows a step down, by a few times where its operators are tiny.
    windows = [row["window_ns"] for row in steps]
    assert max(windows) > 0.5 * measured  # which a busy machine may have slowed
    assert min(windows) < 20 * measured


def test_processes_of_a_launcher_share_the_traces(tmp_path: Path) -> None:
    words = ("trace", "breakdown", str(FSDP8), "--json", "out.json")
    running = Running(*words, cwd=tmp_path, torchrun=2, is_forking=True)
    assert running.end() == 0, running.err()
    stepmark("trace", "breakdown", str(FSDP8), "--json", "alone.json", cwd=tmp_path)
    together, alone = (
        json.loads((tmp_path / name).read_text()) for name in ("out.json", "alone.json")
    )
    assert together == alone
    assert len(alone["steps"]) == 16
