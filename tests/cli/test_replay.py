"""stepmark replay: on real ranks, its files, and what it refuses before any rank starts."""

import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

import stepmark as sm
from stepmark.cli import main
from stepmark.ground.errors import ConfigError
from stepmark.step import native
from stepmark.step.rank_program import program
from stepmark.step.workload import CommOp, ComputeOp
from stepmark.workloads.formats import aicb

from . import process
from .comm_process import Running

BOTH = ("embd", "mp")  # groups with ranks of both stages
MEGATRON = "--model gpt2-125m --framework megatron --world-size 4 --tp 2 --pp 2 --gbs 8 --mbs 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay")
    words = f"workload generate {MEGATRON} --scale tiny -o {path / 'w.json'}"
    assert main.status(shlex.split(words)) == 0
    return path


def stepmark(words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return process.stepmark(*shlex.split(words), cwd=cwd)


@pytest.mark.ranks
def test_a_pipeline_is_replayed_with_its_computation(folder: Path) -> None:
    words = (
        "replay w.json --nproc 4 --iters 3 --passes 2 --compute sleep --compute-from fixed:1ms"
    )
    files = "--csv log.csv --json all.json --timeline step.json"
    done = stepmark(f"{words} {files} --out runs", folder)
    assert done.returncode == 0, done.stderr
    workload = native.read(folder / "w.json")
    programs = [program(workload, rank) for rank in (0, 2)]
    messages = [
        (
            str(stage),
            str(number),
            op.collective,
            str(op.message_bytes(workload.groups[op.group])),
        )
        for stage, steps in enumerate(programs)
        for number, step in enumerate(steps)
        if isinstance(op := step.op, CommOp) and len(step.members) > 1
    ]
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    names = ("stage", "operation", "collective", "message_bytes")
    assert [tuple(row[name] for name in names) for row in rows] == messages
    assert all(
        float(row["time_min_s"]) <= float(row["time_s"]) for row in rows if row["time_s"]
    )
    document = json.loads((folder / "all.json").read_text())
    counts = Counter[str]()
    for row in document["messages"]:
        counts[row["collective"]] += row["operations"]
    # What both stages share counts once.
    shared = [op.collective for op in workload.expand(1) if getattr(op, "group", "") in BOTH]
    assert counts == Counter(name for _, _, name, _ in messages) - Counter(shared)
    assert len(shared) == 5
    # Every iteration lasts at least as long as the computation of the busier stage.
    sleeps = max(
        sum(not (isinstance(s.op, CommOp) or s.op.is_wait) for s in steps) for steps in programs
    )
    assert len(document["iterations"]["seconds"]) == 3
    assert min(document["iterations"]["seconds"]) >= sleeps * 1e-3
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in events if event["ph"] == "X") >= 0
    assert max(ends) >= sleeps * 1e3
    shown = stepmark("runs show --runs runs latest", folder)
    assert shown.returncode == 0
    assert "w.json" in shown.stdout
    (run,) = (folder / "runs").iterdir()
    assert any(path.suffix == ".npy" for path in (run / "traces").iterdir())


