"""Ranks for tests, forked from one process that has imported torch (tests/fork_server.py).

Each rank is a process in one gloo group that runs the functions it is given, by name, until its
pool is closed. A pool keeps whatever its functions change in a module, so code that patches
torch gets a pool of its own.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fork_server import RANK_SETTINGS, server


class RankDiedError(Exception):
    """A rank ended, or did not answer in time: the others may wait for it for ever."""


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
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        server().load(imports)
        self._pending: dict[Any, int] = {}  # ranks that have not answered
        self._gone: list[int] = []
        for rank in range(num_ranks):
            here, there = socket.socketpair()
            with there:
                process = server().fork_command(
                    [__name__, str(rank), device_type],
                    os.environ | RANK_SETTINGS | common,
                    os.getcwd(),
                    (1, self._stderr.fileno()),
                    stdin=there.fileno(),
                )
            self._ranks.append(process)
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
        end = time.monotonic() + grace_s
        for process in self._ranks:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
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


# In a rank


def serve(pipe: Connection, rank: str, device_type: str) -> None:
    """Run what the test asks for. Never returns."""
    from stepmark.measuring.ranks import join

    # Not from the start: a process with a rank in its environment is taken for a command's.
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
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
    # What a rank answers is of this module, not of `__main__`.
    importlib.import_module("tests.ranks_pool").serve(Connection(0), *sys.argv[1:])
