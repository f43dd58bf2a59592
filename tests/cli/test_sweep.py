"""stepmark sweep: files of sweeps, what is not recommended, bad input, dry runs, real runs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.cases.sweep import (
    Outcome,
    Selection,
    Setting,
)
from stepmark.comparison import sweep as app
from stepmark.comparison import sweep_race, sweep_results
from stepmark.comparison.comparison import Series, Side
from stepmark.comparison.sweep import refuse_ranks, settings
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_run import make
from stepmark.ground.errors import ConfigError
from stepmark.store import sweeps
from stepmark.store.sweeps import Journal

from .process import command, environment, stepmark
from .sweep_runs import a_try, means, sweep_of

SPOILT: dict[str, dict[str, object]] = {
    "schema 3": {"schema": 3},
    "dropped ['KIND=other']": {"dropped": {"KIND=other": 2}},
    "dropped ['KIND=more']": {"selection": Selection(rounds=2, settings=("KIND=more",))},
    "a selection": {"selection": Selection(rounds=-1)},
    "schema 0": {"schema": 0},
    "no command": {"command": ()},
    "no settings": {"settings": ()},
    "two settings": {"settings": (Setting(), Setting())},
    "baseline": {"baseline": "KIND=other"},
    "repeats": {"repeats": 0},
    "timeout_s": {"timeout_s": 0.0},
    **{
        f"run ['{run}']": {"tries": (a_try(run),)}
        for run in ("..", ".", "/etc", "a/b/c", "a/", "a/..")
    },
    "run ['a": {"tries": (a_try("a\0b"),)},
}


@pytest.mark.parametrize(("told", "change"), SPOILT.items(), ids=list(map(repr, SPOILT)))
def test_a_file_that_can_be_no_sweep_is_refused(
    told: str, change: dict[str, object], tmp_path: Path
) -> None:
    sweep = dataclasses.replace(sweep_of("fast"), tries=(a_try("a-run"), a_try("")))
    with Journal.create(tmp_path, sweep) as journal:
        assert sweeps.read(journal.path) == sweep
        journal.change(**change)
    with pytest.raises(ConfigError) as caught:
        sweeps.read(journal.path)
    assert f"a sweep ({told}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / sweeps.FILE).write_bytes(b'{"sweep_id": "\xff\xfe"}')
    with pytest.raises(ConfigError, match="a sweep"):
        sweeps.read(tmp_path)


def test_an_environment_that_changes_is_told(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", repeats=1)) as journal:
        make(journal, means(tmp_path), [])
        run = journal.path / "runs" / journal.sweep.tries[0].run / "run.json"
        run.write_text(run.read_text().replace('"2.28.9"', '"2.27.3"'))
        journal.change(repeats=2, selection=None)
        remarks: list[str] = []
        make(journal, means(tmp_path, remarks), [])
        assert (
            sum(": nccl: 2.27.3 -> 2.28.9" in line for line in remarks if "round 2" in line)
            == 2
        )
        told = {one.differs for one in journal.sweep.tries if one.round == 2}
    assert told == {("nccl: 2.27.3 -> 2.28.9",)}


def test_another_method_is_shown_and_not_recommended(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", repeats=4)) as journal:
        make(journal, means(tmp_path), [])
    sweep = journal.sweep
    for one in sweep.tries:
        if one.setting == "KIND=fast":
            file = journal.path / "runs" / one.run / "records.jsonl"
            file.write_text(file.read_text().replace("comm-queued-ahead/1", "comm-graph/1"))
    found = sweep_race.compare_settings(journal.path, sweep)
    assert found is not None
    assert found.advice.single is None
    assert "comm-graph/1" in found.advice.left_out["KIND=fast"]
    assert any("method differs" in note for note in found.comparison.notes)


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("num_ranks", 8, 2),
        ("world_size", 8, 2),
        ("dtype", "float32", "bfloat16"),
        ("skew_s", 0.0, 1e-3),
        ("beside", "", "gemm"),
        ("rate_kind", "flops", "bytes"),
    ],
)
def test_what_is_not_the_same_measurement_is_not_recommended(
    name: str, here: str | float, there: str | float
) -> None:
    def side(called: str, value: str | float, speed: float) -> Side:
        fields = {"family": "all_reduce", "method": "m/1", name: value}
        launches = {f"{called}{i}": (1e-3 / speed * (1 + i * 1e-4),) for i in range(4)}
        return Side(
            name=called, series=(Series(fields=fields, size_bytes=1024, launches=launches),)
        )

    sides = [side("default", here, 1.0), side("KIND=fast", there, 3.0)]
    advice = sweep_race.of_sides(sides, sweep_of("fast")).advice
    shown = "none" if here == "" else here
    assert advice.left_out == {
        "KIND=fast": f"another {name} than default ({there}, not {shown})"
    }
    assert advice.single is None
    same = [sides[0], side("KIND=fast", here, 3.0)]
    assert sweep_race.of_sides(same, sweep_of("fast")).advice.single == "KIND=fast"


def test_the_page_says_what_failed_and_what_is_recommended(tmp_path: Path) -> None:
    page = tmp_path / "s.html"
    with Journal.create(tmp_path, sweep_of("broken", "fast", repeats=4)) as journal:
        make(journal, means(tmp_path), [])
    options = SweepOptions(out=tmp_path, html=str(page))
    assert sweep_results.run(journal.sweep, journal.path, None, options, {}) == 3
    text = page.read_text()
    assert "failed: KIND=broken in round " in text
    assert "failed, exit code 3\n  stepmark: it is\n  broken\n" in text
    assert "recommended: faster on 3 of 3 lines" in text


def test_notes_say_what_else_decides() -> None:
    found = settings(["NCCL_ALGO=Ring"], [], default=True, force=False)
    base = {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN", "HOME": "/nowhere"}
    said = app.notes(found, base | {"NCCL_CONF_FILE": "/nowhere"})
    assert said[:2] == (
        "NCCL_ALGO=Tree of your environment is overridden",
        "NCCL_CONF_FILE=/nowhere is the same for all",
    )
    assert "NCCL_DEBUG=WARN is the same for all" in said


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "3"},
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"STEPMARK_HOSTS": "a,b"},
    ],
)
def test_under_a_launcher_it_refuses(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="once"):
        refuse_ranks(variables)
    refuse_ranks({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})


TARGET = ["--device", "cpu"]


ONE, COMM = ["sweep", "--env", "A=1"], ["--", "comm", "all_reduce"]


TUNE = ["sweep", "--env", "NCCL_ALGO=Ring", "--emit-tuner"]


OP = ["--", "op", "gemm"]


BAD = {
    "nothing": ["sweep"],
    "no command": ONE,
    "no setting": ["sweep", *OP],
    "unknown verb": [*ONE, "--", "oops"],
    "verb that measures nothing": [*ONE, "--", "runs", "list"],
    "twice": [*ONE, "--env", "A=2", *OP],
    "no name": ["sweep", "--env", "=1", *OP],
    "many": ["sweep", "--env", f"A={','.join(map(str, range(65)))}", *OP],
    "repeats": [*ONE, "--repeats", "-1", *OP],
    "order": [*ONE, "--order", "x", *OP],
    "timeout": [*ONE, "--timeout", "x", *OP],
    "gain": [*ONE, "--min-gain", "2", *OP],
    "baseline": [*ONE, "--baseline", "A=3", *OP],
    "own out": [*ONE, *COMM, "--out", "x"],
    "flag twice": ["sweep", "--set", "mode=graph", *COMM, "--mode", "queued"],
    "no interpreter": ["sweep", "--python", "nowhere,", *OP],
    "no environment": ["sweep", "--python", ".,", *OP],
    "one interpreter twice": ["sweep", "--python", f"{sys.executable},{sys.executable}", *OP],
    "one interpreter": ["sweep", "--python", sys.executable, *OP],
    "an interpreter that is none": ["sweep", "--python", "there,", *OP, "--m", "64"],
    "tuner with interpreters": [*TUNE, "t", "--python", f"{sys.executable},", *COMM],
    "resume": ["sweep", "--resume", "latest"],
    "flags of the command": [*ONE, "--", "comm", "oops", *TARGET],
    "swept flag": ["sweep", "--set", "nproc=2,x", *COMM, *TARGET],
    "tuner of op": [*TUNE, "t", *OP],
    "tuner of other": [*ONE, "--emit-tuner", "t", *COMM],
    "tuner on cpu": [*TUNE, "t", *COMM, *TARGET],
    "tuner with another baseline": [*TUNE, "t", "--baseline", "NCCL_ALGO=Ring", *COMM],
    "tuner of some ranks": [*TUNE, "t", *COMM, "--ranks", "2,4"],
    "tuner of more variables": [*TUNE, "t", "--env", "NCCL_BUFFSIZE=1", *COMM],
    "tuner exists": [*TUNE, "there", *COMM, *TARGET],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from stepmark.cli.main import status

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "there").touch()
    assert status(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("stepmark: ")
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "sweeps"] == ["there"]
    assert not list(tmp_path.glob("sweeps/*"))


def test_dry_run_lists_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepmark.cli.main import status

    monkeypatch.chdir(tmp_path)
    words = ["--env", "A=x;y,", "--set", "mode=graph", "--dry-run", "--repeats", "2"]
    assert status(["sweep", *words, "--", "comm", "all_reduce", "-b", "1K"]) == 0
    out = capsys.readouterr().out.splitlines()
    expected = [
        "env 'A=x;y' stepmark comm all_reduce -b 1K --mode graph",
        "env -u A stepmark comm all_reduce -b 1K",
        "env -u A stepmark comm all_reduce -b 1K --mode graph",
    ]
    assert sorted(out[:3]) == sorted(out[3:]) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env A=1 -- op gemm --deviec cpu", "--deviec is invalid: did you mean --device?"),
        ("--env A=1 -- op gemm --budget soon", "--budget soon is invalid"),
        ("--set launches=2,many -- op gemm", "--launches many is invalid"),
        ("--set layuot=nn -- op gemm", "--layuot is invalid: did you mean --layout?"),
    ],
)
def test_dry_run_refuses_a_command_that_would_not_run(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepmark.cli.main import status

    assert status(["sweep", "--dry-run", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True)
    assert "python -m" not in err


GEMM = ["op", "gemm", "--m", "256", "--n", "256", "--k", "256", "--device", "cpu"]


@pytest.mark.slow
def test_operators_for_real(tmp_path: Path) -> None:
    words = ["--env", "UNREAD=1,2", "--no-default", "--repeats", "1"]
    files = ["--json", "s.json", "--csv", "s.csv"]
    done = stepmark("sweep", *words, *files, "--", *GEMM, "--budget", "1s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "UNREAD=2" in done.stdout
    document = json.loads((tmp_path / "s.json").read_text())
    (line,) = document["lines"]
    assert (line["baseline_launches"], line["launches"]) == (1, 1)
    assert document["failed"] == []
    # A variable that nothing reads: one round shows nothing.
    assert document["recommended"] is None
    assert (tmp_path / "s.csv").read_text().count("\n") == 2


@pytest.mark.slow
def test_collectives_for_real_after_an_interrupt(tmp_path: Path) -> None:
    words = ["--env", "OMP_NUM_THREADS=1", "--repeats", "1"]
    comm = ["comm", "all_reduce", "--device", "cpu", "--nproc", "2", "-b", "64K", "-e", "256K"]
    process = subprocess.Popen(
        command("sweep", *words, "--", *comm, "-n", "20"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    end_s = time.monotonic() + 60
    while not list(tmp_path.glob("sweeps/*/output/*.err")):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (folder,) = tmp_path.glob("sweeps/*")
    assert f"--resume sweeps/{folder.name}" in err
    (first,) = sweeps.read(folder).tries
    assert first.outcome is Outcome.INTERRUPTED
    done = stepmark("sweep", "--resume", folder.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(sweeps.read(folder).done) == 2
    assert "keep the default" in done.stdout  # one round shows nothing
    assert "OMP_NUM_THREADS=1 / default" in done.stdout
