"""A rank for the tests of the guard: its cases sleep, wait for the other ranks, and go wrong.

python -m tests.launch.sleeper FOLDER NUM_CASES [RANK:POSITION:FAULT ...]
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stepmark.launch.heartbeat import Heartbeat
from stepmark.launch.torchrun import leave_exit_code

LIMIT_S = 1.0
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Terminated(BaseException):
    pass


def stuck_in_this_function() -> None:
    time.sleep(1000)


def stuck_and_nobody_else_can_run() -> None:
    """One call into C that keeps the GIL."""
    sum(range(10**12))


def start_child() -> None:
    """As a compiler's worker: with the arguments by which the test finds what is left."""
    subprocess.Popen(["sh", "-c", "sleep 1000; :", *sys.argv[1:], "tests.launch.sleeper"])


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    time.sleep(0.1)  # by then the others have begun this case, too
    os.kill(os.getpid(), signal.SIGKILL)


def deaf() -> None:
    """To every signal that can be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def terminate(number: int, _frame: object) -> None:
    raise Terminated


FAULTS: dict[str, Callable[[], object]] = {
    "hang": stuck_in_this_function,
    "stop": stop,
    "child": start_child,
    "kill": die,
    "exit7": lambda: os._exit(7),
    "leave": lambda: os._exit(0),
    "deaf": deaf,
    "code1": lambda: None,
    "code2": lambda: None,
    "go_on": lambda: None,
    "long": lambda: time.sleep(30),
}


def wait_for_all(folder: Path, position: int) -> None:
    """As a collective does: nobody gets on before everybody is here."""
    (folder / f"here-{position}-{RANK}").touch()
    while any(not (folder / f"here-{position}-{r}").exists() for r in range(NUM_RANKS)):
        time.sleep(0.01)


def say(folder: Path, text: str) -> None:
    with (folder / f"rank-{RANK}").open("a") as file:
        file.write(f"{time.monotonic():.3f} {text}\n")


def main() -> None:
    folder, num_cases = Path(sys.argv[1]), int(sys.argv[2])
    if "never" in sys.argv:
        time.sleep(60)
    signal.signal(signal.SIGTERM, terminate)
    guard = Heartbeat.from_environment()
    assert guard is not None
    guard.on_abort(lambda: f'{{"rank": {RANK}}}', lambda: say(folder, "aborted"))
    watch = os.environ["STEPMARK_WATCH"]
    say(folder, f"up {os.getpid()} {guard.first} {guard.run and guard.run.name} {watch}")
    code = 0
    try:
        code = work(guard, folder, num_cases)
    except KeyboardInterrupt:
        code = 130
        say(folder, "SIGINT")
    except Terminated:
        code = 143
        say(folder, "SIGTERM")
    guard.close()
    leave_exit_code(code)


def work(guard: Heartbeat, folder: Path, num_cases: int) -> int:
    if RANK == 0:
        guard.run_is_at(folder / "the-run")
    for position in range(guard.first, num_cases):
        if f"{RANK}:{position}:set-up" in sys.argv:
            guard.idle(0.5)
            hold = f"{RANK}:{position}:hold" in sys.argv
            (stuck_and_nobody_else_can_run if hold else stuck_in_this_function)()
        guard.begin(position, 30.0 if f"{RANK}:{position}:long" in sys.argv else LIMIT_S)
        mine = [f for f in FAULTS if f"{RANK}:{position}:{f}" in sys.argv]
        for fault in mine:
            FAULTS[fault]()
        wait_for_all(folder, position)
        guard.idle(5.0)
        say(folder, f"done {position}")
        if "go_on" in mine:
            guard.go_on_at(position + 1)
        if codes := [fault for fault in mine if fault.startswith("code")]:
            return int(codes[0][-1])
    return 0


if __name__ == "__main__":
    main()
