"""The tries of a sweep: their order, each in fresh processes, and their outcomes."""

import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.cases.plan import ROUND
from stepmark.cases.sweep import Outcome, Setting, Try
from stepmark.comparison import sweep_race
from stepmark.comparison.sweep_budget import plan_text, round_s
from stepmark.ground.errors import ConfigError
from stepmark.measuring import child
from stepmark.store.reader import read_info
from stepmark.store.runs import difference_texts, differences
from stepmark.store.sweeps import Journal

ORDERS = ("interleaved", "fixed")
PROGRAM = (sys.executable, "-m", "stepmark")
_LAST_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The environment, program and budget of tries. `report` gets a line per try."""

    base: Mapping[str, str]  # environment
    program: Sequence[str] = PROGRAM
    budget_s: float | None = None
    report: Callable[[str], None] = lambda text: None


def environment(setting: Setting, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a try: the user's own, but for the swept variables."""
    changes = dict(setting.variables)
    variables = {name: value for name, value in base.items() if name not in changes}
    return variables | {name: value for name, value in changes.items() if value}


def order_of(num_settings: int, number: int, *, order: str, seed: int) -> list[int]:
    """Return the places of the settings in a round. Interleaved: a new order each round.

    Then no setting always follows the same one, and a drift of the machine affects all alike.
    """
    places = list(range(num_settings))
    if order == "interleaved":
        random.Random(f"{seed} {number}").shuffle(places)
    return places


def make(journal: Journal, settings: RunSettings, signals: Sequence[int]) -> int | None:
    """Run what is missing of a sweep. Returns the signal that ended it early, if one did.

    A new round begins only if it will end within the budget, by what launches have taken so
    far, including those before a --resume. No launch begins after the budget has ended.
    """
    budget = _Budget(settings)
    for number in itertools.count(1):
        budget.show_plan(journal)
        if number > 1 and all(attempt.round < number for attempt in journal.sweep.tries):
            for remark in sweep_race.decide(journal, number - 1, left_s=budget.left_s):
                settings.report(remark)
        sweep = journal.sweep
        if number > sweep.last_round or sweep.baseline in sweep.failed:
            return None
        missing = _missing(journal, number)
        if missing and number > 1 and budget.left_s < round_s(sweep, number):
            settings.report(f"budget: {number - 1} of {sweep.last_round} rounds")
            return None
        for setting in missing:
            if signals or budget.is_over(number):
                return signals[0] if signals else None
            attempt = _try(journal, setting, number, settings, signals)
            if attempt is None:
                return signals[0]
            if attempt.outcome is Outcome.DONE and not sweep.is_fresh(number):
                sweep_race.reopen(journal)
            journal.add(attempt)
            settings.report(_line(journal, attempt))
            budget.show_plan(journal)
            if attempt.outcome is Outcome.INTERRUPTED:
                return signals[0]
    return None


