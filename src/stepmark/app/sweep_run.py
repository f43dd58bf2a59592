"""The tries of a sweep: in which order, each in fresh processes, what came of each."""

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
    """What tries are made with. `say` gets a line per try."""

    base: Mapping[str, str]  # environment
    program: Sequence[str] = PROGRAM
    budget_s: float | None = None
    say: Callable[[str], None] = lambda text: None


def environment(setting: Setting, base: Mapping[str, str]) -> dict[str, str]:
    """Of a try: the user's own but for what is swept."""
    swept = {name for name, _ in setting.variables}
    kept = {name: value for name, value in base.items() if name not in swept}
    return kept | {name: value for name, value in setting.variables if value}


def order_of(num_settings: int, number: int, *, order: str, seed: int) -> list[int]:
    """Places of the settings in a round. Interleaved: a new order each round, by the seed.

    So no setting always follows the same one, and a drift of the machine hits all alike.
    """
    places = list(range(num_settings))
    if order == "interleaved":
        random.Random(f"{seed} {number}").shuffle(places)
    return places


def make(journal: Journal, means: Means, signals: Sequence[int]) -> int | None:
    """What is missing of a sweep; the signal that ended it early, if one did.

    A new round begins only when the budget holds one as long as the longest so far, those
    before a --resume among them.
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
            one = _try(journal, setting, number, means, signals)
            if one is None:
                return signals[0]
            journal.add(one)
            means.say(_line(journal, one))
            if one.outcome is Outcome.INTERRUPTED:
                return signals[0]
        longest_s = max(longest_s, time.monotonic() - round_s)
    return None


def _longest_s(sweep: Sweep) -> float:
    """Of the rounds so far, by their tries that ended on their own."""
    rounds: dict[int, float] = {}
    for one in sweep.tries:
        if one.outcome is not Outcome.INTERRUPTED:
            rounds[one.round] = rounds.get(one.round, 0.0) + one.seconds
    return max(rounds.values(), default=0.0)


def _missing(journal: Journal, number: int) -> list[Setting]:
    """Settings of this round, in its order, without those that went wrong before."""
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
    """None when a signal came before the command was started."""
    sweep, runs = journal.sweep, journal.path / "runs"
    place = [one.name for one in sweep.settings].index(setting.name)
    count = sum(one.round == number and one.setting == setting.name for one in sweep.tries)
    again = f"-{count + 1}" if count else ""
    stem = journal.path / "output" / f"round{number}-setting{place}{again}"
    before = _runs_in(runs)
    started_at = time.time()
    ended = child.run(
        [*means.program, *setting.command(sweep.command), "--out", str(runs)],
        environment(setting, means.base),
        out=stem.with_suffix(".out"),
        err=stem.with_suffix(".err"),
        limit_s=sweep.timeout_s,
        signals=signals,
    )
    written = sorted(_runs_in(runs) - before)
    run = written[0] if written else ""
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


def _runs_in(folder: Path) -> set[str]:
    return {file.parent.name for file in folder.glob("*/run.json")}


def _last_lines(file: Path) -> tuple[str, ...]:
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 8192))
        lines = stream.read().decode(errors="replace").splitlines()
    return tuple(line[:500] for line in lines if line.strip())[-_LAST_LINES:]


def _differs(journal: Journal, run: str) -> tuple[str, ...]:
    """Fields of the environment that are not as in the first try; what is swept may differ."""
    runs = journal.path / "runs"
    first = next((one.run for one in journal.sweep.tries if one.outcome is Outcome.DONE), run)
    try:
        before, now = (read_info(runs / name).environment for name in (first, run))
    except ConfigError as error:
        return (str(error),)
    swept = {name for one in journal.sweep.settings for name, _ in one.variables}
    old, new = _facts(before, swept), _facts(now, swept)
    names = dict.fromkeys((*old, *new))
    return tuple(
        f"{name}: {old.get(name, 'unset')} -> {new.get(name, 'unset')}"
        for name in names
        if old.get(name) != new.get(name)
    )


# Made anew for each launch, or ours.
_OWN = ("TORCHELASTIC", "STEPMARK", "OMP_", "MASTER_")


def _facts(found: Environment, swept: set[str]) -> dict[str, str]:
    devices = "; ".join(f"{one.name} {one.power_limit_w} W" for one in found.devices)
    variables = {
        name: value
        for name, value in found.variables.items()
        if name not in swept and not name.startswith(_OWN)
    }
    return {
        "host": found.host,
        "devices": devices,
        "torch": found.torch,
        "stepmark": found.git_commit or found.stepmark,
        **found.versions,
        **variables,
    }


def _line(journal: Journal, one: Try) -> str:
    sweep = journal.sweep
    done = sum(t.outcome is not Outcome.INTERRUPTED for t in sweep.tries)
    skipped = sum(sweep.repeats - t.round for t in sweep.failed.values())
    total = sweep.repeats * len(sweep.settings) - skipped
    why = f": {one.stderr[-1]}" if one.stderr else ""
    head = f"[{done}/{total}] round {one.round}, {one.setting}"
    return f"{head}: {one.outcome}, {one.seconds:.1f} s{why}"
