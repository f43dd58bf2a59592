"""The process of a test session that has imported torch, and from which programs are forked.

Importing torch costs seconds of CPU time, a fork milliseconds. What is forked runs a module, as
`python -m` does, and becomes our child: a rank of a pool (tests/ranks_pool.py), a rank of a
command that runs in this process (`start_rank`), or a command.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from stepmark.ground.processes import tie_to_parent

ROOT = Path(__file__).parents[1]
PR_SET_NAME = 15  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
RANK_NAME = "rank "  # with the number: the environment that others see is the server's
FORKED = "STEPMARK_TEST_FORKED"  # pid of a command that was forked from a server
RANK_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # two cores, four ranks
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers that import torch again
}
# FSDP, pipelines and some operators import torch._dynamo when they are used, for half as long
# as torch takes.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "stepmark.measuring.measure",
    "stepmark.measuring.heartbeat",
    "stepmark.store.plans",
    "stepmark.store.runs",
    "stepmark.measuring.ranks",
    "stepmark.collectives.bench.bench",
    "stepmark.operators.bench.bench",
    "stepmark.training.bench",
)


class ForkedProcess(subprocess.Popen[bytes]):
    """A child that we did not start ourselves."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid, self.returncode, self.args = pid, None, command
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class ForkServer:
    """The process that ranks are forked from. It never starts a thread or a device context."""

    def __init__(self) -> None:
        # A rank whose parent ends at once is handed to us.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        here, there = socket.socketpair()
        with there:
            self._process = _forked(here, there) if _is_forked() else _started(there)
        self._pipe = Connection(here.detach())

    def load(self, modules: Sequence[str]) -> None:
        """Import modules that all later ranks will have."""
        self._ask("load", list(modules))

    def fork_command(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        streams: tuple[int, int],
        stdin: int | None = None,
    ) -> ForkedProcess:
        """Start `python -m WORDS` in a folder, as our child; streams: stdout and stderr.

        stdin: a socket, or nothing to read.
        """
        values = os.getpid(), list(words), dict(environment), folder
        with open(os.devnull) as nothing:
            handles = (nothing.fileno() if stdin is None else stdin, *streams)
            return ForkedProcess(self._ask("command", *values, handles=handles), words)

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()

    def _ask(self, request: str, *values: Any, handles: Sequence[int] = ()) -> Any:
        self._pipe.send((request, *values))
        for handle in handles:
            send_handle(self._pipe, handle, None)  # type: ignore[arg-type]
        return self._pipe.recv()


@functools.cache
def server() -> ForkServer:
    """Return the fork server of this test session."""
    new = ForkServer()
    atexit.register(new.close)
    return new


def start_rank(
    command: Sequence[str], environment: Mapping[str, str], listener: socket.socket | None
) -> "subprocess.Popen[bytes]":
    """In place of measuring/local_ranks.py's, where ranks meet through a file.

    All else is as it does it: a session, the environment, our streams, and death with us.
    """
    assert listener is None, "needs /dev/shm"
    words = command[2:]  # behind "python -m"
    return server().fork_command(words, environment, os.getcwd(), (1, 2))


def _started(pipe: socket.socket) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server", str(pipe.fileno())],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            # Large tensors are not given back: half of the time would be that of page faults.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**40),
        }
        | RANK_SETTINGS,
        pass_fds=[pipe.fileno()],
    )


def _forked(ours: socket.socket, pipe: socket.socket) -> "subprocess.Popen[bytes]":
    """Fork the server of a command that was forked itself and has no thread yet."""
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setpgid(0, 0)  # a terminal's Ctrl-C is the command's
        _serve(Connection(pipe.detach()))
    return ForkedProcess(pid, ())


def _is_forked() -> bool:
    return os.environ.get(FORKED) == str(os.getpid())


# In the server


def _serve(requests: Connection) -> None:
    """Fork programs until the test session ends, whose death is theirs."""
    for module in PRELOADED:
        importlib.import_module(module)
    _keep_shared()
    while True:
        try:
            request, *values = requests.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if request == "command":
            requests.send(_fork_command(requests, *values))
        else:
            for module in values[0]:
                importlib.import_module(module)
            _keep_shared()
            requests.send(None)


def _keep_shared() -> None:
    """A collection in a fork would visit, and so copy, all that was imported here."""
    gc.collect()
    gc.freeze()


def _fork_command(
    requests: Connection,
    parent: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
) -> int:
    """Fork twice: a rank whose parent has ended becomes the child of the process that asks."""
    streams = [recv_handle(requests) for _ in range(3)]
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            requests.close()
            _be_command(parent, words, environment, folder, streams)
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 20))
    for handle in (told, tell, *streams):
        os.close(handle)
    return pid


def _be_command(
    parent: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    streams: Sequence[int],
) -> None:
    """Run the module as `python -m` does. Never returns."""
    code = 1
    try:
        while os.getppid() != parent:
            time.sleep(1e-3)
        tie_to_parent(signal.SIGKILL)()
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.environ[FORKED] = str(os.getpid())
        if rank := environment.get("RANK"):
            name = f"{RANK_NAME}{rank}".encode()
            ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:0] = [path for path in added if path not in sys.path]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001  as the interpreter ends a program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
