"""Real ranks under a real torch.distributed.run that hang, stop, die, and go on."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stepmark.launch import processes
from stepmark.launch import supervise as supervise_module
from stepmark.launch.supervise import Lost, supervise

ROOT = Path(__file__).parents[2]
MODULE = "tests.launch.sleeper"


class Seen:
    """What on_lost was told, and when."""

    def __init__(self) -> None:
        self.lost: list[Lost] = []
        self.runs: list[str | None] = []
        self.written: list[Path] = []
        self.times_s: list[float] = []

    def __call__(self, lost: Lost, run: Path | None) -> None:
        self.lost.append(lost)
        self.runs.append(run.name if run else None)
        self.times_s.append(time.monotonic())


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def go(
    folder: Path, num_ranks: int, num_cases: int, *faults: str, start_s: float = 120.0
) -> tuple[int, Seen]:
    seen = Seen()
    arguments = [str(folder), str(num_cases), *faults]
    code = supervise(
        arguments,
        num_ranks,
        num_cases=num_cases,
        on_lost=seen,
        on_run=seen.written.append,
        module=MODULE,
        start_s=start_s,
    )
    assert left_over(folder) == []
    return code, seen


def left_over(folder: Path) -> list[int]:
    """Processes of this test that still live, stopped ones too."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        process = processes.look(int(name))
        if str(folder) in line and MODULE in line and process and not process.ended:
            found.append(int(name))
    return found


def told(folder: Path, rank: int, word: str) -> list[tuple[float, list[str]]]:
    """What a rank said with this word: when, and what else."""
    path = folder / f"rank-{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(line[0]), line[2:]) for line in lines if line[1] == word]


def done(folder: Path, rank: int = 0) -> list[int]:
    return [int(words[0]) for _, words in told(folder, rank, "done")]


def watch_folders(folder: Path) -> list[Path]:
    """Those of its crews that are still there."""
    return [path for _, words in told(folder, 0, "up") if (path := Path(words[3])).exists()]


def test_a_hang_a_stop_and_a_death_cost_one_case_each(tmp_path: Path) -> None:
    faults = ["1:1:hang", "1:3:stop", "0:5:deaf", "2:5:deaf", "2:5:child", "2:5:kill"]
    code, seen = go(tmp_path, 3, 7, *faults)
    assert code == 3
    assert done(tmp_path) == [0, 2, 4, 6], "the rest is measured, nothing twice"
    firsts = [(words[1], words[2]) for _, words in told(tmp_path, 0, "up")]
    assert firsts == [("0", "None"), ("2", "the-run"), ("4", "the-run"), ("6", "the-run")]
    assert seen.runs == ["the-run"] * 3
    assert seen.written == [tmp_path / "the-run"]
    hang, stop, kill = seen.lost
    assert [lost.position for lost in seen.lost] == [1, 3, 5]
    assert [lost.cause for lost in seen.lost] == ["timeout", "timeout", "lost rank"]
    assert [lost.ranks for lost in seen.lost] == [(0, 1, 2), (1,), (2,)]
    # Rank by rank: who waits, and in what the other is stuck.
    first, second, third = hang.stacks.split("rank ")[1:]
    assert "in stuck_in_this_function" in second
    assert "in wait_for_all" in first
    assert "in wait_for_all" in third
    assert hang.flight == {rank: f'{{"rank": {rank}}}' for rank in range(3)}
    assert "not done within 1 s: ranks 0-2 in this case for 1." in hang.message
    assert "ranks 0, 2 in this case" in stop.message
    assert "rank 1 stopped (SIGSTOP), last heard of 1." in stop.message
    assert stop.message.endswith("waited for: rank 1")
    assert "rank 1:\nno stack: stopped (SIGSTOP)" in stop.stacks
    assert set(stop.flight) == {0, 2}
    assert "was killed by signal 9 (SIGKILL)" in kill.message
    assert all("\n" not in lost.message for lost in seen.lost)
    assert len(told(tmp_path, 1, "aborted")) == 1, "only where it could run"
    assert watch_folders(tmp_path) == []
    print_times(tmp_path, seen)


def print_times(folder: Path, seen: Seen) -> None:
    """From the last word of rank 0 in a lost crew to on_lost, and to the next crew's first."""
    ups = [time_s for time_s, _ in told(folder, 0, "up")]
    last = {words[0]: time_s for time_s, words in told(folder, 0, "done")}
    for lost, at_s, up_s in zip(seen.lost, seen.times_s, ups[1:], strict=True):
        began_s = last[str((lost.position or 0) - 1)]
        allowed_s = 1.0 if lost.cause == "timeout" else 0.0
        over_s, again_s = at_s - began_s - allowed_s, up_s - at_s
        print(f"{lost.cause}: over after {over_s:.2f} s, up again {again_s:.2f} s later")  # noqa: T201
        assert over_s < 5.0


