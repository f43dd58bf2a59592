"""Processes of this host that carry a mark in their environment, in any session."""

import contextlib
import signal

import psutil


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return all living processes that have NAME=value in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and is_alive(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie, and for a later process with the same pid."""
    try:
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to this process, never to a later one with its pid."""
    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(number)
