"""`stepmark launch --slurm --submit` on a real Slurm of two nodes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.job import ROOT
from tests.cluster.network import Host, sh
from tests.cluster.slurm import Slurm

from stepmark.ground import processes
from stepmark.nodes import node_check

pytestmark = pytest.mark.cluster

NODES = ("launch", "--slurm", "-N", "2", "--nproc-per-node", "1")
COMM = ("comm", "all_reduce", "--device", "cpu", "-b", "1K", "-f", "2", "-e")


@pytest.fixture(scope="module")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    running = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


def launch(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start `stepmark WORDS`; the files stdout and stderr in the folder get its output."""
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "stepmark", *words],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                "OMP_NUM_THREADS": "1",
                "STEPMARK_TEST": str(folder),
            },
            stdout=out,
            stderr=err,
            text=True,
        )


def records(folder: Path) -> list[dict[str, Any]]:
    files = list(folder.glob("runs/*/*/records.jsonl"))
    assert len(files) <= 1, "one run directory"
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def wait_for_records(folder: Path, count: int) -> None:
    end_s = time.monotonic() + 60
    while len(records(folder)) < count:
        assert time.monotonic() < end_s, (folder / "stderr").read_text()
        time.sleep(0.05)


def outcomes(folder: Path) -> list[str]:
    return [str(record.get("cause") or record["kind"]) for record in records(folder)]


