"""stepmark watch of a job that dies: it keeps the output and states the cause, as logs does."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import tty
from pathlib import Path

import pytest

from stepmark.job_logs.log_sources import WATCHED_OUTPUT
from stepmark.watching import output_copy
from stepmark.watching.output_copy import OutputFile

from .test_watch import TORCHRUN, environment, watch

pytestmark = pytest.mark.ranks

RAISES = "print('loss 1.0', flush=True)\nraise ValueError('bad shape')\n"
KILLED = "import os\nprint('loss 1.0', flush=True)\nos.kill(os.getpid(), 9)\n"
# Rank 1 dies in the middle; rank 0 waits for it in a collective of gloo.
ONE_DIES = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1000)
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        raise RuntimeError("no space on the scratch disk")
    dist.all_reduce(x)
"""


def logs(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stepmark", "logs", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "launcher", "code", "cause"),
    [
        (RAISES, [sys.executable], 1, "ValueError: bad shape, at "),
        (KILLED, [sys.executable], 137, "was killed (SIGKILL)"),
        (ONE_DIES, TORCHRUN, 1, "Rank 1 raised RuntimeError: no space on the scratch disk"),
    ],
    ids=["raises", "killed", "one rank dies"],
)
def test_the_cause_is_stated_and_the_output_kept(
    tmp_path: Path, script: str, launcher: list[str], code: int, cause: str
) -> None:
    (tmp_path / "job.py").write_text(script)
    done = watch(tmp_path, job=[*launcher, "job.py"])
    assert done.returncode == code
    *_, empty, stated, more = done.stdout.splitlines()
    assert empty == ""
    assert stated.startswith("cause      ")
    assert cause in stated
    run = next((tmp_path / "runs").iterdir())
    assert more == f"more       stepmark logs runs/{run.name}"
    kept = (run / WATCHED_OUTPUT).read_text()
    own = done.stdout[: done.stdout.index("# watched")]
    assert own in kept
    assert all(line in kept for line in done.stderr.splitlines())
    read = logs(tmp_path, f"runs/{run.name}")
    assert read.returncode == 1
    cause = stated.removeprefix("cause      ").removesuffix(".")
    assert cause in read.stdout.splitlines()[0]
    assert read.stderr == ""
    assert logs(tmp_path, f"runs/{run.name}", "--steps", "3").returncode == 1


def test_nothing_states_a_cause(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("raise SystemExit(3)")
    done = watch(tmp_path, job=[sys.executable, "job.py"])
    assert done.returncode == 3
    assert "cause      A process ended with exit code 3." in done.stdout


def test_output_of_both_streams_stays_in_order(tmp_path: Path) -> None:
    words = "import os\nfor n in range(200): os.write(1 + n % 2, b'%d ' % n)"
    command = [sys.executable, "-m", "stepmark", "watch", "--", sys.executable, "-c", words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(" ".join(map(str, range(200))))


def test_a_terminal_stays_a_terminal_and_nothing_is_held_back(tmp_path: Path) -> None:
    """Each byte comes through as it is, at once, although the job still runs."""
    script = """
import os, sys
print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns, end="\\r")
print("\\x1b[1mhalf a line", end="", flush=True)
sys.stdin.readline()
"""
    (tmp_path / "job.py").write_text(script)
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 77, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "stepmark", "watch", "--", sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    )
    seen = b""
    end_s = time.monotonic() + 60
    while not seen.endswith(b"half a line") and time.monotonic() < end_s:
        if select.select((ours,), (), (), 1)[0]:
            seen += os.read(ours, 4096)
    assert seen == b"True True 77\r\x1b[1mhalf a line"
    assert process.poll() is None
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    os.close(theirs)
    os.close(ours)


def test_a_reader_that_goes_ends_the_job_as_before(tmp_path: Path) -> None:
    words = "while True: print('y' * 1000)"
    process = subprocess.Popen(
        [sys.executable, "-m", "stepmark", "watch", "--", sys.executable, "-c", words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout
    process.stdout.read(10)
    process.stdout.close()
    process.wait(60)
    (kept,) = tmp_path.glob(f"runs/*/{WATCHED_OUTPUT}")
    assert b"BrokenPipeError" in kept.read_bytes()


def test_a_process_that_the_job_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    words = "import subprocess, sys; print('pid', subprocess.Popen(['sleep', '100']).pid)"
    start_s = time.monotonic()
    done = watch(tmp_path, job=[sys.executable, "-c", words])
    assert time.monotonic() - start_s < 50
    os.kill(int(done.stdout.split()[1]), signal.SIGKILL)
    assert done.returncode == 0


@pytest.mark.parametrize("size", [10, 100, 101, 350, 1000, 12345])
def test_the_beginning_and_the_end_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(output_copy, "HEAD_BYTES", 100)
    monkeypatch.setattr(output_copy, "TAIL_BYTES", 250)
    data = "".join(f"{n} " for n in range(size))[:size].encode()
    path = tmp_path / "output.log"
    file = OutputFile(path)
    for start in range(0, size, 33):
        file.write(data[start : start + 33])
    file.close("the end")
    if size <= 350:
        assert path.read_bytes() == data + b"\nthe end\n"
    else:
        gap = b"\n[... %d bytes left out ...]\n" % (size - 350)
        assert path.read_bytes() == data[:100] + gap + data[-250:] + b"\nthe end\n"
    file.write(b"late")
    assert b"late" not in path.read_bytes()
