"""Ranks that die, hang, are interrupted or deliver wrong data: what is kept and said."""

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

from .comm_process import Running, outcomes

SWEEP = ["comm", "all_reduce", "-b", "1K", "-f", "2", "--device", "cpu"]
TIMEOUT_S = 3.0
# A case may take its second of samples beside.
DEADLINE_S = TIMEOUT_S + 1.0


def test_a_death_of_each_rank_and_a_hang_cost_one_case_each(tmp_path: Path) -> None:
    words = [*SWEEP, "-e", "64K", "--nproc", "2", "--timeout", f"{TIMEOUT_S:g}s"]
    running = Running(*words, cwd=tmp_path)
    took = []
    for after, rank, number in (
        (1, 1, signal.SIGKILL),
        (3, 0, signal.SIGKILL),
        (5, 1, signal.SIGSTOP),
    ):
        hurt_s = running.hurt(rank, number, after=after)
        told_s = running.wait_for(after + 1)
        next_s = running.wait_for(after + 2)
        took.append((told_s - hurt_s, next_s - hurt_s))
    assert running.end() == 3, running.err()
    print([f"told {told:.1f} s, next case {after:.1f} s later" for told, after in took])  # noqa: T201
    records = running.records()
    lost, hung = "lost rank", "timeout"
    assert outcomes(records) == [
        *("measured", lost, "measured", lost, "measured", hung, "measured")
    ]
    assert len({record["case"]["count"] for record in records}) == 7, "each case once"
    killed, first, stopped = (records[i] for i in (1, 3, 5))
    assert killed["ranks"] == [1]
    assert "was killed by signal 9 (SIGKILL)" in killed["message"]
    assert first["ranks"] == [0]
    assert stopped["ranks"] == [1]
    assert stopped["message"].endswith("waited for: rank 1")
    assert took[2][0] < DEADLINE_S + 5
    out, err = running.out(), running.err()
    rows = [line for line in out.splitlines() if line and not line.startswith("#")]
    assert [int(line.split()[0]) for line in rows] == [1024, 4096, 16384, 65536]
    assert "# 2048 in-place failed: lost rank: rank 1" in out
    assert "[2/7] all_reduce 2 KiB fp32 sum in place queued: failed (lost rank): rank 1" in err
    assert "Traceback" not in err


def test_interrupts_keep_what_is_finished_and_resume_finishes(tmp_path: Path) -> None:
    words = [*SWEEP, "-e", "8K", "--nproc", "2"]
    running = Running(*words, cwd=tmp_path)
    running.wait_for(1)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.end(10) == 130
    assert running.out().count("\n        1024 ") == 1, "what is finished is shown"
    run = running.run()
    said = re.search(r"go on with: stepmark (.*)", running.err())
    assert said
    assert set(shlex.split(said[1])) == {*words, "--resume", str(run)}

    words += ["--resume", run.name]
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        before = len(running.records())
        running = Running(*words, cwd=tmp_path)
        running.wait_for(before + 1)
        folders = running.watch_folders()
        running.process.send_signal(number)
        assert running.end(10) == expected, running.err()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    running = Running(*words, cwd=tmp_path)
    assert running.end() == 0, running.err()
    assert running.run() == run
    assert outcomes(running.records()) == ["measured"] * 4
    counts = [record["case"]["count"] for record in running.records()]
    assert counts == [256, 512, 1024, 2048]
    assert "Traceback" not in running.err()


def test_under_torchrun_a_death_and_a_hang_end_it_and_resume_goes_on(tmp_path: Path) -> None:
    words = [*SWEEP, "-e", "8K", "--timeout", f"{TIMEOUT_S:g}s"]
    running = Running(*words, cwd=tmp_path, torchrun=2)
    running.hurt(1, signal.SIGKILL, after=1)
    assert running.end(10) != 0
    assert outcomes(running.records()) == ["measured", "lost rank"]
    assert running.records()[1]["ranks"] == [1]
    hint = f"go on with: the same command and --resume runs/{running.run().name}"
    assert running.err().count(hint) == 1
    assert "\n        1024 " in running.out()

    words += ["--resume", running.run().name]
    running = Running(*words, cwd=tmp_path, torchrun=2)
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
    running = Running(*words, cwd=tmp_path, torchrun=2)
    running.wait_for(5)
    running.process.terminate()
    assert running.end(10) != 0
    assert set(outcomes(running.records()[4:])) == {"measured"}
    assert running.records()[4]["case"] == hung["case"]
    assert running.err().count("terminated; finished cases are kept") == 1


def test_wrong_data_is_counted_and_fails(tmp_path: Path) -> None:
    words = ["comm", "all_reduce", "all_gather", "-b", "1K", "-e", "1K", "-n", "5"]
    words += ["--placement", "in"]
    running = Running(*words, cwd=tmp_path, torchrun=2, module="tests.cli.corrupting")
    assert running.end() == 1
    rows = [line for line in running.out().splitlines() if line and line[0] != "#"]
    assert [int(row.split()[-1]) for row in rows] == [1, 1]
    assert running.out().count("# Out of bounds values : 1 FAILED") == 2
    assert running.err().count("WRONG") == 2
