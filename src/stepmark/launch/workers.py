"""The ranks of one launch on this host: child processes, their reports and exit codes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from stepmark.launch import heartbeat
from stepmark.launch.heartbeat import Beat, HeartbeatStore
from stepmark.launch.processes import kill_all, tie_child

# Rendezvous of ranks: a FileStore, or rank 0's TCPStore on a socket that the parent has bound.
STORE_FILE = "STEPMARK_STORE_FILE"
STORE_PORT, STORE_SOCKET = "STEPMARK_STORE_PORT", "STEPMARK_STORE_SOCKET"


class Workers:
    """`python -m MODULE ARGUMENTS` per rank, with RANK and WORLD_SIZE as torchrun sets them.

    Every rank is in a session of its own: a terminal's Ctrl-C reaches only the parent. The
    kernel kills it when the parent dies.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], num_ranks: int, *, first: int = 0
    ) -> None:
        self.num_ranks = num_ranks
        self.store = HeartbeatStore.new()
        self.started_s = time.monotonic()
        self.beats: dict[int, Beat] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", module, *arguments]
        shared = _environment(num_ranks) | {
            heartbeat.FOLDER: str(self.store.folder),
            heartbeat.FIRST: str(first),
        }
        listener = None if self.store.is_in_memory else socket.create_server(("127.0.0.1", 0))
        if listener is None:
            shared[STORE_FILE] = f"{self.store.folder}/rendezvous"
        else:
            shared[STORE_PORT] = str(listener.getsockname()[1])
        try:
            for rank in range(num_ranks):
                process = _start(command, shared, rank, listener if rank == 0 else None)
                self._processes.append(process)
        except BaseException:
            self.kill()
            self.store.remove()
            raise
        finally:
            if listener is not None:
                listener.close()

    def look(self) -> None:
        """Update exit codes and beats."""
        # Exit codes first: the last beat of a process that has ended is then included.
        for process in self._processes:
            process.poll()
        self.beats = self.store.beats(self.num_ranks)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def return_code(self, rank: int) -> int | None:
        """Return None while the process lives; negative for a signal, as of the last `look`."""
        return self._processes[rank].returncode

    def working(self) -> list[int]:
        """Return the ranks whose process lives."""
        return [rank for rank in range(self.num_ranks) if self.return_code(rank) is None]

    def state(self, rank: int) -> str:
        """Return psutil's name for the state of a living rank, else ""."""
        try:
            return str(psutil.Process(self.pid(rank)).status())
        except psutil.Error:
            return ""

    @property
    def exit_code(self) -> int | None:
        """Exit code of rank 0; None until it has reported that its work is done."""
        return self.beats[0].exit_code if 0 in self.beats else None

    @property
    def restart_at(self) -> int | None:
        return self.beats[0].restart_at if 0 in self.beats else None

    def send(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._processes[rank].send_signal(number)

    def kill(self) -> list[int]:
        """SIGKILL the ranks and their children. Return the pids that survive 10 s."""
        return kill_all(self._processes, heartbeat.FOLDER, str(self.store.folder))


def _start(
    command: Sequence[str], shared: Mapping[str, str], rank: int, listener: socket.socket | None
) -> "subprocess.Popen[bytes]":
    environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if listener is not None:
        environment[STORE_SOCKET] = str(listener.fileno())
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if listener is None else (listener.fileno(),),
        # Two system calls, loaded before the fork: safe even in a parent with threads.
        preexec_fn=tie_child(signal.SIGKILL),  # noqa: PLW1509
    )


def _environment(num_ranks: int) -> dict[str, str]:
    """Return our environment with this package importable and cores shared among ranks."""
    environment = dict(os.environ)
    if num_ranks > 1:
        cores = os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(num_ranks)
    return environment
