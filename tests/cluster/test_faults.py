"""What breaks on many hosts: each fault ends on all of them in bounded time, and is recorded.

docs/howto/many-hosts.md has the table of these faults.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster.job import Job
from tests.cluster.network import Host, sh

from stepmark.measuring.channel import SILENCE_S

pytestmark = pytest.mark.cluster

TIMEOUT_S = 4.0
# Each case samples for a second.
COMM = ("comm", "all_reduce", "-b", "1K", "-e", "8K", "-f", "2", "--device", "cpu")
WORDS = (*COMM, "--timeout", f"{TIMEOUT_S:g}s")


@contextmanager
def job(hosts: list[Host], folder: Path, *words: str, **options: object) -> Iterator[Job]:
    running = Job(hosts, folder, *words, **options)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.kill()


def wait_for_record(running: Job, count: int, since_s: float) -> float:
    running.wait_for(count)
    return time.monotonic() - since_s


def test_a_killed_rank_costs_one_case(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS) as running:
        hurt_s = running.hurt(1, signal.SIGKILL, after=1)
        assert wait_for_record(running, 2, hurt_s) < 5.0
        assert running.end() == [3, 3], running.err()
    assert running.outcomes() == ["measured", "lost rank", "measured", "measured"]
    lost = running.records()[1]
    assert lost["ranks"] == [1]
    assert f"on {hosts[1].address}) was killed by signal 9 (SIGKILL)" in lost["message"]


def test_a_stopped_rank_costs_one_case(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS) as running:
        hurt_s = running.hurt(1, signal.SIGSTOP, after=1)
        assert wait_for_record(running, 2, hurt_s) < TIMEOUT_S + 10.0
        assert running.end() == [3, 3], running.err()
    assert running.outcomes() == ["measured", "timeout", "measured", "measured"]
    hung = running.records()[1]
    assert hung["ranks"] == [1]
    assert "rank 1 stopped (SIGSTOP)" in hung["message"]
    assert "rank 0:\n" in hung["traceback"]
    assert "distributed_c10d.py" in hung["traceback"], "it waits for rank 1 in a collective"


def test_a_killed_agent_ends_the_job(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS) as running:
        running.wait_for(1)
        time.sleep(0.3)
        hurt_s = time.monotonic()
        running.agents[1].kill()
        codes = running.end(15)
        assert time.monotonic() - hurt_s < 10.0
    assert codes == [3, -signal.SIGKILL]
    assert running.outcomes()[0] == "measured"
    assert "left out" in running.err()
    assert f"host {hosts[1].address} is lost" in running.err()
    lost = [record for record in running.records() if record["kind"] == "failed"]
    assert [record["ranks"] for record in lost] in ([[1]], []), "it may be between two cases"


def test_a_killed_leader_ends_the_other_hosts(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS) as running:
        running.wait_for(1)
        running.agents[0].kill()
        assert running.end(10) == [-signal.SIGKILL, 3]
    assert running.outcomes()[:1] == ["measured"]
    assert f"its leader {hosts[0].address} is lost" in running.err(1)


def test_a_cut_link_is_a_lost_host(hosts: list[Host], tmp_path: Path) -> None:
    """The limit of the case, 60 s, is longer than that of silence."""
    with job(hosts, tmp_path, *COMM) as running:
        running.wait_for(1)
        hurt_s = time.monotonic()
        hosts[1].cut()
        assert wait_for_record(running, 2, hurt_s) < SILENCE_S + 10.0
        codes = running.end(30)
        assert time.monotonic() - hurt_s < SILENCE_S + 20.0
    assert codes == [3, 3]
    assert running.outcomes() == ["measured", "lost rank"]
    assert f"host {hosts[1].address} is lost" in running.records()[1]["message"]
    assert f"its leader {hosts[0].address} is lost" in running.err(1)


def test_a_cut_link_with_a_shorter_limit(hosts: list[Host], tmp_path: Path) -> None:
    """The case hangs first; then new ranks cannot be started. What was measured is shown."""
    with job(hosts, tmp_path, *WORDS) as running:
        running.wait_for(1)
        hurt_s = time.monotonic()
        hosts[1].cut()
        assert wait_for_record(running, 2, hurt_s) < TIMEOUT_S + SILENCE_S + 10.0
        assert running.end(40) == [3, 3], running.err()
    assert running.outcomes()[:2] in (["measured", "timeout"], ["measured", "lost rank"])
    assert "left out" in running.err()
    assert "\n        1024 " in running.out()


def test_a_link_that_is_cut_for_five_seconds_recovers(
    hosts: list[Host], tmp_path: Path
) -> None:
    with job(hosts, tmp_path, *COMM) as running:
        running.wait_for(1)
        hosts[1].cut()
        time.sleep(5.0)
        hosts[1].mend()
        assert running.end() == [0, 0], running.err()
    assert running.outcomes() == ["measured"] * 4


def test_a_host_that_never_arrives(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS, absent=1, join_s=3) as running:
        began_s = time.monotonic()
        assert running.end(30) == [3]
        assert time.monotonic() - began_s < 15.0
    assert f"1 of 2 hosts did not join within 3 s: {hosts[1].address}" in running.err()
    assert "Traceback" not in running.err()


def test_a_host_with_another_key(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS, join_s=8, key=16 * "x") as running:
        assert running.end(30) == [3, 2]
    assert f"another STEPMARK_KEY has {hosts[1].address}\n" in running.err()
    assert "STEPMARK_KEY is invalid" in running.err(1)
    assert "Traceback" not in running.err() + running.err(1)


def test_sigterm_while_hosts_join(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS, absent=1) as running:
        end_s = time.monotonic() + 30
        while not list(running.folder.glob("runs/*")):  # it has planned, and waits
            assert time.monotonic() < end_s
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(running.agents[0].pid, signal.SIGTERM)
        assert running.end(10) == [143], running.err()
    assert "Traceback" not in running.err()


def test_a_leader_that_never_arrives(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS, join_s=3) as running:
        running.agents[0].kill()
        assert running.end(15) == [-signal.SIGKILL, 3]
    assert f"no leader at {hosts[0].address}, port" in running.err(1)


def test_a_full_disk_keeps_what_is_recorded(hosts: list[Host], tmp_path: Path) -> None:
    folder, mount = tmp_path / "job", tmp_path / "small"
    folder.mkdir()
    mount.mkdir()
    sh(f"mount -t tmpfs -o size=256k tmpfs {mount}")
    try:
        with job(hosts, folder, *WORDS, leader_folder=mount) as running:
            running.wait_for(1)
            subprocess.run(f"cat /dev/zero > {mount}/filler", shell=True, check=False)
            codes = running.end(60)
        assert set(codes) <= {2, 3}
        assert running.outcomes()[0] == "measured"
        assert "No space left on device" in running.err()
        assert "Traceback" not in running.err()
    finally:
        sh(f"umount {mount}")


@pytest.mark.parametrize("host", [0, 1])
def test_sigterm_lets_the_case_end(host: int, hosts: list[Host], tmp_path: Path) -> None:
    """As Slurm sends it before the time limit; to one host is enough."""
    with job(hosts, tmp_path, *WORDS) as running:
        running.wait_for(1)
        time.sleep(0.3)
        pid = running.agents[host].pid
        os.kill(pid, signal.SIGTERM)
        codes = running.end(30)
    assert codes == [143, 143], running.err()
    assert running.outcomes() == ["measured"] * 2
    assert "terminated; finished cases are kept; go on with: stepmark resume" in running.err()


def test_an_interrupt_is_resumed(hosts: list[Host], tmp_path: Path) -> None:
    with job(hosts, tmp_path, *WORDS) as running:
        running.wait_for(1)
        for agent in running.agents:
            os.kill(agent.pid, signal.SIGINT)
        assert running.end(30) == [130, 130], running.err()
    kept = running.records()
    assert {record["kind"] for record in kept} == {"measured"}
    again = tmp_path / "again"
    again.mkdir()
    with job(hosts, again, "resume", "latest", leader_folder=running.folder) as resumed:
        assert resumed.end() == [0, 0], resumed.err()
    records = resumed.records()
    assert records[: len(kept)] == kept
    assert resumed.outcomes() == ["measured"] * 4
