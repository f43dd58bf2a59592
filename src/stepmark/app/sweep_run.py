"""The tries of a sweep: their order, each in fresh processes, and their outcomes."""

import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.record import Environment
from stepmark.core.sweep import Outcome, Setting, Sweep, Try
from stepmark.launch import child
from stepmark.store.reader import read_info
from stepmark.store.sweeps import Journal

ORDERS = ("interleaved", "fixed")
PROGRAM = (sys.executable, "-m", "stepmark")
_LAST_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The environment, program and budget of tries. `say` gets a line per try."""

    base: Mapping[str, str]  # environment
    program: Sequence[str] = PROGRAM
    budget_s: float | None = None
    say: Callable[[str], None] = lambda text: None


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


def make(journal: Journal, means: Means, signals: Sequence[int]) -> int | None:
    """Run what is missing of a sweep. Returns the signal that ended it early, if one did.

    A new round begins only when the budget has room for the longest so far, including those
    before a --resume.
    """
    started_s, longest_s = time.monotonic(), _longest_s(journal.sweep)
    for number in range(1, journal.sweep.repeats + 1):
        round_s = time.monotonic()
        over = means.budget_s is not None and round_s - started_s + longest_s > means.budget_s
        missing = _missing(journal, number)
        if missing and over and number > 1:
            means.say(f"budget: {number - 1} of {journal.sweep.repeats} rounds")
            return None
        for setting in missing:
            if signals:
                return signals[0]
            attempt = _try(journal, setting, number, means, signals)
            if attempt is None:
                return signals[0]
            journal.add(attempt)
            means.say(_line(journal, attempt))
            if attempt.outcome is Outcome.INTERRUPTED:
                return signals[0]
        longest_s = max(longest_s, time.monotonic() - round_s)
    return None


def _longest_s(sweep: Sweep) -> float:
    """Return the longest round so far, by its tries that were not interrupted."""
    rounds: dict[int, float] = {}
    for attempt in sweep.tries:
        if attempt.outcome is not Outcome.INTERRUPTED:
            rounds[attempt.round] = rounds.get(attempt.round, 0.0) + attempt.seconds
    return max(rounds.values(), default=0.0)


def _missing(journal: Journal, number: int) -> list[Setting]:
    """Return the settings left in this round, in its order, without those that failed."""
    sweep = journal.sweep
    order = order_of(len(sweep.settings), number, order=sweep.order, seed=sweep.seed)
    return [
        setting
        for setting in (sweep.settings[place] for place in order)
        if setting.name not in sweep.failed and (number, setting.name) not in sweep.done
    ]


def _try(
    journal: Journal, setting: Setting, number: int, means: Means, signals: Sequence[int]
) -> Try | None:
    """Run a setting. Returns None when a signal came before the command was started."""
    sweep = journal.sweep
    place = [each.name for each in sweep.settings].index(setting.name)
    count = sum((each.round, each.setting) == (number, setting.name) for each in sweep.tries)
    again = f"-{count + 1}" if count else ""
    stem = journal.path / "output" / f"round{number}-setting{place}{again}"
    # A folder of its own, so that no other process's run is taken for this try's.
    runs = journal.path / "runs" / stem.name
    started_at = time.time()
    ended = child.run(
        [*means.program, *setting.command(sweep.command), "--out", str(runs)],
        environment(setting, means.base),
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
        differs=_differs(journal, run) if outcome is Outcome.DONE else (),
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


def _differs(journal: Journal, run: str) -> tuple[str, ...]:
    """Return how the environment differs from the first try's, apart from swept variables."""
    runs, sweep = journal.path / "runs", journal.sweep
    first = next((each.run for each in sweep.tries if each.outcome is Outcome.DONE), run)
    try:
        before, now = (read_info(runs / name).environment for name in (first, run))
    except ConfigError as error:
        return (str(error),)
    swept = {name for setting in sweep.settings for name, _ in setting.variables}
    old, new = _facts(before, swept), _facts(now, swept)
    names = dict.fromkeys((*old, *new))
    return tuple(
        f"{name}: {old.get(name, 'unset')} -> {new.get(name, 'unset')}"
        for name in names
        if old.get(name) != new.get(name)
    )


# Variables that are set anew for each launch, or by stepmark.
_OWN = ("TORCHELASTIC", "STEPMARK", "OMP_", "MASTER_")


def _facts(environment: Environment, swept: set[str]) -> dict[str, str]:
    devices = (f"{device.name} {device.power_limit_w} W" for device in environment.devices)
    variables = {
        name: value
        for name, value in environment.variables.items()
        if name not in swept and not name.startswith(_OWN)
    }
    return {
        "host": environment.host,
        "devices": "; ".join(devices),
        "torch": environment.torch,
        "stepmark": environment.git_commit or environment.stepmark,
        **environment.versions,
        **variables,
    }


def _line(journal: Journal, attempt: Try) -> str:
    sweep = journal.sweep
    done = sum(t.outcome is not Outcome.INTERRUPTED for t in sweep.tries)
    skipped = sum(sweep.repeats - t.round for t in sweep.failed.values())
    total = sweep.repeats * len(sweep.settings) - skipped
    why = f": {attempt.stderr[-1]}" if attempt.stderr else ""
    head = f"[{done}/{total}] round {attempt.round}, {attempt.setting}"
    return f"{head}: {attempt.outcome}, {attempt.seconds:.1f} s{why}"
