"""Real ranks that hang, stop, die, are interrupted, and go on, against a bench that sleeps."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import fork_server
from tests.measuring.sleeping import plan

from stepmark.cases.record import Failed, Measured, Record
from stepmark.ground.option_groups import ResumeOptions
from stepmark.measuring import heartbeat, local_ranks
from stepmark.measuring import supervise as supervise_module
from stepmark.measuring.measure import measure_quietly, resume
from stepmark.store.reader import read_info, read_records

# Ranks of this process are forked; those of `parent` are what a user has.
pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("forked_ranks")]

ROOT = Path(__file__).parents[2]
HOOK = {"STEPMARK_TEST_HOOK": "tests.measuring.sleeping"}
START = local_ranks._start


@pytest.fixture(autouse=True)
def _hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/src:{ROOT}")
    monkeypatch.setenv("STEPMARK_TEST_HOOK", HOOK["STEPMARK_TEST_HOOK"])
    monkeypatch.setenv("LOG", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors of a death, and a rank that does not end after the last case, wait in vain."""
    monkeypatch.setattr(supervise_module, "_GRACE_S", 0.3)
    monkeypatch.setattr(supervise_module, "_LINGER_S", 1.0)


def go(folder: Path, num_ranks: int, num_cases: int, *faults: str, **more: Any) -> int:
    """Measure with these faults; nothing is left of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", " ".join(faults))
        code, _ = measure_quietly(plan(num_ranks, num_cases, **more), str(folder / "runs"))
    assert left_over(folder) == []
    assert rank_folders(folder) == []
    return code


def run_of(folder: Path) -> Path:
    (file,) = folder.glob("runs/*/plan.jsonl")
    return file.parent


def records(folder: Path) -> list[Record]:
    return read_records(run_of(folder))


def outcomes(folder: Path) -> list[tuple[int, str]]:
    """Position in the plan (of one launch), and what came of it."""
    return [
        (r.comm.message_bytes.bit_length() - 11, r.cause if isinstance(r, Failed) else r.kind)
        for r in records(folder)
    ]


def failures(folder: Path) -> list[Failed]:
    return [record for record in records(folder) if isinstance(record, Failed)]


def left_over(folder: Path) -> list[int]:
    """Processes of this test that still live, stopped ones too."""
    found = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith(fork_server.RANK_NAME)
    ]
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if variables.get("LOG") == str(folder) and "STEPMARK_HEARTBEATS" in variables:
                found += [process.pid] if process.status() != psutil.STATUS_ZOMBIE else []
        except (psutil.Error, OSError):
            continue
    return found


def told(folder: Path, rank: int, word: str) -> list[list[str]]:
    """What a rank said with this word."""
    path = folder / f"rank-{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [line[2:] for line in lines if line[1] == word]


def done(folder: Path, rank: int = 0) -> list[int]:
    return [int(words[0]) for words in told(folder, rank, "done")]


def firsts(folder: Path, rank: int = 0) -> list[int]:
    """The position at which each set of ranks began."""
    return [int(words[1]) for words in told(folder, rank, "up")]


def rank_folders(folder: Path) -> list[Path]:
    return [path for words in told(folder, 0, "up") if (path := Path(words[2])).exists()]


@pytest.mark.usefixtures("_short_waits")
def test_a_hang_a_stop_and_a_death_cost_one_case_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = ["1:1:hang", "1:3:stop", "0:5:deaf", "2:5:deaf", "2:5:child", "2:5:kill"]
    assert go(tmp_path, 3, 7, *faults) == 3
    assert done(tmp_path) == [0, 2, 4, 6], "the rest is measured, nothing twice"
    assert firsts(tmp_path) == [0, 2, 4, 6]
    assert outcomes(tmp_path) == [
        *((0, "measured"), (1, "timeout"), (2, "measured"), (3, "timeout")),
        *((4, "measured"), (5, "lost rank"), (6, "measured")),
    ]
    hang, stop, kill = failures(tmp_path)
    assert [failure.ranks for failure in (hang, stop, kill)] == [(0, 1, 2), (1,), (2,)]
    # Rank by rank: who waits, and in what the other is stuck.
    first, second, third = hang.traceback.split("rank ")[1:]
    assert "in stuck_in_this_function" in second
    assert "in wait_for" in first
    assert "in wait_for" in third
    for rank in range(3):
        flight = run_of(tmp_path) / f"traces/flight-1-rank{rank}.json"
        assert flight.read_text() == f'{{"rank": {rank}}}'
    assert "not done within 3 s: ranks 0-2 in this case for 3." in hang.message
    assert "ranks 0, 2 in this case" in stop.message
    assert "rank 1 stopped (SIGSTOP), last heard of 3." in stop.message
    assert stop.message.endswith("the others wait for rank 1")
    assert "rank 1:\nno stack: stopped (SIGSTOP)" in stop.traceback
    assert {path.name for path in run_of(tmp_path).glob("traces/flight-3-*")} == {
        "flight-3-rank0.json",
        "flight-3-rank2.json",
    }
    assert "was killed by signal 9 (SIGKILL)" in kill.message
    assert all("\n" not in failure.message for failure in (hang, stop, kill))
    assert len(told(tmp_path, 1, "aborted")) == 1, "only where it could run"
    err = capfd.readouterr().err
    assert "[2/7] all_reduce 2 KiB bf16 sum queued-ahead: failed (timeout): not done" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("_short_waits")
def test_three_losses_in_a_row_end_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, 2, 6, "1:0:exit7", "1:1:leave", "0:2:leave") == 3
    exit7, leave, first = failures(tmp_path)
    assert exit7.message.endswith("ended with exit code 7")
    assert leave.message.endswith("left early, in a case")
    assert first.message.endswith("ended without an exit code")
    assert outcomes(tmp_path) == [(position, "lost rank") for position in range(3)]
    assert "stepmark: 3 cases in a row lost: 3 cases left out\n" in capfd.readouterr().err


@pytest.mark.usefixtures("_short_waits")
def test_an_exception_of_ours_and_lost_peers_cost_a_case(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, 2, 5, "1:1:raise", "0:3:lost", "1:3:kill") == 3
    assert [what for _, what in outcomes(tmp_path)] == [
        *("measured", "lost rank", "measured", "lost rank", "measured")
    ]
    raised, lost = failures(tmp_path)
    assert raised.message.endswith("ended with exit code 1")
    assert lost.ranks == (1,), "the rank that died, not the one that noticed"
    assert "RuntimeError: a mistake of ours" in capfd.readouterr().err


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_after_the_record_leaves_it_measured(rank: int, tmp_path: Path) -> None:
    """The parent sees a position that is not yet left, and finds its record."""
    other = 1 - rank
    assert go(tmp_path, 2, 3, f"{rank}:1:recorded", f"{other}:1:waits") == 0
    assert outcomes(tmp_path) == [(0, "measured"), (1, "measured"), (2, "measured")]


@pytest.mark.usefixtures("_short_waits")
def test_rank_0_records_a_failure_that_blocks_it(tmp_path: Path) -> None:
    assert go(tmp_path, 2, 3, "0:1:blocked", "1:1:long") == 3
    assert outcomes(tmp_path) == [(0, "measured"), (1, "error"), (2, "measured")]
    assert failures(tmp_path)[0].message == "rank 1 broke"
    assert firsts(tmp_path) == [0, 2]


def test_ranks_are_started_anew_where_they_ask_and_for_each_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, 2, 2, "0:0:restart", "1:0:restart", launches=2) == 0
    assert firsts(tmp_path, 1) == [0, 1, 2]
    assert [record.launch for record in records(tmp_path)] == [1, 1, 2, 2]
    assert told(tmp_path, 1, "closed") == [[]]  # only by the last ranks
    assert "failed" not in capfd.readouterr().err


def test_what_changed_since_the_first_ranks_is_recorded_and_ends_no_run(tmp_path: Path) -> None:
    assert go(tmp_path, 2, 2, "0:0:restart", "1:0:restart", "drifts") == 0
    assert firsts(tmp_path, 1) == [0, 1]
    before = read_info(run_of(tmp_path)).environment.torch
    assert [record.differs for record in records(tmp_path)] == [
        (),
        (f"torch: {before} -> another",),
    ]


def test_no_ranks_start_for_what_the_budget_has_no_time_for(tmp_path: Path) -> None:
    """Those of the last launch that began get the rest, to skip it."""
    assert go(tmp_path, 2, 1, launches=5, budget="1ms") == 0
    # The start of the first ranks, by which a short budget is measured, may be long.
    assert firsts(tmp_path) in ([0], [0, 1])
    lefts = [words for (words,) in told(tmp_path, 0, "left")]
    assert 0 <= float(lefts[0]) < 60
    assert lefts[2:] == ["-inf"] * 3


def test_ranks_start_for_each_launch_within_the_budget(tmp_path: Path) -> None:
    assert go(tmp_path, 2, 1, launches=3, budget="10m") == 0
    assert firsts(tmp_path) == [0, 1, 2]
    lefts = [float(words) for (words,) in told(tmp_path, 0, "left")]
    assert 900 >= lefts[0] >= lefts[2] > 600, "one budget for all launches"


def test_bad_input_is_not_tried_again_and_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, 2, 4, "0:0:refuse", "1:0:refuse") == 2
    assert records(tmp_path) == []
    assert len(firsts(tmp_path)) == 1
    assert capfd.readouterr().err.count("mode") == 1


def test_a_hang_in_set_up_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path, 2, 4, "0:0:set-up", "1:0:set-up", "1:0:hold") == 3
    assert records(tmp_path) == []
    assert "ranks 0-1 in set-up or between cases" in capfd.readouterr().err
    assert len(firsts(tmp_path)) == 1


def test_ranks_that_never_come_up_end_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_LEAST_SET_UP_S", 0.5)
    assert go(tmp_path, 2, 4, "never", timeout="1s") == 3
    assert "stepmark: ranks 0-1 not up within 1 s\n" in capfd.readouterr().err


def test_the_timeout_of_a_case_covers_joining(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    assert go(tmp_path, 2, 4, "0:0:join", "1:0:join", timeout="1s") == 3
    assert time.monotonic() - began_s < 15.0
    assert "not done within 1 s: ranks 0-1 in set-up" in capfd.readouterr().err
    assert records(tmp_path) == []


def test_ranks_that_fail_at_once_end_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(local_ranks.ENTRIES, "rank", "tests.measuring.no_such_module")
    monkeypatch.setattr(local_ranks, "_start", START)
    code, run = measure_quietly(plan(2, 4), str(tmp_path))
    assert code == 3
    err = capfd.readouterr().err
    assert "ended with exit code 1" in err
    assert "No module named tests.measuring.no_such_module" in err
    assert [path.name for path in run.iterdir()] == ["plan.jsonl"]


@pytest.mark.usefixtures("_short_waits")
def test_resume_measures_what_is_left_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, 2, 5, "1:1:kill", "1:3:exit7") == 3
    run = run_of(tmp_path)
    before = records(tmp_path)
    assert resume(ResumeOptions(run=run.name, out=tmp_path / "runs")) == 0
    after = records(tmp_path)
    assert after[: len(before)] == before
    assert [r.comm.count for r in after[len(before) :]] == [
        r.comm.count for r in before if isinstance(r, Failed)
    ]
    assert all(isinstance(record, Measured) for record in after[len(before) :])
    assert capsys.readouterr().out.count("\n        1024 ") == 1, "the whole run is shown"
    num_ups = len(firsts(tmp_path))
    assert resume(ResumeOptions(out=tmp_path / "runs")) == 0
    assert records(tmp_path) == after
    assert len(firsts(tmp_path)) == num_ups + 1


def test_a_run_that_has_only_a_plan_is_begun_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(local_ranks.ENTRIES, "rank", "tests.measuring.no_such_module")
        _, run = measure_quietly(plan(2, 2), str(tmp_path / "runs"))
    assert resume(ResumeOptions(run=run.name, out=tmp_path / "runs")) == 0
    assert len(records(tmp_path)) == read_info(run).num_cases == 2


FINISH_S = 3.0  # after SIGTERM, of a command's 15
PARENT = f"""
import sys
from pathlib import Path
from stepmark.measuring import supervise
from stepmark.measuring.measure import measure_quietly, show_run
supervise.FINISH_S = {FINISH_S}
from tests import fork_server
from tests.measuring.sleeping import plan
code, run = measure_quietly(plan(2, 9), sys.argv[1])
sys.exit(show_run(run, code))
"""


def parent(folder: Path, *faults: str) -> "subprocess.Popen[str]":
    """A process of its own whose two ranks are in their second case."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder / "runs")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "FAULTS": " ".join(faults)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As from a terminal, whose Ctrl-C reaches the whole group.
        process_group=0,
    )
    end_s = time.monotonic() + 30
    while not (done(folder, 0) and done(folder, 1)) and time.monotonic() < end_s:
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(left_over(folder)) == 2, "two ranks"
    return process


