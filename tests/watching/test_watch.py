"""stepmark watch: what a job leaves behind, its exit code, and its own settings."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import status
from stepmark.tables.columns import Row
from stepmark.traces.trace_messages_text import slow_rank_line
from stepmark.watching.watch import SITE, read_ranks, setup_of
from stepmark.watching.watch_options import WatchOptions

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SHORT = ["--warmup", "2"]


def environment(**more: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **more}


def watch(
    folder: Path, *words: str, job: list[str], **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Return how `stepmark watch` ended. What it writes lies in runs/ of the folder."""
    command = [sys.executable, "-m", "stepmark", "watch", *words, "--", *job]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def document(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/*/watch.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    done = watch(tmp_path, *SHORT, "--csv", "cost.csv", job=[*TORCHRUN, str(EXAMPLE)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 10: loss")  # the job's own output comes first
    assert "profiled: steps 9 to 11 of ranks 0-1" in done.stdout
    assert "stepmark" not in done.stderr
    assert "exposed communication" in done.stdout
    assert 0 < done.stdout.find("slow rank: ") < done.stdout.find("## breakdown")
    assert done.stdout.find("exposed communication: ") < done.stdout.rfind("slow rank: ")
    written = document(tmp_path)
    assert {row["step"] for row in written["breakdown"]["steps"]} == {9, 10, 11}
    assert written["messages"]["world_size"] == 2
    rows = written["messages"]["histogram"]
    assert {row["collective"] for row in rows} == {"all_reduce"}
    assert {row["from_bytes"] for row in rows} == {1050624, 3151872}
    for number, rank in enumerate(written["ranks"]):
        assert (rank["rank"], rank["world_size"], rank["steps"]) == (number, 2, 18)
        assert (rank["optimizer"], rank["device"]) == ("AdamW", "cpu")
        cost = rank["cost"]
        assert (cost["unprofiled_steps"], cost["profiled_steps"]) == (10, 3)
        assert 0.1 < cost["ratio"] < 20
    assert len((tmp_path / "cost.csv").read_text().splitlines()) == 3


# Workers of data are forked and spawned; they import torch and train nothing.
JOB = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader

def main():
    data = torch.randn(64, 4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("fork", "spawn"):
        for x in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=method):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(USER, sys.modules["sitecustomize"].__file__, flush=True)
    raise SystemExit(7)

if __name__ == "__main__":
    main()
"""


def test_one_process_with_workers_and_a_sitecustomize_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.USER = 'mine'\n")
    (tmp_path / "job.py").write_text(JOB)
    path = os.pathsep.join((str(ROOT / "src"), str(own)))
    done = watch(
        tmp_path,
        *SHORT,
        job=[sys.executable, "job.py"],
        PYTHONPATH=path,
        RANK="0",  # without a world size it is no launcher's
        NCCL_DEBUG="WARN",
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith(f"mine {own / 'sitecustomize.py'}\n")
    assert "it ended with exit code 7" in done.stdout
    assert "NCCL_DEBUG=WARN is yours" in done.stdout
    assert done.stderr == ""
    (rank,) = document(tmp_path)["ranks"]
    assert rank["trace"] == "traces/rank0.json.gz"
    assert rank["profiled_steps"] == [9, 11]


def test_a_job_without_torch(tmp_path: Path) -> None:
    job = [sys.executable, "-c", "print('words')"]
    done = watch(tmp_path, "--ranks", "0,9", job=job)
    text = "note: --ranks selects ranks 0, 9, of which no step was seen: no profile"
    assert text in done.stdout
    assert done.returncode == 0
    assert done.stdout.startswith("words\n")
    assert "no process of the job has loaded torch" in done.stdout
    assert document(tmp_path)["ranks"] == []


def test_an_interrupted_job_shows_what_there_is(tmp_path: Path) -> None:
    # Without workers of data: torch may report their end by the same signal first, with 1.
    workers = "num_workers=1, multiprocessing_context=method"
    job = JOB.replace("in (", "in 100_000 * (").replace(workers, "num_workers=0")
    (tmp_path / "job.py").write_text(job)
    process = subprocess.Popen(
        [sys.executable, "-m", "stepmark", "watch", *SHORT, "--", sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end_s = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/traces/rank0.json.gz")):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "KeyboardInterrupt" in err
    assert "profiled: steps 9 to 11" in out


def test_settings_of_the_user_stay(tmp_path: Path) -> None:
    options = WatchOptions(words=("job",))
    config = tmp_path / "nccl.conf"
    config.write_text("# NCCL_DEBUG=TRACE\nNCCL_DEBUG_SUBSYS=NET\n")
    user = {
        "PYTHONPATH": "/mine",
        "NCCL_CONF_FILE": str(config),
        "NCCL_DEBUG_FILE": "/logs/%p.log",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
    }
    setup = setup_of(options, tmp_path, user)
    assert setup.variables["PYTHONPATH"] == f"{SITE}:/mine"
    assert setup.variables["NCCL_DEBUG"] == "INFO"
    kept = {"NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "TORCH_FR_BUFFER_SIZE"}
    assert not kept & set(setup.variables)
    assert set(setup.kept) == {
        "NCCL_DEBUG_FILE=/logs/%p.log",
        "NCCL_DEBUG_SUBSYS=NET",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=7",
    }
    assert setup_of(options, tmp_path, {}).variables["PYTHONPATH"] == str(SITE)


def test_a_log_that_the_user_asked_for_stays_on_stdout(tmp_path: Path) -> None:
    setup = setup_of(WatchOptions(words=("job",)), tmp_path, {"NCCL_DEBUG": "INFO"})
    assert not [name for name in setup.variables if name.startswith("NCCL")]
    assert "NCCL_DEBUG=INFO is yours" in setup.notes[0]


def test_reports_that_a_kill_cut_short(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank0.json").touch()
    text = '{"schema": 1, "rank": 1, "host": "h", "pid": 3, "trace": null, "reason": "why"}'
    (tmp_path / "ranks" / "rank1.json").write_text(text)
    ranks, damaged = read_ranks(tmp_path)
    assert [rank.reason for rank in ranks] == ["why"]
    assert damaged == ["rank0.json was not written to its end: its process was killed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command is missing"),
        (["--", "no-such-program-here"], "a program that exists"),
        (["--json", "-", "--", "true"], "--json - is invalid"),
        (["--steps", "0", "--", "true"], "--steps 0 is invalid"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_of_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert status(["watch", "--", "true"]) == 2
    assert "stepmark watch -- srun" in capsys.readouterr().err


def test_the_slow_rank_is_the_one_that_arrives_last() -> None:
    rows: list[Row] = [
        {"rank": 0, "arrived_last": 2, "waiting_s": 0.078},
        {"rank": 1, "arrived_last": 76, "waiting_s": 1e-5},
    ]
    line = "slow rank: rank 1 arrives last in 76 of 78 collectives, and the others wait 78 ms"
    assert slow_rank_line(rows) == f"{line} per step"
    rows[0]["exposed_waiting_s"] = 0.04
    assert slow_rank_line(rows) == f"{line} per step, 40 ms of it exposed"
    rows[0]["arrived_last"] = 76
    assert slow_rank_line(rows).startswith("slow rank: none; rank 0 arrives last in 76 of 152")
    for unknown in (rows[:1], [{"rank": 0, "arrived_last": None}] * 2, []):
        assert "not known" in slow_rank_line(unknown)
