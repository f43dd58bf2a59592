"""Ranks that die, hang, are interrupted or deliver wrong data: what is kept and said."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from .comm_process import Running, outcomes
from .process import stepmark_process

pytestmark = pytest.mark.ranks

SWEEP = ["comm", "all_reduce", "-b", "1K", "-f", "2", "--device", "cpu"]
TIMEOUT_S = 3.0
# A case may take its second of samples beside.
DEADLINE_S = TIMEOUT_S + 1.0


def test_under_torchrun_a_death_and_a_hang_end_it_and_resume_goes_on(tmp_path: Path) -> None:
    words = [*SWEEP, "-e", "8K", "--timeout", f"{TIMEOUT_S:g}s"]
    running = Running(*words, cwd=tmp_path, torchrun=2, is_forking=True)
    running.hurt(1, signal.SIGKILL, after=1)
    assert running.end(10) != 0
    assert outcomes(running.records()) == ["measured", "lost rank"]
    assert running.records()[1]["ranks"] == [1]
    hint = f"go on with: stepmark resume runs/{running.run().name} under the same launcher"
    assert running.err().count(hint) == 1
    assert "\n        1024 " in running.out()

    words += ["--resume", running.run().name]
    running = Running(*words, cwd=tmp_path, torchrun=2, is_forking=True)
    running.hurt(1, signal.SIGSTOP, after=3)
    stopped = running.pids()[1]
    running.wait_for(4)
    # The watchdog has ended rank 0. torchrun gives the other one 30 s: cut that short.
    os.kill(stopped, signal.SIGKILL)
    assert running.end(10) != 0
    hung = running.records()[3]
    assert (hung["cause"], hung["ranks"]) == ("timeout", [1])
    assert "a rank hangs at position 2; its threads:" in running.err()
    assert "exitcode  : 3" in running.err()

    # A user's SIGTERM is no lost rank. The case that hung is tried again.
    running = Running(*words, cwd=tmp_path, torchrun=2, is_forking=True)
    running.wait_for(5)
    running.process.terminate()
    assert running.end(10) != 0
    assert set(outcomes(running.records()[4:])) == {"measured"}
    assert running.records()[4]["case"] == hung["case"]
    assert running.err().count("terminated; finished cases are kept") == 1


@pytest.mark.slow
def test_launches_under_torchrun_share_their_process(tmp_path: Path) -> None:
    words = ["comm", "all_reduce", "-b", "1K", "-e", "1K", "-n", "20", "--device", "cpu"]
    running = Running(*words, "--launches", "2", cwd=tmp_path, torchrun=2, is_forking=True)
    assert running.end() == 0, running.err()
    levels = [record["levels"] for record in running.records()]
    assert [level["communicator"] for level in levels] == [1, 2]
    assert len({level["process"] for level in levels}) == 1

    # They show nothing of how processes differ, so a check refuses them as a baseline.
    done = stepmark_process("check", "--baseline", str(running.run()), cwd=tmp_path)
    assert done.returncode == 2
    assert "it has 1 launch, and" in done.stderr


@pytest.mark.slow
def test_bad_input_under_torchrun_is_said_once(tmp_path: Path) -> None:
    running = Running(
        "comm",
        "all_reduce",
        "--device",
        "cpu",
        "-f",
        "inf",
        cwd=tmp_path,
        torchrun=2,
        is_forking=True,
    )
    assert running.end() != 0
    assert running.err().count("-f inf is invalid") == 1
    assert running.err().count("exitcode  : 2") > 0
    assert not (tmp_path / "runs").exists()


def test_wrong_data_is_counted_and_fails(tmp_path: Path) -> None:
    words = ["comm", "all_reduce", "all_gather", "-b", "1K", "-e", "1K", "-n", "5"]
    words += ["--placement", "in", "--nproc", "2"]
    running = Running(*words, cwd=tmp_path, hook="tests.cli.corrupting", is_forking=True)
    assert running.end() == 1
    rows = [line for line in running.out().splitlines() if line and line[0] != "#"]
    assert [int(row.split()[-1]) for row in rows] == [1, 1]
    assert running.out().count("# Out of bounds values : 1 FAILED") == 2
    assert running.err().count("WRONG") == 2


# Python imports it in every process: each second the clock jumps by two hours.
JUMPING_CLOCK = """
import time
real, begin_s = time.time, time.monotonic()
time.time = lambda: real() + (3600 if int(time.monotonic() - begin_s) % 2 else -3600)
"""


@pytest.mark.slow
def test_a_clock_that_jumps_changes_no_limit_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = (*SWEEP, "-e", "4K", "--nproc", "2", "--timeout", "20s")
    done = stepmark_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    assert outcomes(records) == ["measured"] * 3
    assert all(0 < record["samples"]["wall_s"] < 20 for record in records)
    now = time.time()
    assert all(abs(record["started_at"] - now) > 1800 for record in records), "it did jump"
