"""stepmark sweep: settings, order, what goes wrong, what is missing, what is recommended."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.comm_samples import SAMPLES
from tests.parsing import parse as typed
from tests.report.tuner_file import parse

from stepmark import __version__
from stepmark.app import sweep as app
from stepmark.app import sweep_race, sweep_results, sweep_run
from stepmark.app import tuner as tuning
from stepmark.app.interpreters import check_interpreters, parse_interpreters
from stepmark.app.sweep import refuse_ranks, settings
from stepmark.app.sweep_run import Means, make, order_of
from stepmark.core.comm_options import CommOptions
from stepmark.core.commands import command_of
from stepmark.core.comparison import Series, Side
from stepmark.core.errors import ConfigError
from stepmark.core.plan import ROUND
from stepmark.core.record import Measured
from stepmark.core.sweep import (
    Outcome,
    Selection,
    Setting,
    Sweep,
    Try,
    TunerChoice,
    split_values,
)
from stepmark.core.verb_options import SweepOptions
from stepmark.launch import processes
from stepmark.report.recommendation import Advice
from stepmark.report.tuner import COLLECTIVES, first_match
from stepmark.store import sweeps
from stepmark.store.reader import read_info, read_records
from stepmark.store.sweeps import Journal

from .process import ROOT, command, environment, stepmark

PROGRAM = (sys.executable, "-m", "tests.cli.sweep_program")
COMMAND = ("comm", "all_reduce", "-b", "64K")


def names(*env: str, flags: tuple[str, ...] = (), default: bool = True) -> list[str]:
    return [one.name for one in settings(env, flags, default=default, force=False)]


def test_every_combination_once_and_the_default_first() -> None:
    assert names("A=1,2", "B=x,y") == [
        "default",
        *("A=1 B=x", "A=1 B=y", "A=2 B=x", "A=2 B=y"),
    ]
    assert names("A=1,2", flags=("mode=graph",)) == [
        "default",
        *("A=1 --mode graph", "A=2 --mode graph"),
    ]
    assert names("A=1,2", default=False) == ["A=1", "A=2"]


def test_an_empty_value_is_unset_and_all_unset_is_the_default() -> None:
    assert names("A=,1", "B=,x") == ["default", "B=x", "A=1", "A=1 B=x"]
    assert names("A=,1", default=False) == ["default", "A=1"]
    (unset, _) = settings(["A=,1"], [], default=True, force=False)
    assert sweep_run.environment(unset, {"A": "9", "B": "8"}) == {"B": "8"}


@given(st.lists(st.text(alphabet="a,\\;:^=", min_size=1), min_size=1))
def test_values_survive_being_written(values: list[str]) -> None:
    written = ",".join(value.replace("\\", "\\\\").replace(",", "\\,") for value in values)
    assert split_values(written) == values


def test_values_hold_what_nccl_wants() -> None:
    assert split_values("ring;allreduce:tree,^nvls") == ["ring;allreduce:tree", "^nvls"]
    assert split_values(r"mlx5_0\,mlx5_1,mlx5_2") == ["mlx5_0,mlx5_1", "mlx5_2"]


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ([], []),
        (["A"], []),
        (["=1"], []),
        (["A B=1"], []),
        (["A=1", "A=2"], []),
        (["A=1,1"], []),
        (["A="], []),
        (["A=a\nb"], []),
        (["RANK=1"], []),
        (["STEPMARK_WATCH=1"], []),
        ([], ["out=x"]),
        ([], ["-mode=x"]),
        ([f"A={','.join(map(str, range(64)))}"], []),
    ],
)
def test_bad_settings_are_refused(env: list[str], flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        settings(env, flags, default=True, force=False)


def test_many_settings_need_force() -> None:
    many = [f"A={','.join(map(str, range(64)))}"]
    assert len(settings(many, [], default=True, force=True)) == 65


@given(st.integers(1, 64), st.integers(1, 50), st.integers())
def test_every_round_is_a_permutation_and_seeds_reproduce(
    count: int, number: int, seed: int
) -> None:
    order = order_of(count, number, order="interleaved", seed=seed)
    assert sorted(order) == list(range(count))
    assert order_of(count, number, order="interleaved", seed=seed) == order
    assert order_of(count, number, order="fixed", seed=seed) == list(range(count))


def test_orders_differ_between_rounds_and_seeds() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        return [tuple(order_of(6, n, order="interleaved", seed=seed)) for n in range(1, 9)]

    assert len(set(orders(1))) >= 7
    assert orders(1) != orders(2)
    # No setting is bound to a place in its round.
    first = Counter(order_of(6, n, order="interleaved", seed=5)[0] for n in range(600))
    assert min(first.values()) > 60


def sweep_of(*kinds: str, repeats: int = 2, timeout_s: float = 20.0, schema: int = 2) -> Sweep:
    """schema 1: without a race, so that every round measures every setting."""
    found = settings([f"KIND={','.join(kinds)}"], [], default=True, force=False)
    return Sweep(
        schema=schema,
        sweep_id="the-sweep",
        created_at="2025-01-01T00:00:00+00:00",
        stepmark="0.1.0",
        command=COMMAND,
        settings=tuple(found),
        baseline="default",
        repeats=repeats,
        order="interleaved",
        seed=1,
        timeout_s=timeout_s,
    )


def means(folder: Path, said: list[str] | None = None, **more: object) -> Means:
    base = environment() | {
        "SWEEP_PROGRAM": str(folder),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    say = (said if said is not None else []).append
    return Means(base=base, program=PROGRAM, say=say, **more)  # type: ignore[arg-type]


def started(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "started").read_text().splitlines()]


def test_a_run_that_another_process_writes_meanwhile_is_not_taken(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("crowded", repeats=2)) as journal:
        make(journal, means(tmp_path), [])
    for one in journal.sweep.tries:
        records = read_records(journal.path / "runs" / one.run)
        longest_s = max(r.samples.seconds[0][0] for r in records if isinstance(r, Measured))
        assert longest_s > 1e-4, "the run of the other process is 9 times as fast"
    assert len(list(journal.path.glob("runs/*/run.json"))) == 2


def test_losers_are_dropped_and_the_winner_is_confirmed(tmp_path: Path) -> None:
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("fast", "slow", "equal", repeats=5)) as journal:
        assert make(journal, means(tmp_path, remarks), []) is None
        sweep = journal.sweep
    assert sweeps.read(journal.path) == sweep
    assert sweep.is_complete
    selection = sweep.selection
    assert selection is not None
    assert selection.settings == ("KIND=fast",)
    assert sweep.dropped.keys() == {"KIND=slow", "KIND=equal"}
    assert set(sweep.dropped.values()) <= {2, 3}
    assert (selection.rounds, selection.fresh) in ((2, 3), (3, 3))
    for number in range(1, sweep.last_round + 1):
        measured = {attempt.setting for attempt in sweep.tries if attempt.round == number}
        assert measured == sweep.members(number)
        assert measured >= {"default", "KIND=fast"}
    assert len(sweep.tries) == len({attempt.run for attempt in sweep.tries}) <= 3 * 4 + 3 * 2
    assert {attempt.outcome for attempt in sweep.tries} == {Outcome.DONE}
    folders = [journal.path / "runs" / attempt.run for attempt in sweep.tries]
    assert all((folder / "run.json").exists() for folder in folders)
    for folder, attempt in zip(folders, sweep.tries, strict=True):
        assert read_info(folder).environment.variables[ROUND] == str(attempt.round)
    # KIND is swept: that it differs is no surprise.
    assert {attempt.differs for attempt in sweep.tries} == {()}
    assert "selected: KIND=fast; 3 fresh rounds follow" in remarks
    last = f"fresh round {sweep.last_round}, "
    assert remarks[-1].startswith(f"[{len(sweep.tries)}/{len(sweep.tries)}] {last}")

    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.comparison.names == ("default", "KIND=fast", "KIND=slow", "KIND=equal")
    assert result.fresh is not None
    assert result.fresh.names == ("default", "KIND=fast")
    cell = result.fresh.lines[0].cells["KIND=fast"]
    # Two launches of one run are one round.
    assert (cell.num_launches, cell.num_values) == (3, 30)
    assert cell.ratio is not None
    assert 1.2 < cell.ratio.speed < 1.3
    assert result.advice.single == "KIND=fast"
    # The figure is that of the fresh rounds, whose launches are not in the selection's.
    assert result.advice.picks[0].ratio == cell.ratio
    assert (
        sweep_results.export_lines(sweep.settings[1], sweep.settings[0]) == "export KIND=fast"
    )


def test_without_a_race_all_rounds_are_made_and_nothing_is_confirmed(tmp_path: Path) -> None:
    """A sweep of an earlier version goes on as it began."""
    with Journal.create(tmp_path, sweep_of("fast", "slow", repeats=4, schema=1)) as journal:
        assert make(journal, means(tmp_path), []) is None
        sweep = journal.sweep
    assert len(sweep.tries) == 12
    assert sweep.is_complete
    assert (sweep.dropped, sweep.selection) == ({}, None)
    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.fresh is None
    assert result.advice.single is None
    assert all(pick.reason.startswith("unconfirmed") for pick in result.advice.picks)


def test_a_race_without_a_winner_keeps_the_default(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("slow", repeats=5)) as journal:
        make(journal, means(tmp_path), [])
        sweep = journal.sweep
    assert sweep.dropped.keys() == {"KIND=slow"}
    assert sweep.selection == Selection(rounds=sweep.dropped["KIND=slow"])
    assert sweep.last_round < 5
    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.advice.selected == ()


def test_a_gain_that_fresh_rounds_do_not_show_is_no_recommendation(tmp_path: Path) -> None:
    """The setting is fast in the rounds that select it, and no longer in the fresh ones."""
    with Journal.create(tmp_path, sweep_of("fading", repeats=5)) as journal:
        make(journal, means(tmp_path), [])
    assert journal.sweep.selection is not None
    assert journal.sweep.selection.settings == ("KIND=fading",)
    result = sweep_race.compare_settings(journal.path, journal.sweep)
    assert result is not None
    assert result.advice.single is None
    assert all(pick.reason.startswith("unconfirmed: ") for pick in result.advice.picks)


def test_what_measures_something_else_has_all_its_rounds(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("other", "slow", repeats=4)) as journal:
        make(journal, means(tmp_path), [])
        sweep = journal.sweep
    assert sweep.dropped.keys() == {"KIND=slow"}
    assert sweep.selection == Selection(rounds=4)
    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.advice.left_out.keys() == {"KIND=other"}


def test_resume_goes_on_in_the_fresh_rounds(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path), [])
        whole = journal.sweep
        # As after a kill between the last try of the selection and its decision.
        assert whole.selection is not None
        rounds = whole.selection.rounds
        tries = tuple(t for t in whole.tries if t.round <= rounds)
        before = {name: number for name, number in whole.dropped.items() if number < rounds}
        journal.change(tries=tries, selection=None, dropped=before)
    with Journal.go_on(journal.path) as journal:
        assert not journal.sweep.is_complete
        make(journal, means(tmp_path), [])
        again = journal.sweep
    assert (again.selection, again.dropped) == (whole.selection, whole.dropped)
    assert [(t.round, t.setting) for t in again.tries] == [
        (t.round, t.setting) for t in whole.tries
    ]
    # As after a kill in the fresh rounds.
    with Journal.go_on(journal.path) as journal:
        journal.change(tries=again.tries[:-3])
        assert not journal.sweep.is_complete
        result = sweep_race.compare_settings(journal.path, journal.sweep)
        assert result is not None
        assert result.advice.single is None, "the fresh rounds are not complete"
        make(journal, means(tmp_path), [])
        assert len(journal.sweep.tries) == len(again.tries)
        result = sweep_race.compare_settings(journal.path, journal.sweep)
        assert result is not None
        assert result.advice.single == "KIND=fast"


def test_settings_that_go_wrong_are_recorded_and_left_out(tmp_path: Path) -> None:
    wanted = sweep_of("broken", "wrong", "fast", repeats=3, schema=1)
    with Journal.create(tmp_path, wanted) as journal:
        make(journal, means(tmp_path), [])
        sweep = journal.sweep
    count = Counter(started(tmp_path))
    assert count == {"default": 3, "fast": 3, "broken": 1, "wrong": 1}
    failed = sweep.failed
    assert failed.keys() == {"KIND=broken", "KIND=wrong"}
    assert failed["KIND=broken"].outcome is Outcome.FAILED
    assert failed["KIND=broken"].exit_code == 3
    assert failed["KIND=broken"].stderr == ("stepmark: it is", "broken")
    assert failed["KIND=wrong"].outcome is Outcome.WRONG
    found = sweep_race.compare_settings(journal.path, sweep)
    assert found is not None
    assert found.comparison.names == ("default", "KIND=fast")


@pytest.mark.ranks
def test_a_setting_that_hangs_is_killed_with_its_grandchildren(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("hang", timeout_s=1.5)) as journal:
        make(journal, means(tmp_path), [])
        sweep = journal.sweep
    one = sweep.failed["KIND=hang"]
    assert one.outcome is Outcome.TIMEOUT
    assert 1.5 <= one.seconds < 6
    assert Counter(started(tmp_path)) == {"default": 1, "hang": 1}  # nothing is left to race
    pid = int((tmp_path / "grandchild").read_text())
    assert not psutil.pid_exists(pid) or not processes.is_alive(psutil.Process(pid))
    assert sweep_race.compare_settings(journal.path, sweep) is None


def test_resume_makes_only_what_is_missing(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", "slow", schema=1)) as journal:
        make(journal, means(tmp_path), [])
        tries = journal.sweep.tries
        # As after a kill in the second round: two tries less, and one that was interrupted.
        cut = dataclasses.replace(tries[4], outcome=Outcome.INTERRUPTED)
        journal.change(tries=(*tries[:4], cut))
    (tmp_path / "started").unlink()
    with Journal.go_on(journal.path) as journal:
        make(journal, means(tmp_path), [])
        again = journal.sweep
    order = [one.setting for one in tries[4:]]
    assert [
        f"KIND={kind}".replace("KIND=default", "default") for kind in started(tmp_path)
    ] == order
    assert [one.setting for one in again.tries if one.outcome is Outcome.DONE] == [
        one.setting for one in tries
    ]
    with Journal.go_on(journal.path) as journal:
        make(journal, means(tmp_path), [])
        assert journal.sweep == again
        journal.change(repeats=3)
        make(journal, means(tmp_path), [])
        assert len(journal.sweep.done) == 9


def test_a_sweep_has_one_writer(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast")) as journal:
        with pytest.raises(ConfigError, match="no other process"):
            Journal.go_on(journal.path)
        with pytest.raises(ConfigError, match="can be made"):
            Journal.create(tmp_path, sweep_of("fast"))


def test_a_budget_ends_after_whole_rounds(tmp_path: Path) -> None:
    said: list[str] = []
    with Journal.create(tmp_path, sweep_of("fast", repeats=50)) as journal:
        make(journal, means(tmp_path, said, budget_s=0.01), [])
        assert len(journal.sweep.tries) == 2
    assert said[-1] == "budget: 1 of 50 rounds"


def test_a_budget_leaves_room_for_fresh_rounds(tmp_path: Path) -> None:
    """Two settings: a round takes two launches, three fresh rounds take six."""
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("equal", repeats=3)) as journal:
        make(journal, means(tmp_path, remarks, budget_s=1e-9), [])
        long = [dataclasses.replace(one, seconds=30.0) for one in journal.sweep.tries]
        journal.change(tries=tuple(long))
        make(journal, means(tmp_path, remarks, budget_s=235.0), [])  # room for 7 launches
        assert len(journal.sweep.tries) == 2
        assert remarks[-1] == "budget: 1 of 3 rounds"
        assert journal.sweep.selection is None, "more rounds may follow"
        make(journal, means(tmp_path, remarks, budget_s=245.0), [])
        assert len(journal.sweep.tries) >= 4


def test_a_budget_that_ends_the_race_selects_what_is_certain(tmp_path: Path) -> None:
    wanted = sweep_of("fast", "fast2", repeats=3)  # as fast as each other: not decided
    with Journal.create(tmp_path, wanted) as journal:
        make(journal, means(tmp_path), [])
        tries = tuple(t for t in journal.sweep.tries if t.round <= 3)
        journal.change(tries=tries, selection=None, repeats=50)
        assert sweep_race.launches_of_round(journal.sweep, 4) == 3 + 6
        assert sweep_race.decide(journal, 3, launches=9) == []
        (remark,) = sweep_race.decide(journal, 3, launches=8)
    assert remark.startswith("selected: KIND=fast")
    selection = journal.sweep.selection
    assert selection is not None
    assert (selection.rounds, selection.fresh) == (3, 3)
    assert sweep_race.launches_of_round(journal.sweep, 4) == 1 + len(selection.settings)


def test_a_resumed_sweep_knows_how_long_its_rounds_were(tmp_path: Path) -> None:
    said: list[str] = []
    with Journal.create(tmp_path, sweep_of("fast", schema=1)) as journal:
        make(journal, means(tmp_path), [])
        slow = [dataclasses.replace(one, seconds=30.0) for one in journal.sweep.tries]
        cut = dataclasses.replace(slow[-1], outcome=Outcome.INTERRUPTED, seconds=1e6)
        journal.change(tries=(*slow, cut), repeats=3)
        make(journal, means(tmp_path, said, budget_s=59.0), [])  # a round took 2 x 30 s
        assert len(journal.sweep.done) == 4
        assert said == ["budget: 2 of 3 rounds"]
        make(journal, means(tmp_path, said, budget_s=90.0), [])
        assert len(journal.sweep.done) == 6


def a_try(run: str) -> Try:
    return Try(
        round=1,
        setting="default",
        outcome=Outcome.DONE,
        exit_code=0,
        seconds=1.0,
        started_at=0.0,
        run=run,
    )


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
        make(journal, means(tmp_path), [])
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


def interpreter(folder: Path, script: str = "") -> Path:
    """A virtual environment in form: its bin/python sets variables, then is this one."""
    file = folder / "bin" / "python"
    file.parent.mkdir(parents=True)
    file.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return file


def test_an_environment_stands_for_its_interpreter(tmp_path: Path) -> None:
    file = interpreter(tmp_path / "venv")
    assert parse_interpreters(f"{tmp_path}/venv,") == [
        (f"{tmp_path}/venv", str(file)),
        ("", ""),
    ]
    link = tmp_path / "python-link"
    link.symlink_to(file)
    # The link stays: an interpreter finds its environment by the name it is started with.
    assert parse_interpreters(f"{link},{file}")[0] == (str(link), str(link))


def test_interpreters_are_settings_in_every_combination(tmp_path: Path) -> None:
    for name in "ab":
        interpreter(tmp_path / name)
    both = f"{tmp_path}/a,{tmp_path}/b"
    a, b = f"python {tmp_path}/a", f"python {tmp_path}/b"

    def combined(*env: str, text: str = both) -> list[str]:
        swept = settings(env, [], text, default=True, force=False)
        assert app.find_baseline(None, swept) == swept[0].name
        return [one.name for one in swept]

    assert combined() == [a, b]
    assert combined("A=1,2") == [a, f"{a} A=1", f"{a} A=2", f"{b} A=1", f"{b} A=2"]
    assert combined(text=f",{tmp_path}/b") == ["default", b]


def test_another_interpreter_is_measured_in_rounds_and_confirmed(tmp_path: Path) -> None:
    interpreter(tmp_path / "old")
    interpreter(tmp_path / "new", "export KIND=fast")
    swept = settings([], [], f"{tmp_path}/old,{tmp_path}/new", default=True, force=False)
    old, new = (setting.name for setting in swept)
    sweep = dataclasses.replace(sweep_of("x", repeats=5), settings=tuple(swept), baseline=old)
    check_interpreters(swept, means(tmp_path).base)
    with Journal.create(tmp_path, sweep) as journal:
        make(journal, means(tmp_path), [])
    assert Counter(started(tmp_path))["fast"] == journal.sweep.last_round
    result = sweep_race.compare_settings(journal.path, sweeps.read(journal.path))
    assert result is not None
    assert result.advice.single == new
    assert sweep_results.export_lines(swept[1], swept[0]) == f"with {tmp_path}/new/bin/python"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 0.0.1; exit 0", f"with stepmark {__version__}, not 0.0.1"),
        ("exec false", f"imports stepmark {__version__} (exit code 1)"),
        (
            'export PYTHONPATH=/nowhere\nset -- -S -I "$@"',
            f"imports stepmark {__version__} (ModuleNotFoundError: No module named 'stepmark')",
        ),
    ],
)
def test_an_interpreter_without_this_stepmark_is_refused(
    script: str, message: str, tmp_path: Path
) -> None:
    interpreter(tmp_path / "venv", script)
    swept = settings([], [], f",{tmp_path}/venv", default=True, force=False)
    with pytest.raises(ConfigError) as caught:
        check_interpreters(swept, means(tmp_path).base)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_upgrade_is_no_change_of_the_environment(tmp_path: Path) -> None:
    """Versions are compared with the first try of the same interpreter."""
    interpreter(tmp_path / "new")
    swept = settings([], [], f",{tmp_path}/new", default=True, force=False)
    sweep = dataclasses.replace(sweep_of("x", repeats=1), settings=tuple(swept), order="fixed")
    with Journal.create(tmp_path, sweep) as journal:
        make(journal, means(tmp_path), [])
        run = journal.path / "runs" / journal.sweep.tries[0].run / "run.json"
        run.write_text(run.read_text().replace('"2.28.9"', '"2.27.3"'))
        journal.change(repeats=2, selection=None)
        make(journal, means(tmp_path), [])
        differences = {
            one.setting: one.differs for one in journal.sweep.tries if one.round == 2
        }
    assert differences == {"default": ("nccl: 2.27.3 -> 2.28.9",), swept[1].name: ()}


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


RESUMED = {
    "baseline": (["--baseline", "KIND=slow"], "dropped or selected"),
    "gain": (["--min-gain", "5%"], "dropped or selected"),
    "repeats": (["--repeats", "9"], "dropped or selected"),
    "interpreter": (["--python", f",{sys.executable}"], "the sweep began with"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with Journal.create(folder, sweep_of("fast", "slow", repeats=5)) as journal:
        make(journal, means(folder), [])
    return folder


@pytest.mark.parametrize(("words", "message"), RESUMED.values(), ids=list(RESUMED))
def test_what_was_decided_by_other_options_is_refused(
    words: list[str], message: str, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from stepmark.cli.main import status

    assert status(["sweep", "--out", str(finished), "--resume", "latest", *words]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_finished_sweep_shows_the_confirmed_gain(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from stepmark.cli.main import status

    file = finished / "s.json"
    words = ["--out", str(finished), "--resume", "latest", "--json", str(file)]
    assert status(["sweep", *words]) == 0
    out = capfd.readouterr().out
    assert "fresh rounds, which had no part in the selection:" in out
    assert re.search(
        r"recommended: faster on 3 of 3 lines: .* \(.* to .*%\), confirmed by 3 fresh", out
    )
    document = json.loads(file.read_text())
    assert document["recommended"] == "KIND=fast"
    assert document["selection"]["fresh"] == 3
    assert document["dropped"].keys() == {"KIND=slow"}
    assert len(document["fresh_lines"]) == 3
    assert [row["fresh_rounds"] for row in document["ranges"]] == [3]


def test_more_rounds_go_on_where_nothing_was_selected(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("equal", repeats=2)) as journal:
        make(journal, means(tmp_path), [])
    sweep = journal.sweep
    assert sweep.selection == Selection(rounds=2)
    options = SweepOptions(out=tmp_path, repeats=3)
    more = app._resumed(journal.path, options)
    assert (more.selection, more.last_round, more.is_complete) == (None, 3, False)
    fewer = SweepOptions(out=tmp_path, repeats=1)
    with pytest.raises(ConfigError, match="at least 2"):
        app._resumed(journal.path, fewer)


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


def logged(**at: tuple[str, str, int]) -> tuning.Logged:
    """s1024=...: what all collectives run with at 1 KiB."""
    return {
        (name, int(key[1:])): TunerChoice(
            collective=name,
            size_bytes=int(key[1:]),
            algorithm=how[0],
            protocol=how[1],
            num_channels=how[2],
        )
        for name in COLLECTIVES
        for key, how in at.items()
    }


def test_the_file_says_what_won_and_the_default_elsewhere(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", "slow", repeats=4)) as journal:
        make(journal, means(tmp_path), [])
    found = sweep_race.compare_settings(journal.path, journal.sweep)
    assert found is not None
    ring, tree = ("ring", "simple", 4), ("tree", "ll", 8)
    sizes = ("s1024", "s65536", "s524288", "s16777216", "s1073741824")
    both = {
        "default": logged(**dict.fromkeys(sizes, ring)),
        "KIND=fast": logged(**dict.fromkeys(sizes, tree)),
    }
    chosen = tuning.choose(both, found.advice)
    held = {one.size_bytes: one.how for one in chosen if one.collective == "all_reduce"}
    # Measured from 64 KiB to 16 MiB, and nothing is known beyond.
    assert held == {2**10: ring, 2**16: tree, 2**19: tree, 2**24: tree, 2**30: ring}
    others = {one.how for one in chosen if one.collective != "all_reduce"}
    assert others == {ring}


def tuned(folder: Path, plugin: str | None = None) -> tuple[list[str], int, tuning.Request]:
    """A sweep in which Tree wins, and its tuner file."""
    sweep = dataclasses.replace(
        sweep_of("x", repeats=4),
        settings=tuple(settings(["NCCL_ALGO=Tree"], [], default=True, force=False)),
    )
    asked = tuning.request(folder / "tuner.conf", plugin, sweep, force=False)
    with Journal.create(folder, sweep) as journal:
        how = means(folder)
        make(journal, how, [])
        found = sweep_race.compare_settings(journal.path, journal.sweep)
        assert found is not None
        said, code = tuning.emit(journal, found.advice, asked, how, [])
    return said, code, asked


def test_a_tuner_file_has_the_winner_and_nccls_own_choices(tmp_path: Path) -> None:
    said, code, asked = tuned(tmp_path)
    assert (code, said[-1]) == (0, "not verified: no tuner plugin (--tuner-plugin PATH)")
    text = asked.target.read_text()
    assert "# Measured with NCCL 2.28.9 on 2 x Made Up 9000: 2 ranks, 1 node." in text
    rules = parse(text)

    def how(name: str, size: int) -> tuple[str, str, int]:
        rule = first_match(rules, name, size, num_nodes=1, num_ranks=2)
        assert rule is not None
        return rule.algorithm, rule.protocol, rule.num_channels

    assert how("all_reduce", 2**12) == ("ring", "ll", 2)
    assert how("all_reduce", 2**20) == ("tree", "ll128", 16)
    assert how("all_reduce", 2**33) == ("ring", "simple", 24)
    # NCCL's log counts these per rank.
    for name in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert how(name, 2**15) == ("ring", "ll", 2)
        assert how(name, 2**16) == ("ring", "simple", 24)


WORDS = [
    *(shlex.split(command_of(case))[2:] for case in SAMPLES.values()),
    ["-b", "1K", "-e", "1G", "-f", "2", "-r", "-1", "all_reduce", "--no-align", "all_gather"],
    ["all_reduce", "-b1K", "--end=4M", "--with", "gemm:64", "-n", "3", "--wide", "broadcast"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_comm_command_is_read_as_its_verb_reads_it(words: list[str]) -> None:
    assert tuning.comm_options(words) == typed(CommOptions, words)


def test_a_comm_command_that_its_verb_refuses_is_refused() -> None:
    for words in (
        ["all_reduce", "--nonsense"],
        ["all_reduce", "-b"],
        ["all_reduce", "--be=1K"],
    ):
        with pytest.raises(ConfigError, match="command"):
            tuning.comm_options(words)


def test_a_plugin_that_does_as_told_verifies(tmp_path: Path) -> None:
    said, code, _ = tuned(tmp_path, "good.so")
    assert code == 0
    assert said[-1].startswith("verified with good.so, sizes seen: ")
    assert "all_reduce 21" in said[-1]
    assert said[-1].endswith("0 not as told")


def test_one_channel_is_seen_and_is_a_failed_check(tmp_path: Path) -> None:
    said, code, _ = tuned(tmp_path, "trap")
    assert code == 1
    assert any(
        line.startswith("all_reduce 1048576 bytes: the file says tree/ll128 with 16 channels")
        and line.endswith("tree/ll128 with 1 channels")
        for line in said
    )
    assert {line.split()[0] for line in said[2:]} == set(COLLECTIVES)


def test_without_a_log_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_with_text", lambda folder: [])
    with pytest.raises(tuning.ProbeError, match="no choice with channels"):
        tuned(tmp_path)
    assert not (tmp_path / "tuner.conf").exists()


def test_a_file_that_would_change_nothing_is_not_written(tmp_path: Path) -> None:
    advice = Advice(
        baseline="default",
        considered=(),
        picks=(),
        ranges=(),
        single=None,
        num_tests=0,
        min_gain=0.01,
        left_out={},
    )
    asked = tuning.Request(target=tmp_path / "t", plugin=None, options=CommOptions())
    with Journal.create(tmp_path, sweep_of("fast")) as journal:
        said, code = tuning.emit(journal, advice, asked, means(tmp_path), [])
    assert (said, code) == (["no tuner file: the default stays everywhere"], 0)
    assert not asked.target.exists()


def test_a_setting_names_itself() -> None:
    one = Setting(variables=(("A", "1"), ("B", "")), flags=(("n", "5"), ("mode", "graph")))
    assert one.name == "A=1 -n 5 --mode graph"
    assert one.command(("comm",)) == ["comm", "-n", "5", "--mode", "graph"]
    base = Setting(variables=(("A", ""), ("B", "2")))
    assert sweep_results.export_lines(one, base).splitlines() == [
        "export A=1",
        "unset B",
        "and in the command: -n 5 --mode graph",
    ]
