"""Ranks of a command that runs in this process, forked from a process that has imported torch.

`python -m stepmark.app.rank PLAN RUN` spends seconds on importing torch, a fork milliseconds.
All else is as launch/local_ranks.py does it: a session, the environment, our standard streams,
and death with us. A rank becomes our child, so that its state and exit code are read as ever.
"""

import atexit
import ctypes
import functools
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

from stepmark.launch.processes import tie_to_parent

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
# torch._dynamo, which some operators import, takes as long as torch itself.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "stepmark.bench.collectives.bench",
    "stepmark.bench.operators.bench",
    "stepmark.bench.training.bench",
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
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_ranks", str(there.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
                pass_fds=[there.fileno()],
            )
        self._pipe = Connection(here.detach())

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS`; streams: stdout, stderr and what is passed on."""
        words = list(command[2:])  # behind "python -m"
        self._pipe.send((os.getpid(), words, dict(environment), os.getcwd(), len(streams)))
        for stream in streams:
            send_handle(self._pipe, stream, None)  # type: ignore[arg-type]
        return ForkedProcess(self._pipe.recv(), command)

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()


@functools.cache
def server() -> ForkServer:
    """The fork server of this test session."""
    found = ForkServer()
    atexit.register(found.close)
    return found


def start(
    command: Sequence[str], environment: Mapping[str, str], listener: socket.socket | None
) -> "subprocess.Popen[bytes]":
    """In place of launch/local_ranks.py's, where ranks meet through a file."""
    assert listener is None, "needs /dev/shm"
    return server().fork(command, environment, (1, 2))


# In the server


def _serve(requests: Connection) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    while True:
        try:
            parent, words, environment, folder, count = requests.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        streams = [recv_handle(requests) for _ in range(count)]
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _be_rank(parent, words, environment, folder, streams)
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # only now is the rank the child of who asked
        requests.send(int(os.read(told, 20)))
        os.close(told)
        os.close(tell)
        for stream in streams:
            os.close(stream)


def _be_rank(
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
        added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:0] = [path for path in added if path not in sys.path]
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stream in enumerate((nothing, *streams)):
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