@pytest.mark.ranks
def test_a_file_of_more_ranks_runs_on_two_if_asked(folder: Path) -> None:
    generate = (
        "workload generate --model gpt2-125m --scale tiny --framework ddp --world-size 16"
    )
    assert main.status(shlex.split(f"{generate} -o {folder / 'ddp.json'}")) == 0
    words = "replay ddp.json --nproc 2 --shrink --comm-only --blocking --iters 2 --json -"
    done = stepmark(words, folder)
    assert done.returncode == 0, done.stderr
    assert "shrunk from 16 to 2 ranks" in done.stderr
    document = json.loads(done.stdout)
    assert {row["group_size"] for row in document["messages"]} == {2}
    assert all(row["time_s"] > 0 for row in document["operations"])
    # Every message is waited for, thus timed, and nothing computes.
    exposed = [row["exposed_comm_s"] for row in document["phases"] if not row["pass"]]
    assert len(exposed) == 2
    assert all(each > 0 for each in exposed)
    assert all(math.isfinite(each) for each in document["iterations"]["seconds"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "w.json --nproc 2",
            "nproc 2 is invalid: it must be 4, as the file has; or add --shrink",
        ),
        ("w.json --nproc 3 --shrink", "a multiple of its 2 pipeline stages"),
        ("w.json --nproc 8 --shrink", "it must be at most 4"),
        (
            "w.json --comm-only --compute-from fixed:1ms",
            "it cannot be combined with --compute none",
        ),
        ("w.json --iters 0", "iters 0 is invalid"),
        (
            "w.json --compute true",
            "compute true is invalid: it must be one of none,",
        ),
        ("w.json --budget 3s --warmup 0", "warmup 0 is invalid: it must be at least 1 with"),
        ("w.json --alone --curve x", "it cannot be combined with --alone, which measures them"),
        ("w.json --comm-only --compute real", "it cannot be combined with --compute real"),
        ("w.json --html .", "html . is invalid: it must be a file, not a folder"),
        ("w.json --curve nosuch", "curve nosuch is invalid"),
        ("w.json --timeline no/such/../../w.json/t.json", "a folder that can be written"),
        ("w.json --json - --html -", "stdout is already taken by --json"),
        ("nosuch.json", "nosuch.json"),
        ("cut.json", "it ends too early"),
        ("alone.json", "every send is received"),
    ],
)
def test_refusals(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    text: str,
) -> None:
    monkeypatch.chdir(folder)
    whole = (folder / "w.json").read_text()
    (folder / "cut.json").write_text(whole[:-200])
    lines = [line for line in whole.splitlines() if '"recv"' in line]
    alone = whole
    for line in lines:  # its receives become computation
        plain = json.loads(line.rstrip(","))
        kept = {key: plain[key] for key in ("phase", "module", "name", "after") if key in plain}
        other = {"compute": {"kernel": "k", "flops": 1, "bytes_moved": 1}, **kept}
        alone = alone.replace(line, json.dumps(other) + "," * line.endswith(","))
    (folder / "alone.json").write_text(alone)
    capsys.readouterr()
    code = main.status(["replay", *shlex.split(words), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert code == 2
    assert text in err
    assert "Traceback" not in err
    assert not out


def test_a_dry_run_prints_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"replay {folder / 'w.json'} --blocking --compute none --dry-run --device h200"
    assert main.status(shlex.split(words)) == 0
    out, err = capsys.readouterr()
    assert out.strip() == (
        f"stepmark replay {folder / 'w.json'} --device cuda --compute none --blocking --nproc 4"
    )
    assert "none was run" in err


@pytest.mark.ranks
def test_a_budget_ends_iterations_and_passes(folder: Path) -> None:
    words = "replay w.json --nproc 4 --iters 100000 --passes 100000 --compute-from fixed:1ms"
    done = stepmark(f"{words} --budget 12s --json - --out budget", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    seconds = document["iterations"]["seconds"]
    assert 1 <= len(seconds) < 1000
    assert sum(seconds) < 12
    (run,) = (folder / "budget").iterdir()
    record = json.loads((run / "records.jsonl").read_text())
    assert 1 <= record["replay"]["num_passes"] <= len(seconds)


@pytest.mark.ranks
def test_messages_are_verified_and_beside_those_alone(folder: Path) -> None:
    """--check, --alone, --html, --aicb-log; real operators."""
    words = "replay w.json --nproc 4 --iters 2 --passes 2 --compute real --check --alone"
    files = "--json all.json --html step.html --aicb-log log.csv --budget 20s --out more"
    done = stepmark(f"{words} {files}", folder)
    assert done.returncode == 0, done.stderr
    assert "run as operators" in done.stderr
    assert re.search(r"verified    [1-9][0-9,]* elements, 0 wrong", done.stdout)
    assert "of alone" in done.stdout
    document = json.loads((folder / "all.json").read_text())
    compared = [row for row in document["messages"] if row["alone_pct"] is not None]
    assert {"all_reduce", "broadcast"} == {row["collective"] for row in compared}
    assert all(row["alone_pct"] > 0 for row in compared)
    assert {row["rank"] for row in document["ranks"]} == {0, 1, 2, 3}
    steps = [row for row in document["phases"] if not row["pass"]]
    assert all(row["computing_s"] > 0 for row in steps)
    assert "rank 3, compute" in (folder / "step.html").read_text()
    log = aicb.read(folder / "log.csv")
    workload = native.read(folder / "w.json")
    counts = [
        Counter(op.collective for op in each.expand() if isinstance(op, CommOp))
        for each in (log, workload)
    ]
    assert counts[0]["broadcast"] == counts[1]["broadcast"] > 0
    assert all(op.time_s for op in log.expand() if isinstance(op, ComputeOp))


@pytest.mark.ranks
def test_the_original_pace_is_kept(folder: Path) -> None:
    """Three messages that began 30 ms after one another do so again; without it at once."""
    sized = {"in_msg_size": 8, "out_msg_size": 8, "dtype": "float", "world_size": 2}
    trace = [{"comms": "allreduce", "startTime_ns": n * 3e7} | sized for n in range(3)]
    (folder / "param.json").write_text(json.dumps(trace))
    for pace, low, high in (("original", 0.06, 0.5), ("free", 0.0, 0.05)):
        words = f"replay param.json --nproc 2 --iters 3 --pace {pace} --json - --out paced"
        done = stepmark(words, folder)
        assert done.returncode == 0, done.stderr
        assert low <= json.loads(done.stdout)["iterations"]["median_s"] < high
    words = "replay w.json --nproc 4 --pace original --device cpu"
    refused = stepmark(words, folder)
    assert refused.returncode == 2
    assert "a file with start times" in refused.stderr


@pytest.mark.ranks
def test_python_gets_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    log = sm.replay("w.json", nproc=4, iters=2, passes=1, compute_from="fixed:100us")
    assert log.epoch_times.shape == (2,)
    assert log.comm_log_each_epoch.shape == (1, len(log.comm_logs))
    assert log.spans.shape[:2] == (4, 1)
    with pytest.raises(ConfigError, match="npro 4 is invalid"):
        sm.replay("w.json", npro=4)
    with pytest.raises(ConfigError, match="iters 0 is invalid"):
        sm.replay("w.json", iters=0)


@pytest.mark.ranks
def test_a_lost_rank_ends_the_others_and_is_named(folder: Path, tmp_path: Path) -> None:
    words = "--nproc 4 --iters 100000 --compute-from fixed:1ms"
    file = str(folder / "w.json")
    running = Running("replay", file, *words.split(), cwd=tmp_path, is_forking=True)
    deadline = time.monotonic() + 60
    while len(running.pids()) < 4 or not list(tmp_path.glob("runs/*/run.json")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(running.pids()[3], signal.SIGKILL)
    assert running.end(60) == 3
    assert re.search(r"rank 3 \(pid \d+\) was killed by signal 9", running.err())
