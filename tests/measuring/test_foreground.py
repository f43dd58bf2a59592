"""A command with this process's own input and output: its exit code, and signals to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from stepmark.ground.processes import is_alive

pytestmark = pytest.mark.ranks

SOURCE = Path(__file__).parents[2] / "src"
DRIVER = """
import os, sys
from stepmark.measuring import child
sys.exit(child.run_in_foreground(sys.argv[1:], os.environ))
"""
# Reports its signals; one child in its group, and one in a session as torchrun's ranks are.
JOB = """
import signal, subprocess, sys, time
signals = []
def note(number, frame):
    print("got", number, flush=True)
    signals.append(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
child = "import time; print(flush=True); time.sleep(60)"
kids = [subprocess.Popen([sys.executable, "-c", child], start_new_session=own,
                         stdout=subprocess.PIPE) for own in (False, True)]
for kid in kids:
    kid.stdout.readline()
print(*[kid.pid for kid in kids], flush=True)
while len(signals) < int(sys.argv[1]):
    time.sleep(0.02)
sys.exit(9)
"""


def start(command: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *command],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.stdout.write(input()); sys.stderr.write('e'); sys.exit(7)", 7),
        ("import os; print(input(), end=''); os.write(2, b'e'); os.kill(os.getpid(), 15)", 143),
    ],
)
def test_input_output_and_exit_code_are_the_commands(program: str, code: int) -> None:
    process = start([sys.executable, "-uc", program])
    assert process.communicate("word\n", timeout=30) == ("word", "e")
    assert process.returncode == code


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGINT,)])
def test_signals_reach_the_command_once_and_nothing_outlives_it(
    numbers: tuple[signal.Signals, ...],
) -> None:
    process = start([sys.executable, "-c", JOB, str(len(numbers))])
    assert process.stdout is not None
    kids = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    for number in numbers:
        process.send_signal(number)
        assert process.stdout.readline() == f"got {int(number)}\n"
    rest, errors = process.communicate(timeout=30)
    assert rest == ""
    assert process.returncode == 9
    assert [kid for kid in kids if is_alive(kid)] == []
    assert ("KeyboardInterrupt" in errors) == (signal.SIGINT in numbers)  # its group got it


def test_a_command_that_ends_by_itself_leaves_what_it_started() -> None:
    program = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                       stdout=2, start_new_session=True).pid)
"""
    process = start([sys.executable, "-c", program])
    assert process.stdout is not None
    kid = psutil.Process(int(process.stdout.readline()))
    assert process.wait(30) == 0
    assert is_alive(kid)
    kid.kill()
    process.communicate()


def test_the_command_ends_with_this_process() -> None:
    process = start(
        [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True);time.sleep(60)"]
    )
    assert process.stdout is not None
    command = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate(timeout=30)
    end_s = time.monotonic() + 10
    while is_alive(command) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not is_alive(command)
