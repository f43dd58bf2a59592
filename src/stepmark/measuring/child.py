"""Run one command with a time limit; none of its processes outlives `run`."""

import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.ground import processes
from stepmark.ground.processes import tie_child

MARK = "STEPMARK_CHILD"  # in the environment of the command and of all that it starts
_POLL_S = 0.1
# Time to end by itself after a signal: longer than its supervisor gives ranks.
GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    exit_code: int | None  # negative: the signal; None for a process that SIGKILL does not end
    seconds: float
    timed_out: bool = False
    interrupted: bool = False
    survivors: tuple[int, ...] = ()  # pids that SIGKILL did not end within 10 s


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    out: Path,
    err: Path,
    limit_s: float,
    signals: Sequence[int] = (),
    grace_s: float = GRACE_S,
) -> Ended:
    """Run it with its output in two files, and end it after limit_s.

    `signals` is the list of `catching`: with a signal in it the command gets one SIGINT, past
    its limit SIGTERM. After grace_s, or with another signal, it is killed.
    It is in a session of its own, so a terminal's Ctrl-C reaches only this process.
    Raises OSError, e.g. for a command that does not exist.
    """
    token = secrets.token_hex(8)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**environment, MARK: token},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=tie_child(signal.SIGKILL),  # noqa: PLW1509, two system calls
        )
    timed_out = interrupted = False
    try:
        end_s = started_s + limit_s
        while process.poll() is None and not signals and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        interrupted = bool(signals)
        timed_out = process.poll() is None and not interrupted
        if timed_out:
            _terminate(process, signal.SIGTERM, grace_s, signals)
        elif interrupted:
            _terminate(process, signal.SIGINT, grace_s, signals)
    finally:
        survivors = tuple(processes.kill_all([process], MARK, token))
    return Ended(
        exit_code=process.poll(),
        seconds=time.monotonic() - started_s,
        timed_out=timed_out,
        interrupted=interrupted,
        survivors=survivors,
    )


def _terminate(
    process: "subprocess.Popen[bytes]",
    number: signal.Signals,
    limit_s: float,
    signals: Sequence[int],
) -> None:
    """Send a signal to the command alone, which ends its own children, and wait for its end."""
    process.send_signal(number)
    end_s, before = time.monotonic() + limit_s, max(1, len(signals))
    while process.poll() is None and len(signals) <= before and time.monotonic() < end_s:
        time.sleep(_POLL_S)
