"""Run a user's command with its own input and output; signals to this process reach it."""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from stepmark.ground import processes
from stepmark.ground.processes import marked, send, tie_child
from stepmark.measuring.child import GRACE_S, MARK

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_MAX_INTERRUPTS = 3  # a further one kills the command
_POLL_S = 0.1


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> int:
    """Run it to its end; return its exit code, or 128 + the number of the signal that ended it.

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

    def take(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            deliver(number)

    previous = {number: signal.signal(number, take) for number in _SIGNALS}
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
            _end_rest(process, token)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _end_rest(process: "subprocess.Popen[bytes]", token: str) -> None:
    """End the processes that the command has left behind."""
    for other in marked(MARK, token):
        send(other, signal.SIGTERM)
    end_s = time.monotonic() + GRACE_S
    while marked(MARK, token) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    processes.kill_all([process], MARK, token)
