"""What a rank says, how much that costs, and what it does when it is given up."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.ground.errors import ConfigError
from stepmark.measuring import heartbeat
from stepmark.measuring.heartbeat import (
    ABORT,
    FIRST,
    FOLDER,
    GAVE_UP,
    SET_UP_S,
    STACK,
    Heartbeat,
    HeartbeatStore,
    set_up_limit_s,
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


ABANDON = """
import os, signal
from stepmark.measuring.heartbeat import HeartbeatStore
print(HeartbeatStore.new().folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_what_a_killed_parent_left() -> None:
    alive = HeartbeatStore.new()
    words = [sys.executable, "-c", ABANDON]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    abandoned = Path(done.stdout.strip())
    assert abandoned.is_dir()
    # What is not surely ours and over stays: a release without locks, a link to a folder.
    unlocked = Path(tempfile.mkdtemp(prefix="stepmark-ranks-", dir=abandoned.parent))
    link = unlocked.with_name(f"{unlocked.name}-link")
    (unlocked / "folder").mkdir()
    (unlocked / "folder" / "owner").touch()
    link.symlink_to(unlocked / "folder")
    new = HeartbeatStore.new()
    try:
        assert not abandoned.exists()
        assert all(store.folder.is_dir() for store in (alive, new))
        assert (link / "owner").is_file()
    finally:
        for store in (alive, new, HeartbeatStore(unlocked)):
            store.remove()
        link.unlink(missing_ok=True)
    assert not alive.folder.exists()


def test_a_folder_of_another_user_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stepmark-ranks-of-another"
    folder.mkdir()
    (folder / "owner").touch()
    monkeypatch.setattr(heartbeat, "MEMORY", tmp_path)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    HeartbeatStore.new().remove()
    assert folder.is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: own)
    HeartbeatStore.new().remove()
    assert not folder.exists()


@pytest.mark.parametrize("lack", ["folder", "room"])
def test_without_dev_shm_ranks_report_in_tmpdir(
    lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, folder = tmp_path / "shm", tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(heartbeat, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if lack == "room":
        memory.mkdir()
        write = Path.write_bytes

        def full(path: Path, data: bytes) -> int:
            if path.is_relative_to(memory):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", full)
    store = HeartbeatStore.new()
    assert store.folder.parent == folder
    store.remove()
    assert [*tmp_path.rglob("stepmark-*")] == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^TMPDIR .*none is invalid.*No such file"):
        HeartbeatStore.new()


def test_set_up_has_the_time_of_a_case_but_not_less_than_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert set_up_limit_s(None, 1) == SET_UP_S
    assert set_up_limit_s("30s", 2) == 30.0
    assert set_up_limit_s("1s", 2) == 10.0
    assert set_up_limit_s("1s", 8) == 40.0, "they share cores"
    assert set_up_limit_s("1h", 1) == SET_UP_S


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
