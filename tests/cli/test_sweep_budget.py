"""stepmark sweep --budget: rounds are planned by what launches cost, and lead to a verdict.

The seam is the child that measures a setting: here it takes made-up seconds, and writes a run
of made-up times whose truth is known.
"""

import functools
import itertools
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepmark.cases.sweep import Outcome, Selection
from stepmark.comparison import sweep as app
from stepmark.comparison import sweep_budget, sweep_race, sweep_results, sweep_run
from stepmark.comparison.comparison import Comparison
from stepmark.comparison.recommendation import advise, text_of
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_run import make
from stepmark.ground.options import build
from stepmark.ground.ratio import BUSY
from stepmark.measuring import child
from stepmark.store.sweeps import Journal

from . import sweep_program
from .sweep_runs import means, sweep_of

LAUNCH_S = 9.0
AHEAD = "queued-ahead/1"  # of which repeats on other machines are known
UNKNOWN = "comm-queued-ahead/1"


class Launches:
    """Launches of LAUNCH_S each, the first of which takes `cold_s` more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.cold_s = 0.0
        self.started_s: list[float] = []
        self._patch = monkeypatch
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=time.time)
        monkeypatch.setattr(sweep_run, "time", clock)
        monkeypatch.setattr(
            sweep_run, "child", SimpleNamespace(run=self.run, Ended=child.Ended)
        )
        loaded = functools.cache(sweep_program.loaded)
        monkeypatch.setattr(sweep_program, "loaded", loaded)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], **where: object
    ) -> child.Ended:
        kind = environment.get("KIND", "")
        seconds = LAUNCH_S + (0.0 if self.started_s else self.cold_s)
        self.started_s.append(self.now_s)
        self.now_s += seconds
        for file in (where["out"], where["err"]):
            Path(str(file)).touch()
        with self._patch.context() as patch:
            for name in ("KIND", "SWEEP_PROGRAM"):
                patch.setenv(name, environment.get(name, ""))
            folder = command[command.index("--out") + 1]
            sweep_program.written(folder, sweep_program.SPEED.get(kind, 1.0))
        return child.Ended(exit_code=0, seconds=seconds)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def of_busy_hosts(comparison: Comparison) -> Comparison:
    lines = []
    for line in comparison.lines:
        cells = {
            name: replace(cell, ratio=cell.ratio and replace(cell.ratio, reason=BUSY))
            for name, cell in line.cells.items()
        }
        lines.append(replace(line, cells=cells))
    return replace(comparison, lines=tuple(lines))


def closing(journal: Journal) -> list[str]:
    result = sweep_race.compare_settings(journal.path, journal.sweep)
    return sweep_results.closing_lines(result, journal.sweep, journal.path)


def test_a_slower_setting_is_named_within_a_minute(tmp_path: Path, launches: Launches) -> None:
    """Two settings and the default, 9 s a launch, 60 s: six launches."""
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("equal", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path, remarks, method=AHEAD, budget_s=60.0), [])
    assert launches.now_s <= 60
    assert remarks[1] == (
        "budget: 60 s leaves room for 5 more launches of 9.0 s; a verdict needs 4 at least"
    )
    assert journal.sweep.dropped == {"KIND=slow": 1}, "one round tells"
    assert len(journal.sweep.tries) == 5, "the next round has room and is used"
    lines = closing(journal)
    assert lines[0].startswith("keep the default: KIND=slow is slower on 3 of 3 lines: -2")
    assert not any("stepmark sweep" in line for line in lines)
    assert not any("no verdict" in line for line in lines)


def test_a_faster_setting_is_confirmed_within_a_minute(
    tmp_path: Path, launches: Launches
) -> None:
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("fast", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path, remarks, method=AHEAD, budget_s=60.0), [])
    assert launches.now_s == 5 * LAUNCH_S
    assert journal.sweep.selection == Selection(rounds=1, settings=("KIND=fast",), fresh=1)
    result = sweep_race.compare_settings(journal.path, journal.sweep)
    assert result is not None
    assert result.advice.single == "KIND=fast"
    assert result.fresh is not None
    ratio = result.fresh.lines[0].cells["KIND=fast"].ratio
    assert ratio is not None
    assert ratio.reason.endswith("of repeats"), "it says what it rests on"
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.25 < ratio.high
    lines = closing(journal)
    assert lines[-1] == "  export KIND=fast"
    assert "confirmed by 1 fresh round;" in lines[-2]


def test_without_a_budget_three_fresh_rounds_add_their_own_noise(
    tmp_path: Path, launches: Launches
) -> None:
    with Journal.create(tmp_path, sweep_of("fast", repeats=5)) as journal:
        make(journal, means(tmp_path, method=AHEAD), [])
    assert journal.sweep.selection == Selection(rounds=1, settings=("KIND=fast",), fresh=3)
    result = sweep_race.compare_settings(journal.path, journal.sweep)
    assert result is not None
    assert result.fresh is not None
    ratios = [line.cells["KIND=fast"].ratio for line in result.fresh.lines]
    assert all(ratio and ratio.df and ratio.df >= ratio.repeats_df + 2 for ratio in ratios)


@pytest.mark.parametrize(
    ("budget_s", "kinds", "method"),
    [
        (budget_s, kinds, method)
        for budget_s in (1.0, 20.0, 40.0, 63.0, 100.0)
        for kinds in (("equal", "slow"), ("fast", "slow"), ("fast", "fast2"))
        for method in (AHEAD, UNKNOWN)
    ],
)
def test_a_sweep_ends_in_time_with_a_verdict_or_the_budget_for_one(
    tmp_path: Path, launches: Launches, budget_s: float, kinds: tuple[str, ...], method: str
) -> None:
    """Following the advice, once or twice, gives a verdict. The last lines agree."""
    remarks: list[str] = []
    launches.cold_s = 4.0
    journal = Journal.create(tmp_path, sweep_of(*kinds, repeats=5))
    for attempt in itertools.count():
        assert attempt < 4
        began_s = launches.now_s
        count = len(launches.started_s)
        with journal:
            make(journal, means(tmp_path, remarks, method=method, budget_s=budget_s), [])
        assert all(start < began_s + budget_s for start in launches.started_s[count:])
        lines = closing(journal)
        result = sweep_race.compare_settings(journal.path, journal.sweep)
        commands = [line for line in lines if "stepmark sweep" in line]
        is_decided = bool(result and (result.advice.single or result.advice.slower))
        is_decided = is_decided or bool(result and result.advice.fresh)
        if not commands:
            break
        assert result is None or result.advice.single is None
        assert lines[-1] == commands[0], "it is the last line"
        words = shlex.split(lines[-1].partition("so far: ")[2])
        found = re.fullmatch(r"(\d+)s", words[words.index("--budget") + 1])
        assert found
        budget_s = float(found[1])
        options = {"out": str(tmp_path), "resume": words[words.index("--resume") + 1]}
        if "--repeats" in words:
            options["repeats"] = words[words.index("--repeats") + 1]
        sweep = app._resumed(journal.path, build(SweepOptions, options))
        journal = Journal.reopen(journal.path)
        journal.change(repeats=sweep.repeats, selection=sweep.selection)
    assert is_decided
    assert all(one.outcome is Outcome.DONE for one in journal.sweep.tries)


def test_a_budget_that_is_too_short_says_so_after_the_first_launch(
    tmp_path: Path, launches: Launches
) -> None:
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("equal", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path, remarks, method=AHEAD, budget_s=20.0), [])
        assert remarks[1] == (
            "budget: 20 s is too short for a verdict if a launch takes 9.0 s, as so far: "
            "1 round of all settings and 1 fresh of two need --budget 50s"
        )
        assert launches.now_s == 3 * LAUNCH_S, "the last launch began before the end"
        assert remarks[-1] == "budget: 1 of 5 rounds"
    again: list[str] = []
    with Journal.reopen(journal.path) as journal:
        make(journal, means(tmp_path, again, method=AHEAD, budget_s=20.0), [])
    assert again[0] == (
        "budget: 20 s leaves room for 2 more launches of 9.0 s; a verdict needs 2 at least"
    )
    assert len(journal.sweep.tries) == 5, "what a verdict needs fits"


def test_without_repeats_a_verdict_takes_rounds_that_show_their_noise(
    tmp_path: Path, launches: Launches
) -> None:
    remarks: list[str] = []
    with Journal.create(tmp_path, sweep_of("equal", "slow", repeats=5)) as journal:
        make(journal, means(tmp_path, remarks, method=UNKNOWN, budget_s=60.0), [])
    assert "2 rounds of all settings and 3 fresh of two need --budget 119s" in remarks[1]
    assert len(journal.sweep.tries) == 6, "both rounds that fit"


def test_the_budget_for_a_verdict_is_that_of_the_settings_in_the_race(
    tmp_path: Path, launches: Launches
) -> None:
    """Equal settings have no verdict after all their rounds: both need more."""
    with Journal.create(tmp_path, sweep_of("equal", repeats=2)) as journal:
        make(journal, means(tmp_path, method=AHEAD), [])
    assert journal.sweep.selection == Selection(rounds=2)
    words = shlex.split(closing(journal)[-1].partition("so far: ")[2])
    repeats = int(words[words.index("--repeats") + 1])
    assert repeats > 2
    launch_s = LAUNCH_S * 2 * (repeats - 2) + LAUNCH_S * 2  # rounds, and a fresh one
    budget = words[words.index("--budget") + 1]
    assert 1.09 * launch_s < float(budget.removesuffix("s")) < 1.12 * launch_s


def test_a_busy_host_needs_no_larger_budget(tmp_path: Path, launches: Launches) -> None:
    with Journal.create(tmp_path, sweep_of("fast", repeats=1)) as journal:
        make(journal, means(tmp_path, method=AHEAD), [])
    result = sweep_race.compare_settings(journal.path, journal.sweep)
    assert result is not None
    busy = advise(of_busy_hosts(result.comparison), min_gain=0.01)
    assert text_of(busy, {})[-2] == (
        "keep the default: nothing can be recommended because other work ran on this host"
    )
    needed = sweep_budget.Least(rounds=1, fresh=1)
    assert sweep_budget.next_step(journal.sweep, journal.path, needed, busy) == [
        "no verdict: repeat the sweep while no other work runs on this host"
    ]
