"""Run one command, with a time limit or in the foreground: no process of it is left behind."""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stepmark.ground.files import redact_file
from stepmark.ground.processes import kill_all, marked, send, tie_child
from stepmark.ground.waiting import wait_until

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

    The files are free of secrets when this returns.

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
    try:
        left_s = started_s + limit_s - time.monotonic()
        wait_until(lambda: signals or process.poll() is not None, left_s, _POLL_S)
        interrupted = bool(signals)
        timed_out = process.poll() is None and not interrupted
        if timed_out or interrupted:
            # To the command alone, which ends its own children.
            process.send_signal(signal.SIGTERM if timed_out else signal.SIGINT)
            before = max(1, len(signals))
            wait_until(
                lambda: len(signals) > before or process.poll() is not None, grace_s, _POLL_S
            )
    finally:
        survivors = tuple(kill_all([process], MARK, token))
        for file in (out, err):
            redact_file(file)
    return Ended(
        exit_code=process.poll(),
        seconds=time.monotonic() - started_s,
        timed_out=timed_out,
        interrupted=interrupted,
        survivors=survivors,
    )


_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_MAX_INTERRUPTS = 3  # a further one kills the command


def run_in_foreground(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> int:
    """Run it to its end, with our own input and output.

    Returns its exit code, or 128 + the number of the signal that ended it.

    stdout and stderr: descriptors for its output instead of this process's own.
    A signal to this process goes to the command: SIGINT to its process group, as from a
    terminal, others to the command alone. It is in a session of its own, so that it gets each
    once. After a signal, to this process or one that ended the command, what it has started is
    ended too: SIGTERM, and SIGKILL 30 s later. Raises OSError. Main thread only.
    """
    token = secrets.token_hex(8)
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def deliver(number: int) -> None:
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            if received.count(signal.SIGINT) > _MAX_INTERRUPTS:
                os.killpg(process.pid, signal.SIGKILL)
            elif number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            deliver(number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            env={**environment, MARK: token},
            start_new_session=True,
            preexec_fn=tie_child(signal.SIGTERM),  # noqa: PLW1509, two system calls
        )
        for number in tuple(received):  # that came before there was a process
            deliver(number)
        code = process.wait()
        if received or code < 0:
            for other in marked(MARK, token):  # what the command has left behind
                send(other, signal.SIGTERM)
            wait_until(lambda: not marked(MARK, token), GRACE_S, _POLL_S)
            kill_all([process], MARK, token)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
