"""A job of one stepmark process per host, which a test can hurt."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.cluster.network import Host

from stepmark.ground import processes

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
_PORT = 23_400


class Job:
    """`stepmark WORDS` on each host, as a script of a launcher starts it."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        *words: str,
        absent: int = 0,
        join_s: int = 60,
        nproc: int = 1,
        leader_folder: Path | None = None,
        key: str = "",
    ) -> None:
        """nproc: ranks per host. absent: so many of the last hosts are not started.

        leader_folder: where the leader works, if not in a folder of its host. key: of the last
        host, if not that of all.
        """
        self.folder, self._token = leader_folder or folder, secrets.token_hex(8)
        self.agents: list[subprocess.Popen[bytes]] = []
        self._files = []
        shared = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "STEPMARK_TEST": self._token,
            "STEPMARK_HOSTS": ",".join(host.address for host in hosts),
            "STEPMARK_PORT": str(_PORT),
            "STEPMARK_KEY": secrets.token_hex(16),
            "STEPMARK_JOIN_S": str(join_s),
            "STEPMARK_NPROC": str(nproc),
        }
        for rank, host in enumerate(hosts[: len(hosts) - absent]):
            own = folder / host.name
            own.mkdir()
            out, err = (own / "stdout").open("wb"), (own / "stderr").open("wb")
            self._files += [out, err]
            keys = {"STEPMARK_KEY": key} if key and host == hosts[-1] else {}
            process = subprocess.Popen(
                host.inside(sys.executable, "-m", "stepmark", *words),
                cwd=leader_folder if leader_folder and rank == 0 else own,
                env=shared | {"STEPMARK_HOST_RANK": str(rank)} | keys,
                stdout=out,
                stderr=err,
                process_group=0,
            )
            self.agents.append(process)
        self._logs = [folder / host.name for host in hosts]
        self.folder = leader_folder or folder / hosts[0].name

    def ranks(self) -> dict[int, int]:
        """Return the pids of living ranks."""
        pids = {}
        for process in processes.marked("STEPMARK_TEST", self._token):
            with contextlib.suppress(psutil.Error):
                if rank := process.environ().get("RANK"):
                    pids[int(rank)] = process.pid
        return pids

    def records(self) -> list[dict[str, Any]]:
        files = list(self.folder.glob("runs/*/records.jsonl"))
        lines = files[0].read_text().split("\n")[:-1] if files else []
        return [json.loads(line) for line in lines]

    def outcomes(self) -> list[str]:
        return [str(record.get("cause") or record["kind"]) for record in self.records()]

    def wait_for(self, count: int) -> None:
        """Wait until there are so many records."""
        end_s = time.monotonic() + LIMIT_S
        while len(self.records()) < count:
            assert self.agents[0].poll() is None, self.err()
            assert time.monotonic() < end_s, f"no record {count} in {LIMIT_S} s: {self.err()}"
            time.sleep(0.02)

    def hurt(self, rank: int, number: signal.Signals, *, after: int) -> float:
        """Send a signal to a rank in the case after so many records. Returns when."""
        self.wait_for(after)
        time.sleep(0.3)
        os.kill(self.ranks()[rank], number)
        return time.monotonic()

    def end(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the exit codes by host; nothing of the job lives any more."""
        end_s = time.monotonic() + limit_s
        codes = [agent.wait(max(0.1, end_s - time.monotonic())) for agent in self.agents]
        for file in self._files:
            file.close()
        assert self.left() == []
        return codes

    def left(self) -> list[int]:
        """Return the pids of all that still lives of the job."""
        return [process.pid for process in processes.marked("STEPMARK_TEST", self._token)]

    def kill(self) -> None:
        for process in processes.marked("STEPMARK_TEST", self._token):
            processes.send(process, signal.SIGKILL)

    def err(self, host: int = 0) -> str:
        return (self._logs[host] / "stderr").read_text()

    def out(self, host: int = 0) -> str:
        return (self._logs[host] / "stdout").read_text()
