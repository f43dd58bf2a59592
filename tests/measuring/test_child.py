"""One command in processes of its own: its limit holds for all that it started."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from stepmark.ground import processes
from stepmark.ground.signals import catching
from stepmark.measuring import child, supervise

pytestmark = pytest.mark.ranks

# A child of its own, and one that leaves the session as a launcher's ranks do.
FAMILY = """
import signal, subprocess, sys, time
if "deaf" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
kids = [subprocess.Popen(sleep, start_new_session=own) for own in (False, True)]
print(*[kid.pid for kid in kids], flush=True)
if "leave" not in sys.argv:
    time.sleep(60)
"""


def family(folder: Path, *words: str, limit_s: float, **more: object) -> child.Ended:
    return child.run(
        [sys.executable, "-c", FAMILY, *words],
        os.environ,
        out=folder / "out",
        err=folder / "err",
        limit_s=limit_s,
        **more,  # type: ignore[arg-type]
    )


def kids(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "out").read_text().split()]


def alive(pids: list[int]) -> list[int]:
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and processes.is_alive(psutil.Process(pid))
    ]


@pytest.mark.parametrize("words", [(), ("deaf",)], ids=["", "deaf"])
def test_what_hangs_is_killed_with_its_grandchildren(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = family(tmp_path, *words, limit_s=1.0, grace_s=0.5)
    assert ended.timed_out
    assert ended.exit_code == (-signal.SIGKILL if words else -signal.SIGTERM)
    assert 1.0 <= ended.seconds < 1.0 + 0.5 + 2.0
    assert len(kids(tmp_path)) == 2
    assert alive(kids(tmp_path)) == []
    assert ended.survivors == ()


def test_a_command_past_its_limit_stores_what_it_has(tmp_path: Path) -> None:
    """As a verb does whose ranks get time for that; the command gets more than its ranks."""
    assert child.GRACE_S >= supervise.FINISH_S + supervise.INTERRUPT_S + 3
    code = "import signal, sys, time\n"
    code += "signal.signal(15, lambda *_: (time.sleep(0.5), print('kept', flush=True), "
    code += "sys.exit(143)))\nprint('up', flush=True)\ntime.sleep(60)"
    ended = child.run(
        [sys.executable, "-c", code],
        os.environ,
        out=tmp_path / "out",
        err=tmp_path / "err",
        limit_s=2.0,
    )
    assert (ended.exit_code, ended.timed_out) == (143, True)
    assert (tmp_path / "out").read_text() == "up\nkept\n"


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    ended = family(tmp_path, "leave", limit_s=30.0)
    assert (ended.exit_code, ended.timed_out) == (0, False)
    assert len(kids(tmp_path)) == 2
    assert alive(kids(tmp_path)) == []


def test_others_live_on(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        family(tmp_path, "leave", limit_s=30.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_output_and_exit_code(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['ASKED']); sys.stderr.write('word'); sys.exit(7)"
    ended = child.run(
        [sys.executable, "-c", code],
        {"ASKED": "this"},
        out=tmp_path / "out",
        err=tmp_path / "err",
        limit_s=30.0,
    )
    assert (ended.exit_code, ended.timed_out, ended.interrupted) == (7, False, False)
    assert (tmp_path / "out").read_text() == "this\n"
    assert (tmp_path / "err").read_text() == "word"


def test_an_interrupt_reaches_the_command_once(tmp_path: Path) -> None:
    # A shell starts what it puts into the background with SIGINT ignored.
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("up", flush=True); time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5); print("kept", flush=True)
"""
    seen: list[int] = []

    def interrupt() -> None:
        while (tmp_path / "out").read_text() != "up\n":
            time.sleep(0.02)
        seen.append(signal.SIGINT)

    (tmp_path / "out").touch()
    threading.Thread(target=interrupt, daemon=True).start()
    ended = child.run(
        [sys.executable, "-c", code],
        os.environ,
        out=tmp_path / "out",
        err=tmp_path / "err",
        limit_s=30.0,
        signals=seen,
    )
    assert ended.interrupted
    assert not ended.timed_out
    assert (tmp_path / "out").read_text() == "up\nkept\n"
    assert ended.seconds < 10


def test_a_second_signal_kills(tmp_path: Path) -> None:
    seen = [signal.SIGINT]
    threading.Timer(1.0, seen.append, [signal.SIGINT]).start()
    ended = family(tmp_path, "deaf", limit_s=30.0, signals=seen)
    # It may have been hit before it could turn deaf.
    assert ended.interrupted
    assert ended.seconds < 5
    assert alive(kids(tmp_path)) == []


def test_one_signal_after_the_limit_leaves_time_to_store(tmp_path: Path) -> None:
    """A command past its limit was asked once to end; the user's first signal asks again."""
    code = "import signal, sys, time\n"
    code += "signal.signal(15, lambda *_: (time.sleep(0.8), print('kept', flush=True), "
    code += "sys.exit(143)))\nprint('up', flush=True)\ntime.sleep(60)"
    seen: list[int] = []
    threading.Timer(1.7, seen.append, [signal.SIGINT]).start()
    ended = child.run(
        [sys.executable, "-c", code],
        os.environ,
        out=tmp_path / "out",
        err=tmp_path / "err",
        limit_s=1.5,
        signals=seen,
    )
    assert (ended.exit_code, ended.timed_out) == (143, True)
    assert (tmp_path / "out").read_text() == "up\nkept\n"


def test_signals_are_caught_and_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with catching() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert sorted(seen) == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is before


def test_it_dies_with_us(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from stepmark.measuring import child
from stepmark.ground.signals import catching
folder = Path({str(tmp_path)!r})
sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
command = [sys.executable, "-c", sleep]
child.run(command, os.environ, out=folder / "out", err=folder / "err", limit_s=60)
"""
    path = str(Path(child.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}
    )
    end_s = time.monotonic() + 20
    while not ((tmp_path / "out").exists() and kids(tmp_path)):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + 5
    while alive(kids(tmp_path)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert alive(kids(tmp_path)) == []