class _Budget:
    """What is left of a budget, and its plan, shown once it is known what a launch takes."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._started_s = time.monotonic()
        self._has_plan = settings.budget_s is None

    @property
    def left_s(self) -> float:
        if self._settings.budget_s is None:
            return math.inf
        return self._settings.budget_s - (time.monotonic() - self._started_s)

    def is_over(self, number: int) -> bool:
        """Return whether it ended in this round, and report it."""
        if self.left_s > 0:
            return False
        self._settings.report(f"budget: it ended in round {number}")
        return True

    def show_plan(self, journal: Journal) -> None:
        """Report what the budget has room for, once, when a launch has shown what it takes."""
        sweep = journal.sweep
        if self._has_plan or not any(t.outcome is Outcome.DONE for t in sweep.tries):
            return
        self._has_plan = True
        is_open = sweep.has_race and sweep.selection is None
        if self._settings.budget_s is not None and is_open:
            needed = sweep_race.least(journal.path, sweep)
            spent_s = self._settings.budget_s - self.left_s
            text = plan_text(sweep, needed, budget_s=self._settings.budget_s, spent_s=spent_s)
            self._settings.report(text)


def _missing(journal: Journal, number: int) -> list[Setting]:
    """Return the settings left in this round, in its order, without those that failed."""
    sweep = journal.sweep
    names = sweep.members(number) - sweep.failed.keys()
    order = order_of(len(sweep.settings), number, order=sweep.order, seed=sweep.seed)
    return [
        setting
        for setting in (sweep.settings[place] for place in order)
        if setting.name in names and (number, setting.name) not in sweep.done
    ]


def _try(
    journal: Journal,
    setting: Setting,
    number: int,
    settings: RunSettings,
    signals: Sequence[int],
) -> Try | None:
    """Run a setting. Returns None when a signal came before the command was started."""
    sweep = journal.sweep
    place = [each.name for each in sweep.settings].index(setting.name)
    count = sum((each.round, each.setting) == (number, setting.name) for each in sweep.tries)
    again = f"-{count + 1}" if count else ""
    stem = journal.path / "output" / f"round{number}-setting{place}{again}"
    stem.parent.mkdir(exist_ok=True)  # who keeps a sweep need not keep what its tries printed
    # A folder of its own, so that no other process's run is taken for this try's.
    runs = journal.path / "runs" / stem.name
    started_at = time.time()
    ended = child.run(
        [
            *setting.program(settings.program),
            *setting.command(sweep.command),
            "--out",
            str(runs),
        ],
        {**environment(setting, settings.base), ROUND: str(number)},
        out=stem.with_suffix(".out"),
        err=stem.with_suffix(".err"),
        limit_s=sweep.timeout_s,
        signals=signals,
    )
    written = sorted(file.parent.name for file in runs.glob("*/run.json"))
    run = f"{stem.name}/{written[0]}" if written else ""
    outcome = _outcome(ended, run)
    last = _last_lines(stem.with_suffix(".err")) if outcome is not Outcome.DONE else ()
    if ended.survivors:
        pids = ", ".join(map(str, ended.survivors))
        last = (*last, f"SIGKILL did not end pid {pids}")
    return Try(
        round=number,
        setting=setting.name,
        outcome=outcome,
        exit_code=ended.exit_code,
        seconds=ended.seconds,
        started_at=started_at,
        run=run,
        stderr=last,
        differs=_differs(journal, setting, run) if outcome is Outcome.DONE else (),
    )


def _outcome(ended: child.Ended, run: str) -> Outcome:
    if ended.interrupted:
        return Outcome.INTERRUPTED
    if ended.timed_out:
        return Outcome.TIMEOUT
    if ended.exit_code == 1 and run:  # a measured check failed; a crash ends with 1, too
        return Outcome.WRONG
    return Outcome.DONE if ended.exit_code == 0 and run else Outcome.FAILED


def _last_lines(file: Path) -> tuple[str, ...]:
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 8192))
        lines = stream.read().decode(errors="replace").splitlines()
    return tuple(line[:500] for line in lines if line.strip())[-_LAST_LINES:]


def _differs(journal: Journal, setting: Setting, run: str) -> tuple[str, ...]:
    """Return how the environment differs from the interpreter's first try.

    Swept variables do not count.
    """
    runs = journal.path / "runs"
    sweep = journal.sweep
    same = {each.name for each in sweep.settings if each.executable == setting.executable}
    tries = (each for each in sweep.tries if each.setting in same)
    first = next((each.run for each in tries if each.outcome is Outcome.DONE), run)
    try:
        before, now = (read_info(runs / name).environment for name in (first, run))
    except ConfigError as error:
        return (str(error),)
    swept = {name for setting in sweep.settings for name, _ in setting.variables}
    changes = {n: v for n, v in differences(before, now).items() if n not in swept}
    if before.host != now.host:
        changes["host"] = (before.host, now.host)
    return difference_texts(changes)


def _line(journal: Journal, attempt: Try) -> str:
    sweep = journal.sweep
    done = sum(t.outcome is not Outcome.INTERRUPTED for t in sweep.tries)
    numbers = range(1, sweep.last_round + 1)
    left = sum(len(_missing(journal, number)) for number in numbers)
    remarks = attempt.stderr[-1:] or attempt.differs
    why = f": {'; '.join(remarks)}" if remarks else ""
    kind = "fresh round" if sweep.is_fresh(attempt.round) else "round"
    head = f"[{done}/{done + left}] {kind} {attempt.round}, {attempt.setting}"
    return f"{head}: {attempt.outcome}, {attempt.seconds:.1f} s{why}"
