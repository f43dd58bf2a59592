"""measure and replay start ranks as the command line does, and return the run."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.process import environment, stepmark

import stepmark as sm
from stepmark.cases.record import Measured

SHORT = {"device": "cpu", "budget": "1s"}
_SCRIPT = """
import stepmark as sm
run = sm.measure("op", "gemm", m=64, n=64, k=64, dtype="fp32", budget=1, device="cpu")
print(run.info.command)
print(run.rows()[0]["status"], len(run.records[0].samples.seconds))
"""


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.ranks
def test_operators(tmp_path: Path) -> None:
    run = sm.measure("op", "gemm", m=64, n=64, k=[64, 128], dtype="fp32", **SHORT)
    words = "op gemm --m 64 --n 64 --k 64,128 --dtype fp32 --budget 1s --device cpu"
    assert sorted(run.info.command.split()) == sorted(f"stepmark {words}".split())
    assert [row["status"] for row in run] == ["measured", "measured"]
    done = stepmark(*words.split(), "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case_id"] for row in rows] == [row["case_id"] for row in run]
    assert list(rows[0]) == list(run.rows()[0])
    assert sm.read_run().path.name > run.path.name  # the later one
    again = sm.measure(run.cases[1], budget=1)
    assert again.cases == run.cases[1:]
    assert sm.compare(run, again).names == (run.path.name, again.path.name)


@pytest.mark.ranks
def test_collectives_go_on_where_they_were_cut_short() -> None:
    given = {"begin": "1K", "end": "4K", "iters": 2, "nproc": 2, "out": "here", "device": "cpu"}
    run = sm.measure("comm", "all_reduce", placement="in", **given)
    assert run.path.parent == Path("here")
    assert [row["size_bytes"] for row in run] == [1024, 4096]
    same = sm.measure("comm", "all_reduce", placement="in", resume=run, **given)
    assert same.path == run.path
    assert same.rows() == run.rows()


@pytest.mark.ranks
def test_a_training_step_and_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    run = sm.measure(
        "train", sm.Model("llama-3.1-8b"), scale="tiny", steps=2, profile=True, device="cpu"
    )
    (row,) = run
    assert row["status"] == "measured"
    assert len(sm.read_trace(run, jobs=1)) == 3
    predicted = sm.predict(from_run=run)
    assert predicted.step_s > 0
    capsys.readouterr()
    predicted.show()
    shown = " ".join(capsys.readouterr().out.split())  # long names of processors wrap
    assert "tokens/s/rank, bound by " in shown
    assert f" by calibration {run.path.name} of 20" in shown


@pytest.mark.ranks
def test_a_workload_is_replayed() -> None:
    own = sm.workload("llama-3.1-8b", framework="ddp", world_size=2, scale="tiny")
    given = {"compute_from": "fixed:10us", "iters": 2, "passes": 1, "device": "cpu"}
    run = sm.measure(own, **given)
    (row,) = run
    assert str(row["model"]).endswith("/llama-3.1-8b_tiny.json")
    log = sm.replay(own, **given)
    assert log.epoch_times.shape == (2,)
    own.write("w.json")
    assert len(sm.replay("w.json", **given).comm_logs) == len(log.comm_logs) > 0


@pytest.mark.ranks
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    command, outcome = done.stdout.splitlines()
    assert command.startswith("stepmark op gemm --m 64")
    assert outcome == "measured 1"


@pytest.mark.ranks
def test_a_thread_measures_too() -> None:
    runs: list[sm.Run] = []

    def work() -> None:
        runs.append(sm.measure("op", "gemm", m=64, n=64, k=64, dtype="fp32", **SHORT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [type(record) for record in runs[0].records] == [Measured]


@pytest.mark.ranks
def test_a_case_that_cannot_run_is_a_row() -> None:
    run = sm.measure("op", "gemm", m=64, n=64, k=[64, 2**36], dtype="fp32", **SHORT)
    assert [row["status"] for row in run] == ["measured", "skipped"]
    assert "skipped: gemm: " in run._repr_html_()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gemm",), r'did you mean measure\("op", "gemm", ...\)\?'),
        (("all-reduce",), r'did you mean measure\("comm", "all_reduce", ...\)\?'),
        (("nothing",), "one of op, comm, train, replay, a workload or a case"),
        (("op", "gem"), "did you mean gemm"),
        (("op", "gemm"), "shape is missing: give m, n and k"),
        (("comm",), "collective is missing"),
        (("comm", "all_reduc"), "all_reduc is invalid"),
        (("train", "gpt3"), "model gpt3 is invalid: did you mean"),
        (("replay", "nothing.json"), "nothing.json is invalid"),
    ],
)
def test_what_is_refused_before_any_rank_starts(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(sm.ConfigError, match=message):
        sm.measure(*words, device="cpu")
    assert not Path("runs").exists()


def test_a_search_is_refused() -> None:
    with pytest.raises(sm.ConfigError, match="which only stepmark op --find-max makes"):
        sm.measure("op", "gemm", find_max=True, device="cpu")


def test_only_verbs_workloads_and_cases_are_measured() -> None:
    with pytest.raises(sm.ConfigError, match="measure 42 is invalid: it must be a verb"):
        sm.measure(42)  # type: ignore[arg-type]


def test_ranks_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sm.StepmarkError, match="under torchrun, srun or mpirun"):
        sm.measure("op", "gemm", m=1, n=1, k=1)
