"""What a rank says, how much that costs, and what it does when it is given up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.measuring.heartbeat import (
    ABORT,
    FIRST,
    FOLDER,
    GAVE_UP,
    STACK,
    Heartbeat,
    HeartbeatStore,
)

pytestmark = pytest.mark.ranks

COST = """
import statistics, time
from stepmark.measuring.heartbeat import HeartbeatWriter
guard = HeartbeatWriter.from_environment()
times_s = []
for position in range(1000):
    start_s = time.perf_counter()
    guard.begin(position, 10.0)
    times_s.append(time.perf_counter() - start_s)
print(statistics.median(times_s))
"""

GIVEN_UP = """
import time
from stepmark.measuring.heartbeat import HeartbeatWriter
def broken():
    raise RuntimeError("no recorder")
guard = HeartbeatWriter.from_environment()
guard.on_abort(broken, broken)
guard.begin(guard.first, 10.0)
time.sleep(100)
"""


def start(script: str, folder: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {
        FOLDER: str(folder),
        FIRST: "4",
        "RANK": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for(is_there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not is_there():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_beat_costs_less_than_100_us() -> None:
    folder = HeartbeatStore.new()
    try:
        output, _ = start(COST, folder.folder).communicate(timeout=30)
    finally:
        folder.remove()
    print(f"{float(output) * 1e6:.1f} us a beat")  # noqa: T201
    assert float(output) < 100e-6


def test_a_rank_says_what_it_does_and_gives_up_when_told(tmp_path: Path) -> None:
    folder = HeartbeatStore(tmp_path)
    process = start(GIVEN_UP, tmp_path)
    try:
        wait_for(
            lambda: [beat.position for beat in folder.beats([1]).values()] not in ([], [None])
        )
        beat = folder.beats([1])[1]
        assert (beat.pid, beat.position, beat.exit_code) == (process.pid, 4, None)
        assert beat.deadline_s is not None
        assert beat.deadline_s - beat.since_s == 10.0
        assert abs(beat.since_s - time.monotonic()) < 5, "one clock for all processes"
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "line 9 in <module>" in (folder.read(f"{STACK}-1") or ""))
        folder.write(ABORT, "")
        wait_for(lambda: folder.has(f"{GAVE_UP}-1"))
        assert process.poll() is None, "callbacks that fail harm nothing"
    finally:
        process.kill()
        process.communicate()


def test_nobody_reads_half_a_file(tmp_path: Path) -> None:
    folder = HeartbeatStore(tmp_path)
    folder.write("long", "x" * 10_000_000)
    assert folder.read("long") == "x" * 10_000_000
    beat = Heartbeat(rank=0, pid=1, position=None, since_s=1.5, deadline_s=None)
    folder.write_beat(beat)
    assert folder.beats(range(3)) == {0: beat}
    assert {path.name for path in tmp_path.iterdir()} == {"long", "beat-0"}
    assert json.loads(folder.read("beat-0") or "")["position"] is None