@pytest.mark.usefixtures("slurm")
def test_comm_is_submitted_and_followed(tmp_path: Path) -> None:
    process = launch(tmp_path, *NODES, "--submit", "--", *COMM, "4K")
    assert process.wait(90) == 0, (tmp_path / "stderr").read_text()
    out, err = (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()
    assert outcomes(tmp_path) == ["measured"] * 3
    ranks = re.findall(r"^#  Rank +(\d+) .* on +(\S+)", out, re.MULTILINE)
    assert ranks == [("0", "n1"), ("1", "n2")]
    assert "[3/3] all_reduce 4 KiB" in out, "progress of the job"
    assert out.count("# Out of bounds values : 0 OK") == 1
    states = re.findall(r"^job \d+: (\S+)", err, re.MULTILINE)
    assert states[0] == "submitted"
    assert "RUNNING" in states
    assert states[-1] == "done"


@pytest.mark.usefixtures("slurm")
def test_training_is_submitted(tmp_path: Path) -> None:
    words = ("train", "gpt2-125m", "--strategy", "fsdp", "--scale", "tiny", "--steps", "3")
    process = launch(tmp_path, *NODES, "--submit", "--", *words, "--device", "cpu")
    assert process.wait(90) == 0, (tmp_path / "stderr").read_text()
    (record,) = records(tmp_path)
    assert record["kind"] == "measured"
    assert len(record["samples"]["seconds"]) == 2


@pytest.mark.usefixtures("slurm")
def test_the_nodes_of_a_job_are_checked(hosts: list[Host], tmp_path: Path) -> None:
    """One command: devices of both hosts, the network between them, the verdict."""
    words = (*NODES, "--output", "%x.txt", "--submit", "--", "doctor", "--nodes")
    hosts[1].shape(400)
    try:
        process = launch(tmp_path, *words, "--launches", "2", "--budget", "30s")
        assert process.wait(150) in (1, 3), (tmp_path / "stderr").read_text()
    finally:
        hosts[1].unshape()
    out = (tmp_path / "stepmark-doctor.txt").read_text()
    assert (tmp_path / "stdout").read_text() == out
    (folder,) = (tmp_path / "runs").iterdir()
    checks = {check.host: check for check in node_check.read_all(folder)}
    assert set(checks) == {"n1", "n2"}
    assert {figure.name.split()[0] for figure in checks["n1"].figures} == {"gemm", "copy"}
    rates = {
        words[0]: float(words[7])
        for words in (line.split() for line in out.splitlines())
        if words[1:3] == ["network", "p2p"] and words[0][-1] != ":"
    }
    assert set(rates) == {"n1-n2", "n2-n1"}
    assert rates["n2-n1"] < 0.055  # GB/s: 400 Mbit/s
    assert "which end is slow" in out
    assert "GPU" not in out
    assert "network between hosts" not in out  # among what is not tested


@pytest.mark.usefixtures("slurm")
def test_a_killed_rank_is_the_exit_code_of_the_job(tmp_path: Path) -> None:
    words = (*NODES, "--submit", "--", *COMM, "8K", "--timeout", "10s")
    process = launch(tmp_path, *words)
    wait_for_records(tmp_path, 1)
    time.sleep(0.3)
    ranks = processes.marked("STEPMARK_TEST", str(tmp_path))
    (hurt,) = [rank for rank in ranks if rank.environ().get("RANK") == "1"]
    processes.send(hurt, signal.SIGKILL)
    assert process.wait(90) == 3, (tmp_path / "stderr").read_text()
    assert sorted(outcomes(tmp_path)) == ["lost rank", "measured", "measured", "measured"]


@pytest.mark.usefixtures("slurm")
def test_a_cancelled_job_keeps_its_cases_and_is_resumed(tmp_path: Path) -> None:
    """Slurm sends SIGTERM, as before a time limit and for a job of higher priority."""
    words = (*NODES, "--on-interrupt", "cancel", "--submit", "--", *COMM, "8K")
    process = launch(tmp_path, *words)
    wait_for_records(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130
    kept = records(tmp_path)
    assert {record["kind"] for record in kept} == {"measured"}
    assert len(kept) < 4
    (job_id,) = re.findall(r"^job (\d+): submitted", (tmp_path / "stderr").read_text())
    output = (tmp_path / f"stepmark-comm-{job_id}.out").read_text()
    assert "terminated; finished cases are kept" in output
    (run,) = tmp_path.glob("runs/*/*")
    process = launch(tmp_path, *NODES, "--submit", "--", "resume", str(run))
    assert process.wait(90) == 0, (tmp_path / "stderr").read_text()
    assert records(tmp_path)[: len(kept)] == kept
    assert outcomes(tmp_path) == ["measured"] * 4


@pytest.mark.usefixtures("slurm")
def test_a_requeued_job_resumes_its_run(tmp_path: Path) -> None:
    process = launch(tmp_path, *NODES, "--requeue", "--submit", "--", *COMM, "32K")
    wait_for_records(tmp_path, 1)
    (job_id,) = re.findall(r"^job (\d+): submitted", (tmp_path / "stderr").read_text())
    sh(f"scontrol requeue {job_id}")
    kept = records(tmp_path)
    end_s = time.monotonic() + 60
    while "PENDING (BeginTime)" not in (tmp_path / "stderr").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.2)
    sh(f"scontrol update jobid={job_id} starttime=now")  # not in two minutes
    assert process.wait(120) == 0, (tmp_path / "stderr").read_text()
    assert records(tmp_path)[: len(kept)] == kept
    assert outcomes(tmp_path) == ["measured"] * 6
    assert len({record["case_id"] for record in records(tmp_path)}) == 6


@pytest.mark.usefixtures("slurm")
def test_a_job_that_never_starts_says_why(tmp_path: Path) -> None:
    words = ("launch", "--slurm", "-N", "3", "--nproc-per-node", "1", "--submit", "--")
    process = launch(tmp_path, *words, *COMM, "1K")
    err, end_s = tmp_path / "stderr", time.monotonic() + 20
    while process.poll() is None and "PartitionNodeLimit" not in err.read_text():
        assert time.monotonic() < end_s, err.read_text()
        time.sleep(0.2)
    if process.poll() is None:
        assert "it will never start" in err.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        (job_id,) = re.findall(r"cancel it: scancel (\d+)", err.read_text())
        sh(f"scancel {job_id}")
    else:  # newer releases refuse it
        assert process.returncode == 2
        assert "sbatch refused the job" in err.read_text()
