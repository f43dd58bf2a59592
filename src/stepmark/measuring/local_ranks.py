"""Ranks of this host: child processes, their reports, stacks and exit codes."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.processes import kill_all, tie_child
from stepmark.ground.units import MIB
from stepmark.ground.waiting import wait_until
from stepmark.measuring import heartbeat
from stepmark.measuring.heartbeat import Heartbeat, HeartbeatStore
from stepmark.measuring.job import KEY

# Rendezvous of ranks: a FileStore, or rank 0's TCPStore on a socket that the parent has bound.
STORE_FILE = "STEPMARK_STORE_FILE"
STORE_HOST = "STEPMARK_STORE_HOST"
STORE_PORT = "STEPMARK_STORE_PORT"
STORE_SOCKET = "STEPMARK_STORE_SOCKET"

# What ranks can run: another host names a key of it, never a module.
ENTRIES = {"rank": "stepmark.measuring.rank"}

_RANK_BYTES = 128 * MIB  # of a process that has imported torch, beyond what it shares
_STACKS_S = 1.0
_FLIGHT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where the ranks of all hosts meet. listener: the socket, on the host of rank 0."""

    host: str
    port: int
    listener: socket.socket | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which ranks of how many, and the position in the plan at which they begin."""

    numbers: range
    world_size: int
    first: int = 0


class LocalRanks:
    """`python -m MODULE PLAN ARGUMENTS` per rank, with RANK and WORLD_SIZE as torchrun's.

    Every rank is in a session of its own: a terminal's Ctrl-C reaches only the parent. The
    kernel kills it when the parent dies.
    """

    name = ""  # of the host; "" for this one
    lost = ""  # why the host is lost

    def __init__(
        self,
        command: Sequence[str],
        ranks: Ranks,
        store: Store | None,
        environment: Mapping[str, str],
    ) -> None:
        """store: of a job of many hosts; None for one of our own.

        Raises ConfigError for more ranks than this host has memory for.
        """
        most = psutil.virtual_memory().available // _RANK_BYTES
        if len(ranks.numbers) > max(1, most):
            text = f"at most {most} ranks on this host, whose free memory holds no more"
            raise ConfigError("nproc", ranks.world_size, text)
        self.numbers = ranks.numbers
        self.beats: dict[int, Heartbeat] = {}
        self._store = HeartbeatStore.new()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        shared = {
            **_environment(ranks),
            **environment,
            heartbeat.FOLDER: str(self._store.folder),
            heartbeat.FIRST: str(ranks.first),
        }
        listener = None
        if store is None and self._store.folder.parent == heartbeat.MEMORY:
            shared[STORE_FILE] = f"{self._store.folder}/rendezvous"
        else:
            listener = store.listener if store else socket.create_server(("127.0.0.1", 0))
            port = store.port if store else listener.getsockname()[1] if listener else 0
            shared |= {STORE_HOST: store.host if store else "127.0.0.1", STORE_PORT: str(port)}
        try:
            for local, rank in enumerate(ranks.numbers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
                process = _start(command, {**shared, **own}, None if rank else listener)
                self._processes[rank] = process
        except BaseException:
            self.kill()
            raise
        finally:
            if listener is not None:
                listener.close()

    def poll(self) -> None:
        """Update exit codes and beats."""
        # Exit codes first: the last beat of a process that has ended is then included.
        for process in self._processes.values():
            process.poll()
        self.beats = self._store.beats(self.numbers)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def return_code(self, rank: int) -> int | None:
        """Return None while the process lives; negative for a signal, as of the last `poll`."""
        return self._processes[rank].returncode

    def state(self, rank: int) -> str:
        """Return psutil's name for the state of a living rank, else ""."""
        try:
            return str(psutil.Process(self.pid(rank)).status())
        except psutil.Error:
            return ""

    def send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._processes[rank].send_signal(number)

    def stop(self) -> None:
        """Ask rank 0 to stop after the present case."""
        self._store.write(heartbeat.STOP, "")

    def begin_diagnosis(self, ranks: Sequence[int]) -> None:
        """Do nothing: `diagnosis` does all. Ranks of other hosts begin here."""

    def diagnosis(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return stacks and flight recorders of these ranks that answer within 3 s.

        Ranks then abort communicators: no kernel outlives a kill.
        """
        store = self._store
        # By faulthandler, which works while the main thread is blocked in C.
        self.send(signal.SIGUSR1, ranks)
        names = {rank: f"{heartbeat.STACK}-{rank}" for rank in ranks}
        wait_until(lambda: all(map(store.read, names.values())), _STACKS_S, 0.02)
        time.sleep(0.1)  # time to finish writing
        stacks = {rank: store.read(name) for rank, name in names.items()}
        store.write(heartbeat.ABORT, "")
        wait_until(
            lambda: all(store.has(f"{heartbeat.GAVE_UP}-{r}") for r in ranks), _FLIGHT_S, 0.02
        )
        flight = {r: store.read(f"{heartbeat.FLIGHT}-{r}.json") for r in self.numbers}
        return (
            {rank: text for rank, text in stacks.items() if text},
            {rank: text for rank, text in flight.items() if text},
        )

    def begin_kill(self) -> None:
        """Do nothing: `kill` does all. Ranks of other hosts begin here."""

    def kill(self) -> list[int]:
        """SIGKILL the ranks and their children. Return the pids that survive 10 s."""
        processes = list(self._processes.values())
        survivors = kill_all(processes, heartbeat.FOLDER, str(self._store.folder))
        self._store.remove()
        return survivors


def command_of(entry: str, plan: Path | str, arguments: Sequence[str]) -> list[str]:
    """Return `python -m MODULE PLAN ARGUMENTS`. Raises ConfigError for an unknown entry."""
    if entry not in ENTRIES:
        raise not_one_of("entry", entry, ENTRIES)
    return [sys.executable, "-m", ENTRIES[entry], str(plan), *arguments]


def _start(
    command: Sequence[str], environment: Mapping[str, str], listener: socket.socket | None
) -> "subprocess.Popen[bytes]":
    if listener is not None:
        environment = {**environment, STORE_SOCKET: str(listener.fileno())}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if listener is None else (listener.fileno(),),
        # Two system calls, loaded before the fork: safe even in a parent with threads.
        preexec_fn=tie_child(signal.SIGKILL),  # noqa: PLW1509
    )


def _environment(ranks: Ranks) -> dict[str, str]:
    """Return our environment with this package importable and cores shared among ranks."""
    environment = dict(os.environ)
    count = len(ranks.numbers)
    if ranks.world_size > 1:
        cores = os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Users of the same host can connect to the ranks.
    environment.setdefault(KEY, secrets.token_hex(16))
    environment["WORLD_SIZE"] = str(ranks.world_size)
    environment["LOCAL_WORLD_SIZE"] = str(count)
    return environment
