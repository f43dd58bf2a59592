"""Ranks for tests, forked from one process that has imported torch.

Importing torch costs seconds of CPU time, a fork milliseconds. Each rank is a process in one
gloo group that runs the functions it is given, by name, until its pool is closed. A pool keeps
whatever its functions change in a module, so code that patches torch gets a pool of its own.
"""

import atexit
import contextlib
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# FSDP and pipelines import torch._dynamo when they are used, for half as long as torch takes.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "stepmark.bench.ranks",
)


class RankDiedError(Exception):
    """A rank ended, or did not answer in time: the others may wait for it for ever."""


class RankTemplate:
    """The process that ranks are forked from. It never starts a thread or a device context."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks_pool", str(there.fileno())],
                cwd=ROOT,
                env=os.environ
                | {
                    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                    "OMP_NUM_THREADS": "1",  # two cores, four ranks
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers that import torch again
                },
                pass_fds=[there.fileno()],
            )
        self._pipe = Connection(here.detach())

    def load(self, modules: Sequence[str]) -> None:
        """Import modules that all later ranks will have."""
        self._pipe.send(("load", list(modules)))
        self._pipe.recv()

    def fork(
        self, environment: Mapping[str, str], device_type: str, pipe: int, stderr: int
    ) -> int:
        """Start one rank and return its process id."""
        self._pipe.send(("fork", dict(environment), device_type))
        for handle in (pipe, stderr):
            send_handle(self._pipe, handle, None)  # type: ignore[arg-type]
        pid: int = self._pipe.recv()
        return pid

    def end(self, pids: Sequence[int], grace_s: float) -> None:
        """Wait for processes to end; kill those that do not."""
        self._pipe.send(("end", list(pids), grace_s))
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()


@functools.cache
def rank_template() -> RankTemplate:
    """The template of this test session."""
    template = RankTemplate()
    atexit.register(template.close)
    return template


class Pool:
    """`num_ranks` processes. After a death there is nothing to do but to close it."""

    def __init__(
        self,
        num_ranks: int,
        device_type: str = "cpu",
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """imports: modules that ranks need and that take long to import."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
        common = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            **(environment or {}),
        }
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        rank_template().load(imports)
        self._pending: dict[Any, int] = {}  # ranks that have not answered
        self._gone: list[int] = []
        for rank in range(num_ranks):
            here, there = socket.socketpair()
            with there:
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                pid = rank_template().fork(
                    common | place, device_type, there.fileno(), self._stderr.fileno()
                )
            self._pids.append(pid)
            self._pipes.append(Connection(here.detach()))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_whole(self) -> bool:
        """Whether all ranks wait for the next function."""
        return not (self._pending or self._gone)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 30.0,
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """Run function(ranks, *arguments) on all ranks at once; return its results by rank.

        Raises RankDiedError for a rank that ends, unless it is of the `dying`, who give None,
        and AssertionError with the tracebacks where it raises.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function.__module__, function.__qualname__, arguments))
        answers: list[Any] = [None] * len(self._pipes)
        waiting = self._pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                text = self._stderr_text()
                raise RankDiedError(f"no answer from {sorted(waiting.values())}{text}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._gone.append(rank)
                    if rank not in dying:
                        raise RankDiedError(f"rank {rank} died{self._stderr_text()}") from None
        broken = [answer for answer in answers if isinstance(answer, _Raised)]
        assert not broken, "\n".join(answer.text for answer in broken)
        return answers

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not."""
        grace_s = 5.0 if self.is_whole else 0.0
        for pipe in self._pipes:
            pipe.close()
        rank_template().end(self._pids, grace_s)
        self._stderr.close()

    def _stderr_text(self) -> str:
        self._stderr.seek(0)
        return "\n" + self._stderr.read().decode(errors="replace")[-4000:]


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# In the template


def _be_template(requests: Connection) -> None:
    """Fork ranks and collect them, until the test session ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    alive: set[int] = set()
    while True:
        try:
            command, *values = requests.recv()
        except (EOFError, ConnectionResetError):
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if command == "fork":
            alive.add(_fork_rank(requests, *values))
        elif command == "load":
            for module in values[0]:
                importlib.import_module(module)
            requests.send(None)
        else:
            pids, grace_s = values
            for pid in pids:
                _reap(pid, time.monotonic() + grace_s)
                alive.discard(pid)
            requests.send(None)


def _fork_rank(requests: Connection, environment: dict[str, str], device_type: str) -> int:
    pipe, stderr = recv_handle(requests), recv_handle(requests)
    pid = os.fork()
    if pid == 0:
        requests.close()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.update(environment)
        _serve(Connection(pipe), device_type)
    os.close(pipe)
    os.close(stderr)
    requests.send(pid)
    return pid


def _reap(pid: int, end: float) -> None:
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(2e-3)


def _serve(pipe: Connection, device_type: str) -> None:
    """Run what the test asks for, in a rank. Never returns."""
    from stepmark.bench.ranks import join

    try:
        ranks = join(device_type)
    except Exception:  # noqa: BLE001  in the pool's stderr
        traceback.print_exc()
        os._exit(1)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # gloo's threads may wait for peers that are gone
        try:
            pipe.send(getattr(importlib.import_module(module), name)(ranks, *arguments))
        except Exception:  # noqa: BLE001  told to the test
            pipe.send(_Raised(f"rank {ranks.rank}: {traceback.format_exc()}"))


if __name__ == "__main__":
    # Under its own name, so that both ends know _Raised as the same class.
    module = importlib.import_module("tests.ranks_pool")
    module._be_template(Connection(int(sys.argv[1])))
