"""stepmark sweep: the race, fresh rounds, budgets, and going on with what is missing."""

import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from stepmark.cases.plan import ROUND
from stepmark.cases.record import Measured
from stepmark.cases.sweep import (
    Outcome,
    Selection,
)
from stepmark.comparison import sweep as app
from stepmark.comparison import sweep_race, sweep_results
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_run import make
from stepmark.ground import processes
from stepmark.ground.errors import ConfigError
from stepmark.store import sweeps
from stepmark.store.reader import read_info, read_records
from stepmark.store.sweeps import Journal

from .sweep_runs import means, started, sweep_of


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
    assert "selected: KIND=fast; 3 fresh rounds to confirm the gain" in remarks
    last = f"fresh round {sweep.last_round}, "
    assert remarks[-1].startswith(f"[{len(sweep.tries)}/{len(sweep.tries)}] {last}")

    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.comparison.names == ("default", "KIND=fast", "KIND=slow", "KIND=equal")
    assert result.fresh is not None
    assert result.fresh.names == ("default", "KIND=fast")
    cell = result.fresh.lines[0].cells["KIND=fast"]
    # Two launches of one run are one round.
    assert [len(values) for values in cell.series.launches.values()] == [10] * 3
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
    with Journal.reopen(journal.path) as journal:
        assert not journal.sweep.is_complete
        make(journal, means(tmp_path), [])
        again = journal.sweep
    assert (again.selection, again.dropped) == (whole.selection, whole.dropped)
    assert [(t.round, t.setting) for t in again.tries] == [
        (t.round, t.setting) for t in whole.tries
    ]
    # As after a kill in the fresh rounds.
    with Journal.reopen(journal.path) as journal:
        journal.change(tries=again.tries[:-3])
        assert not journal.sweep.is_complete
        result = sweep_race.compare_settings(journal.path, journal.sweep)
        assert result is not None
        assert result.advice.single is None, "the fresh rounds are not complete"
        make(journal, means(tmp_path), [])
        assert [one for one in journal.sweep.tries if one.outcome is not Outcome.DONE] == []
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


def resumed(folder: Path, **options: object) -> sweeps.Sweep:
    """Resume the sweep as the command does, and return it."""
    [path] = [file.parent for file in folder.glob("*/sweep.json")]
    sweep = app._resumed(path, SweepOptions(out=folder, **options))  # type: ignore[arg-type]
    with Journal.reopen(path) as journal:
        journal.change(selection=sweep.selection, repeated=sweep.repeated)
        make(journal, means(folder), [])
    return journal.sweep


@pytest.mark.parametrize("schema", [1, 2])
def test_a_failed_baseline_ends_a_sweep_after_its_round(tmp_path: Path, schema: int) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps(["default"]))
    wanted = sweep_of("fast", "slow", repeats=3, schema=schema)
    with Journal.create(tmp_path, wanted) as journal:
        make(journal, means(tmp_path), [])
    assert Counter(started(tmp_path)) == {"default": 1, "fast": 1, "slow": 1}
    assert not journal.sweep.is_complete
    broken.unlink()
    sweep = resumed(tmp_path)
    assert sweep.failed == {}
    assert sweep.is_complete
    assert {(1, "default"), (2, "default"), (2, "KIND=fast")} <= sweep.done
    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    note = "round 1, default: measured after it had failed, so later than its round"
    assert note in result.comparison.notes


def test_resume_repeats_what_failed_and_selects_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(json.dumps(["fast2"]))
    with Journal.create(tmp_path, sweep_of("fast", "fast2", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path), [])
    before = journal.sweep
    assert before.selection is not None
    assert before.selection.settings == ("KIND=fast",)
    assert before.is_complete, "what failed is not tried again by the same sweep"
    again = resumed(tmp_path)
    assert again.failed.keys() == {"KIND=fast2"}, "it fails again"
    assert len(again.tries) == len(before.tries) + 1
    assert again.selection == before.selection, "and undoes nothing"
    broken.unlink()
    sweep = resumed(tmp_path)
    assert sweep.failed == {}
    assert sweep.is_complete
    assert sweep.selection is not None
    # It races with the one that was selected over all rounds so far; fresh ones follow.
    assert sweep.selection.rounds >= before.last_round
    assert {(n, "KIND=fast2") for n in range(1, before.last_round + 1)} <= sweep.done
    assert sweep.done == {
        (t.round, t.setting) for t in sweep.tries if t.outcome is Outcome.DONE
    }
    assert max(n for n, name in sweep.done if name == "KIND=slow") <= before.selection.rounds
    done = [t for t in sweep.tries if t.outcome is Outcome.DONE]
    assert len(done) == len(sweep.done), "nothing is measured twice"
    result = sweep_race.compare_settings(journal.path, sweep)
    assert result is not None
    assert result.fresh is not None
    assert result.advice.single in ("KIND=fast", "KIND=fast2")


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
    with Journal.reopen(journal.path) as journal:
        make(journal, means(tmp_path), [])
        again = journal.sweep
    order = [one.setting for one in tries[4:]]
    assert [
        f"KIND={kind}".replace("KIND=default", "default") for kind in started(tmp_path)
    ] == order
    assert [one.setting for one in again.tries if one.outcome is Outcome.DONE] == [
        one.setting for one in tries
    ]
    with Journal.reopen(journal.path) as journal:
        make(journal, means(tmp_path), [])
        assert journal.sweep == again
        journal.change(repeats=3)
        make(journal, means(tmp_path), [])
        assert len(journal.sweep.done) == 9


def test_a_sweep_has_one_writer(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast")) as journal:
        with pytest.raises(ConfigError, match="no other process"):
            Journal.reopen(journal.path)
        with pytest.raises(ConfigError, match="can be made"):
            Journal.create(tmp_path, sweep_of("fast"))


def test_a_budget_that_ends_the_race_selects_what_is_certain(tmp_path: Path) -> None:
    wanted = sweep_of("fast", "fast2", repeats=3)  # as fast as each other: not decided
    with Journal.create(tmp_path, wanted) as journal:
        make(journal, means(tmp_path), [])
        tries = tuple(t for t in journal.sweep.tries if t.round <= 3)
        journal.change(tries=tries, selection=None, repeats=50)
        # Launches of 1 s: three of a round, six of the least fresh rounds.
        journal.change(tries=tuple(dataclasses.replace(t, seconds=1.0) for t in tries))
        assert sweep_race.decide(journal, 3, left_s=9.0) == []
        (remark,) = sweep_race.decide(journal, 3, left_s=8.0)
    assert remark.startswith("selected: KIND=fast")
    selection = journal.sweep.selection
    assert selection is not None
    assert (selection.rounds, selection.fresh) == (3, 3)


def test_a_resumed_sweep_knows_how_long_its_rounds_were(tmp_path: Path) -> None:
    said: list[str] = []
    with Journal.create(tmp_path, sweep_of("fast", schema=1)) as journal:
        make(journal, means(tmp_path), [])
        slow = [dataclasses.replace(one, seconds=30.0) for one in journal.sweep.tries]
        cut = dataclasses.replace(slow[-1], outcome=Outcome.INTERRUPTED, seconds=1e6)
        journal.change(tries=(*slow, cut), repeats=3)
        make(journal, means(tmp_path, said, budget_s=59.0), [])  # a round took 2 x 30 s
        assert len(journal.sweep.done) == 4
        assert said == ["budget: 2 of 3 rounds"], "a sweep without a race has no plan"
        make(journal, means(tmp_path, said, budget_s=90.0), [])
        assert len(journal.sweep.done) == 6


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