@pytest.mark.parametrize(
    ("number", "expected", "limit_s"),
    [(signal.SIGINT, 130, 5.0), (signal.SIGTERM, 143, FINISH_S + 5.0)],
)
def test_a_signal_ends_it_and_what_is_finished_is_kept(
    number: signal.Signals, expected: int, limit_s: float, tmp_path: Path
) -> None:
    """After SIGTERM the present case may still end; this one does not."""
    process = parent(tmp_path, "0:1:long", "1:1:long")
    began_s = time.monotonic()
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == expected, output
    assert time.monotonic() - began_s < limit_s
    assert left_over(tmp_path) == []
    assert outcomes(tmp_path) == [(0, "measured")]
    assert f"go on with: stepmark resume {run_of(tmp_path)}" in output
    assert "Traceback" not in output


def test_a_second_signal_kills(tmp_path: Path) -> None:
    process = parent(tmp_path, *[f"{rank}:1:{f}" for rank in (0, 1) for f in ("deaf", "long")])
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "it waits for ranks that store what they have"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began_s < 5
    process.communicate()
    assert left_over(tmp_path) == []


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = parent(tmp_path, "0:1:long", "1:1:deaf", "1:1:long")
    process.kill()
    process.communicate(timeout=20)  # ends when nobody holds its pipe any more
    end_s = time.monotonic() + 2
    while left_over(tmp_path) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert left_over(tmp_path) == []
    for path in rank_folders(tmp_path):  # there was nobody to remove it
        shutil.rmtree(path)


def test_an_interrupt_before_the_ranks_are_up_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "FAULTS": "never"},
    )
    end_s = time.monotonic() + 30
    while not told(tmp_path, 0, "up") and time.monotonic() < end_s:
        time.sleep(0.02)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began_s < 3
    assert left_over(tmp_path) == []
