"""Ranks that stay up between tests: torch takes seconds to import, a test milliseconds.

Each is a process in one gloo group that runs whatever function it is told, by name.
"""

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class RankDiedError(Exception):
    """A rank ended, or did not answer in time: the others may wait for it for ever."""


class Pool:
    """`num_ranks` processes. After a death there is nothing to do but to close it."""

    def __init__(self, num_ranks: int, device_type: str = "cpu") -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._pending: dict[Any, int] = {}  # ranks that have not answered
        self._gone: list[int] = []
        for rank in range(num_ranks):
            here, there = socket.socketpair()
            module = ["-m", "tests.bench.collectives.pool"]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *module, str(there.fileno()), device_type],
                    cwd=ROOT,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    pass_fds=[there.fileno()],
                    stderr=self._stderr,
                )
            )
            there.close()
            self._pipes.append(Connection(here.detach()))

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
        """What function(ranks, *arguments) returns, by rank. Runs it on all ranks at once.

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
                raise RankDiedError(f"no answer from {sorted(waiting.values())}{self._said()}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._gone.append(rank)
                    if rank not in dying:
                        raise RankDiedError(f"rank {rank} died{self._said()}") from None
        broken = [answer for answer in answers if isinstance(answer, _Raised)]
        assert not broken, "\n".join(one.text for one in broken)
        return answers

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not."""
        whole = self.is_whole
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(5 if whole else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stderr.close()

    def _said(self) -> str:
        self._stderr.seek(0)
        return "\n" + self._stderr.read().decode(errors="replace")[-4000:]


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _serve(pipe: Connection, device_type: str) -> None:
    from stepmark.bench.ranks import join

    ranks = join(device_type)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # gloo's threads may wait for peers that are gone
        try:
            answer = getattr(importlib.import_module(module), name)(ranks, *arguments)
        except Exception:  # noqa: BLE001  told to the test
            answer = _Raised(f"rank {ranks.rank}: {traceback.format_exc()}")
        pipe.send(answer)


if __name__ == "__main__":
    # Under its own name, so that both ends know _Raised as the same class.
    serve = importlib.import_module("tests.bench.collectives.pool")
    serve._serve(Connection(int(sys.argv[1])), sys.argv[2])