def test_three_losses_in_a_row_end_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise_module, "_GRACE_S", 0.3)  # the survivors wait in vain anyway
    code, seen = go(tmp_path, 2, 6, "1:0:exit7", "1:1:leave", "0:2:leave")
    assert code == 3
    assert [lost.position for lost in seen.lost] == [0, 1, 2]
    exit7, leave, first = seen.lost
    assert exit7.message.endswith("ended with exit code 7")
    assert leave.message.endswith("ended in the middle of a case")
    assert first.message.endswith("ended without an exit code")
    assert done(tmp_path) == []
    assert capfd.readouterr().err == "stepmark: 3 cases in a row lost: 3 left out\n"


def test_ranks_are_started_anew_where_they_say_and_the_worst_code_wins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, seen = go(tmp_path, 2, 4, "0:1:go_on", "0:1:code1", "1:1:code1", "1:3:kill")
    assert (code, [lost.position for lost in seen.lost]) == (1, [3])
    assert done(tmp_path) == [0, 1, 2]
    assert [words[1] for _, words in told(tmp_path, 1, "up")] == ["0", "2"]
    assert capfd.readouterr().err == "", "the launcher buries nothing under its own words"


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    faults = ["0:0:go_on", "0:0:code2", "1:0:code2"]
    code, seen = go(tmp_path, 2, 4, *faults)
    assert (code, seen.lost) == (2, [])
    assert len(told(tmp_path, 0, "up")) == 1


def test_a_hang_in_set_up_ends_it(tmp_path: Path) -> None:
    code, seen = go(tmp_path, 2, 4, "0:0:set-up", "1:0:set-up", "1:0:hold")
    assert code == 3
    (lost,) = seen.lost
    assert (lost.position, lost.cause, lost.ranks) == (None, "timeout", (0, 1))
    assert "ranks 0-1 in set-up or between cases" in lost.message
    first, second = lost.stacks.split("rank ")[1:]
    assert "in stuck_in_this_function" in first
    assert "in stuck_and_nobody_else_can_run" in second
    assert lost.flight.keys() == {0}, "rank 1 has no thread that could"
    assert len(told(tmp_path, 0, "up")) == 1


def test_ranks_that_never_come_up_end_it(tmp_path: Path) -> None:
    code, seen = go(tmp_path, 2, 4, "never", start_s=3.0)
    assert code == 3
    (lost,) = seen.lost
    assert (lost.position, lost.cause) == (None, "lost rank")
    assert lost.message == "ranks 0-1 not up within 3 s"


def test_ranks_that_fail_at_once_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    code = supervise([], 2, num_cases=4, on_lost=seen, module="tests.launch.no_such_module")
    (lost,) = seen.lost
    assert (code, lost.position) == (3, None)
    assert "ended with exit code 1" in lost.message
    assert "No module named tests.launch.no_such_module" in capfd.readouterr().err


PARENT = """
import sys
from stepmark.launch.supervise import supervise
lost = lambda lost, run: print(lost)
sys.exit(supervise(sys.argv[1:], 2, num_cases=9, on_lost=lost, module="tests.launch.sleeper"))
"""


def parent(folder: Path, *faults: str) -> "subprocess.Popen[str]":
    """A supervisor of its own whose two ranks are in their second case."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), "9", *faults],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As from a terminal, whose Ctrl-C reaches the whole group.
        process_group=0,
    )
    end_s = time.monotonic() + 30
    while not (done(folder, 0) and done(folder, 1)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert len(left_over(folder)) == 3, "launcher and ranks"
    return process


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_each_rank_once(
    number: signal.Signals, expected: int, tmp_path: Path
) -> None:
    process = parent(tmp_path, "0:1:long", "1:1:long")
    began_s = time.monotonic()
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == expected, output
    assert time.monotonic() - began_s < 3
    assert output == ""
    assert [len(told(tmp_path, rank, "SIGINT")) for rank in (0, 1)] == [1, 1]
    assert [len(told(tmp_path, rank, "SIGTERM")) for rank in (0, 1)] == [0, 0]
    assert left_over(tmp_path) == []


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    process = parent(tmp_path, *[f"{rank}:1:{f}" for rank in (0, 1) for f in ("deaf", "long")])
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "it waits for ranks that store what they have"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began_s < 3
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
    for path in watch_folders(tmp_path):  # there was nobody to remove it
        shutil.rmtree(path)


def test_an_interrupt_before_the_ranks_are_up_ends_it(tmp_path: Path) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began_s = time.monotonic()
    code, seen = go(tmp_path, 2, 4)
    assert (code, seen.lost) == (130, [])
    assert time.monotonic() - began_s < 3
