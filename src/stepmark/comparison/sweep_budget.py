"""The budget of a sweep: what launches cost, the rounds that fit, and what a verdict takes."""

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from stepmark.cases.sweep import Outcome, Sweep
from stepmark.comparison.racing import LEAST_ROUNDS
from stepmark.comparison.recommendation import Advice
from stepmark.ground.ratio import BUSY, Ratio
from stepmark.ground.units import plural

_MARGIN = 1.1  # launches vary, and comparing rounds takes some time


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """Rounds of all settings, and fresh rounds of two, that a verdict takes at least."""

    rounds: int
    fresh: int


def seconds_of(sweep: Sweep, names: Collection[str]) -> float:
    """Return how long a launch of each setting takes: as its own, or as all, did on average."""
    done = [attempt for attempt in sweep.tries if attempt.outcome is Outcome.DONE]
    done = done or [t for t in sweep.tries if t.outcome is not Outcome.INTERRUPTED]
    if not done:
        return 0.0
    mean_s = fmean(attempt.seconds for attempt in done)
    by_name: dict[str, list[float]] = {}
    for attempt in done:
        by_name.setdefault(attempt.setting, []).append(attempt.seconds)
    return math.fsum(fmean(by_name.get(name, [mean_s])) for name in names)


def round_s(sweep: Sweep, number: int) -> float:
    """Return how long what is missing of a round takes."""
    names = sweep.members(number) - sweep.failed.keys()
    return seconds_of(sweep, [name for name in names if (number, name) not in sweep.done])


def fresh_s(sweep: Sweep, count: int) -> float:
    """Return how long fresh rounds of one setting and the baseline take."""
    longest_s = max((seconds_of(sweep, [name]) for name in _contenders(sweep)), default=0.0)
    return count * (seconds_of(sweep, [sweep.baseline]) + longest_s)


def _contenders(sweep: Sweep) -> list[str]:
    """Return the settings that are still in the race, apart from the baseline."""
    out = {sweep.baseline, *sweep.dropped, *sweep.failed}
    return [setting.name for setting in sweep.settings if setting.name not in out]


def left_for_verdict_s(sweep: Sweep, least: Least) -> float:
    """Return how long the launches that are left until a first verdict take."""
    rounds_s = math.fsum(round_s(sweep, number) for number in range(1, least.rounds + 1))
    return rounds_s + fresh_s(sweep, least.fresh)


def next_step(sweep: Sweep, path: Path, least: Least, advice: Advice | None) -> list[str]:
    """Return the budget that would give a verdict; nothing where there is one.

    advice: None where nothing can be compared yet.
    """
    if not sweep.has_race or sweep.baseline in sweep.failed:
        return []
    repeats = sweep.repeats
    if advice is None:
        seconds = 0.0 if sweep.is_complete else left_for_verdict_s(sweep, least)
    elif advice.is_unconfirmed:
        numbers = range(1, sweep.last_round + 1)
        seconds = math.fsum(round_s(sweep, number) for number in numbers)
    elif ratios := advice.unsure:
        if all(ratio.reason == BUSY for ratio in ratios):
            return ["no verdict: repeat the sweep while no other work runs on this host"]
        done = max((number for number, _ in sweep.done), default=0)
        needed = _rounds_that_tell(ratios, done)
        if needed is None:
            return ["no verdict, and more rounds would give none: launches vary too much"]
        repeats = max(repeats, needed)
        seconds = math.fsum(round_s(sweep, number) for number in range(1, done + 1))
        seconds += (needed - done) * seconds_of(sweep, [sweep.baseline, *_contenders(sweep)])
        seconds += fresh_s(sweep, least.fresh)
    else:
        return []
    if not seconds:
        return []  # nothing is left to be measured
    words = ["stepmark", "sweep", "--resume", str(path)]
    words += ["--repeats", str(repeats)] if repeats > sweep.repeats else []
    words += ["--budget", f"{with_margin(seconds)}s"]
    return [f"no verdict yet; for one, if launches vary as so far: {shlex.join(words)}"]


def _rounds_that_tell(ratios: Sequence[Ratio], done: int) -> int | None:
    """Return the number of rounds after which one of these has a verdict, if any would."""
    if any(ratio.se_log is None for ratio in ratios):
        return max(LEAST_ROUNDS, done + 1)
    known = [ratio.launches for ratio in ratios if ratio.launches]
    return max(done + 1, min(known)) if known else None


def with_margin(seconds: float) -> int:
    """Return a budget in whole seconds in which launches that take so long will fit."""
    return math.ceil(_MARGIN * seconds)


def plan_text(sweep: Sweep, least: Least, *, budget_s: float, spent_s: float) -> str:
    """Return how many launches a budget has room for, and whether they give a verdict."""
    launch_s = seconds_of(sweep, [s.name for s in sweep.settings]) / len(sweep.settings)
    needed_s = spent_s + left_for_verdict_s(sweep, least)
    if needed_s > budget_s:
        takes = (
            f"{plural(least.rounds, 'round')} of all settings and {least.fresh} fresh of two"
        )
        return (
            f"budget: {budget_s:g} s is too short for a verdict if a launch takes "
            f"{launch_s:.1f} s, as so far: {takes} need --budget {with_margin(needed_s)}s"
        )
    room = math.floor((budget_s - spent_s) / launch_s)
    least_room = math.ceil((needed_s - spent_s) / launch_s - 1e-9)
    return (
        f"budget: {budget_s:g} s leaves room for {plural(room, 'more launch')} of "
        f"{launch_s:.1f} s; a verdict needs {least_room} at least"
    )
