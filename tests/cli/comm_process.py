"""`stepmark comm` as processes that a test can hurt."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from tests import fork_server

from stepmark.ground import processes

from .process import ROOT, environment, only_run

LIMIT_S = 120.0  # busy machines


class Running:
    """A started command whose ranks can be found by rank."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        torchrun: int = 0,
        hook: str = "",
        is_forking: bool = False,
    ):
        """torchrun: so many ranks under a launcher of its own, as a user starts one.

        hook: a module that ranks import before they begin; is_forking: the command, or the
        launcher, and its ranks are forked from a process that has imported torch.
        """
        self.folder = cwd
        self._mark = ("STEPMARK_TEST", str(cwd))
        self._out, self._err = (cwd / "stdout").open("w"), (cwd / "stderr").open("w")
        own = {"STEPMARK_TEST": str(cwd), "PYTHONPATH": _paths(), "STEPMARK_TEST_HOOK": hook}
        launcher = ["--standalone", f"--nproc-per-node={torchrun}", "-m", "stepmark"]
        if is_forking:
            module = ["tests.forking", "stepmark"]
            if torchrun:
                module = ["tests.cli.forking_torchrun", *launcher]
            server = fork_server.server()
            self._others: set[psutil.Process] | None = _children()
            self.process: subprocess.Popen[bytes] = server.fork_command(
                [*module, *arguments],
                environment() | own,
                str(cwd),
                (self._out.fileno(), self._err.fileno()),
            )
            return
        self._others = None
        module = ["torch.distributed.run", *launcher] if torchrun else ["stepmark"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            cwd=cwd,
            env=environment() | own,
            stdout=self._out,
            stderr=self._err,
            process_group=0,  # as a shell starts it
        )

    def pids(self) -> dict[int, int]:
        """Living ranks."""
        found = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if self._others is not None:
                    _, _, rank = process.name().partition(fork_server.RANK_NAME)
                else:
                    rank = process.environ().get("RANK", "")
                if rank:
                    found[int(rank)] = process.pid
        return found

    def watch_folders(self) -> set[Path]:
        """Where its ranks report; a parent that is killed cannot remove it."""
        ranks = [psutil.Process(pid).environ() for pid in self.pids().values()]
        return {Path(rank["STEPMARK_HEARTBEATS"]) for rank in ranks}

    def left(self) -> list[int]:
        """What still lives of it, the launcher too."""
        return [process.pid for process in self._processes()]

    def _processes(self) -> list[psutil.Process]:
        """Return its processes by their mark; forked ones, whose is the server's, as children.

        Whose parent ends becomes our child, as a fork server asks the kernel.
        """
        if self._others is None:
            return processes.marked(*self._mark)
        return [one for one in _children() - self._others if processes.is_alive(one)]

    def hurt(self, rank: int, number: signal.Signals, *, after: int) -> float:
        """Send a signal to a rank in the middle of the case after so many records; when."""
        self.wait_for(after)
        time.sleep(0.3)  # a case takes a second
        assert len(self.records()) == after, "the case was over before it could be hurt"
        os.kill(self.pids()[rank], number)
        return time.monotonic()

    def records(self) -> list[dict[str, Any]]:
        files = list(self.folder.glob("runs/*/records.jsonl"))
        lines = files[0].read_text().split("\n")[:-1] if files else []
        return [json.loads(line) for line in lines]

    def wait_for(self, count: int) -> float:
        """Until there are so many records; when that was."""
        end_s = time.monotonic() + LIMIT_S
        while len(self.records()) < count:
            assert self.process.poll() is None, self.err()
            assert time.monotonic() < end_s, f"no record {count} in {LIMIT_S} s: {self.err()}"
            time.sleep(0.02)
        return time.monotonic()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code; nothing of it is left."""
        code = self.process.wait(limit_s)
        self._out.close()
        self._err.close()
        end_s = time.monotonic() + 3
        while self.left() and time.monotonic() < end_s:
            time.sleep(0.02)
        assert self.left() == []
        return code

    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def run(self) -> Path:
        run: Path = only_run(self.folder / "runs")
        return run


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def outcomes(records: list[dict[str, Any]]) -> list[str]:
    """measured, or why not."""
    return [str(record.get("cause") or record["kind"]) for record in records]


def _paths() -> str:
    return f"{ROOT / 'src'}:{ROOT}"
