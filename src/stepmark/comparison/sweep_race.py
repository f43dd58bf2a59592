"""The decisions of a sweep: its sides, which settings go on, and which are recommended."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.cases.sweep import FAILURES, Outcome, Selection, Setting, Sweep
from stepmark.comparison import racing, recommendation
from stepmark.comparison.compare import Options, compare, rows_by_line
from stepmark.comparison.compare_verb import side_of_runs
from stepmark.comparison.comparison import Comparison, Series, Side
from stepmark.comparison.launch_noise import noise_on_host
from stepmark.comparison.recommendation import Advice
from stepmark.comparison.series import STRICT
from stepmark.comparison.sweep_budget import Least, fresh_s, round_s, seconds_of
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import plural
from stepmark.store.sweeps import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The comparison in the selection's rounds, and in fresh ones; which setting to use."""

    comparison: Comparison
    advice: Advice
    fresh: Comparison | None = None


def decide(journal: Journal, rounds: int, *, left_s: float) -> list[str]:
    """Drop settings after a round, and select if no further round is needed, or allowed.

    left_s: of the budget. If a further round and the least fresh rounds take longer, what is
    certain now is selected; if nothing is, a further round may still make it so. Returns
    remarks. What is decided is recorded.
    """
    sweep = journal.sweep
    if not sweep.has_race or sweep.selection is not None:
        return []
    dropped, is_decided = _standing(journal.path, sweep, rounds)
    needed = least(journal.path, sweep)
    remarks = [f"dropped: {name} is nowhere the fastest" for name in dropped]
    if dropped:
        journal.change(dropped={**sweep.dropped, **dict.fromkeys(dropped, rounds)})
    is_over = is_decided or rounds >= sweep.repeats
    next_s = round_s(journal.sweep, rounds + 1) + fresh_s(journal.sweep, needed.fresh)
    if is_over or left_s < next_s:
        selection = _selected(journal.path, journal.sweep, rounds, needed.fresh, left_s)
        if is_over or selection.settings:
            journal.change(selection=selection)
        if selection.settings:
            names = ", ".join(selection.settings)
            follow = plural(selection.fresh, "fresh round")
            remarks.append(f"selected: {names}; {follow} to confirm the gain")
    return remarks


def reopen(journal: Journal) -> None:
    """Undo a selection, because a setting that had failed is measured in its rounds after all.

    It races against those that were selected, over all rounds so far; a new selection then has
    fresh rounds of its own. The other settings have lost, and are measured no more.
    """
    sweep = journal.sweep
    if sweep.selection is None:
        return
    rounds = sweep.selection.rounds
    measured = {name for number, name in sweep.done if number == rounds}
    lost = measured - sweep.members(sweep.last_round)
    journal.change(
        selection=None,
        dropped={**sweep.dropped, **dict.fromkeys(sorted(lost), rounds)},
        repeats=max(sweep.repeats, sweep.last_round),
    )


def least(path: Path, sweep: Sweep) -> Least:
    """Return what a verdict takes: less where other machines show how launches vary."""
    sides, _ = _sides(path, sweep, range(1, 2))
    if any(series.noise for side in sides.values() for series in side.series):
        return Least(rounds=1, fresh=1)
    return Least(rounds=racing.LEAST_ROUNDS, fresh=racing.LEAST_FRESH)


def _standing(path: Path, sweep: Sweep, rounds: int) -> tuple[list[str], bool]:
    """Return the settings to drop after these rounds, and whether the race is decided."""
    sides, _ = _sides(path, sweep, range(1, rounds + 1))
    base = sides.get(sweep.baseline)
    if base is None:
        return [], False
    others = sweep.members(rounds) - {sweep.baseline}
    raced = [side for name, side in sides.items() if name in others]
    rows = {s.name: rows_by_line(base, s) for s in raced if not _differences(base, s)}
    standing = racing.standing(
        rows, rounds=rounds, num_settings=len(sweep.settings) - 1, gain=sweep.min_gain
    )
    # What measures something else is not judged, and has all its rounds.
    return sorted(standing.dropped), standing.is_decided and len(rows) == len(raced)


def _selected(
    path: Path, sweep: Sweep, rounds: int, least_fresh: int, left_s: float
) -> Selection:
    """Return the settings that the first rounds select, and how many rounds confirm them."""
    result = _compared(path, sweep, range(1, rounds + 1))
    settings = result.advice.selected if result else ()
    if result is None or not settings:
        return Selection(rounds=rounds)
    gains = [pick.ratio for pick in result.advice.picks if pick.winner and pick.ratio]
    most = int(min(sweep.repeats, left_s / seconds_of(sweep, (sweep.baseline, *settings))))
    count = min(racing.LEAST_FRESH, max(least_fresh, most))
    fresh = racing.fresh_rounds(gains, rounds=rounds, least=count, most=most)
    return Selection(rounds=rounds, settings=settings, fresh=fresh)


def compare_settings(path: Path, sweep: Sweep) -> Result | None:
    """Compare settings with the baseline, by round, and confirm what was selected.

    None where fewer than two were measured in all their rounds.
    """
    selection = sweep.selection or Selection(rounds=sweep.repeats)
    result = _compared(path, sweep, range(1, selection.rounds + 1))
    if result is None:
        return None
    first = selection.rounds + 1
    fresh = None
    count = 0
    if selection.settings and sweep.is_complete:
        confirmed = _compared(path, sweep, range(first, first + selection.fresh))
        fresh, count = (confirmed.comparison, selection.fresh) if confirmed else (None, 0)
    advice = recommendation.confirm(result.advice, fresh, count)
    return dataclasses.replace(result, advice=advice, fresh=fresh)


def _compared(path: Path, sweep: Sweep, rounds: range) -> Result | None:
    sides, empty = _sides(path, sweep, rounds)
    if sweep.baseline not in sides or len(sides) < 2:
        return None
    base = sides.pop(sweep.baseline)
    return of_sides([base, *sides.values()], sweep, empty)


def _sides(path: Path, sweep: Sweep, rounds: range) -> tuple[dict[str, Side], list[str]]:
    """Return the settings that did not fail, by name, and remarks on those without a result."""
    sides = {}
    empty = []
    for setting in sweep.settings:
        runs = {
            attempt.run: attempt.round
            for attempt in sweep.tries
            if attempt.setting == setting.name
            and attempt.outcome is Outcome.DONE
            and attempt.round in rounds
        }
        if runs and setting.name not in sweep.failed:
            try:
                sides[setting.name] = side_by_round(setting, path / "runs", runs)
            except ConfigError as error:  # such as a run whose cases were all skipped
                empty.append(f"{setting.name} is left out: {error}")
    return sides, empty


def of_sides(sides: list[Side], sweep: Sweep, remarks: Sequence[str] = ()) -> Result:
    """Compare the first side, the baseline, with the others, and select."""
    comparison = compare(sides, Options(allowed=STRICT))
    notes = (*comparison.notes, *_notes(sweep), *remarks)
    comparison = dataclasses.replace(comparison, notes=notes)
    left_out = {side.name: why for side in sides[1:] if (why := _differences(sides[0], side))}
    advice = recommendation.advise(
        comparison, min_gain=sweep.min_gain, left_out=left_out, dropped=sweep.dropped
    )
    return Result(comparison=comparison, advice=advice)


def side_by_round(setting: Setting, folder: Path, rounds: Mapping[str, int]) -> Side:
    """Return a setting's side, in which a try is one launch, because its launches correlate.

    rounds: number of the round by the run's folder.
    """
    side = side_of_runs(setting.name, [folder / run for run in rounds])
    by_id = {Path(run).name: number for run, number in rounds.items()}
    swept = {name for name, _ in setting.variables}  # they are in the side's name
    context = {name: value for name, value in side.context.items() if name not in swept}
    by_round = tuple(
        dataclasses.replace(_by_round(series, by_id), noise=noise_on_host(series))
        for series in side.series
    )
    return dataclasses.replace(side, series=by_round, context=context, by_round=True)


def _by_round(series: Series, rounds: Mapping[str, int]) -> Series:
    pooled: dict[str, tuple[float, ...]] = {}
    starts: dict[str, float] = {}
    for launch, values in series.launches.items():
        number = str(rounds[launch.partition("/")[0]])
        pooled[number] = (*pooled.get(number, ()), *values)
        starts.setdefault(number, series.starts[launch])
    busy = frozenset(str(rounds[launch.partition("/")[0]]) for launch in series.busy)
    return dataclasses.replace(series, launches=pooled, starts=starts, busy=busy)


def _differences(base: Side, side: Side) -> str:
    """Return how the measurement differs from the baseline's; "" where it does not."""
    values = ((name, _values_text(base, name), _values_text(side, name)) for name in STRICT)
    return ", ".join(
        f"another {name} than {base.name} ({value}, not {base_value})"
        for name, base_value, value in values
        if value != base_value
    )


def _values_text(side: Side, name: str) -> str:
    values = {series.fields.get(name) for series in side.series}
    return " and ".join(sorted("none" if v in (None, "") else str(v) for v in values))


def _notes(sweep: Sweep) -> list[str]:
    changed = dict.fromkeys(
        f"round {attempt.round}, {attempt.setting}: {difference}"
        for attempt in sweep.tries
        for difference in attempt.differs
    )
    failed = {(t.round, t.setting) for t in sweep.tries if t.outcome in FAILURES}
    repeated = (
        f"round {number}, {name}: measured after it had failed, so later than its round"
        for number, name in sorted(failed & sweep.done)
    )
    dropped = (
        f"{name} was dropped after {plural(n, 'round')}" for name, n in sweep.dropped.items()
    )
    return [*sweep.notes, *changed, *repeated, *dropped]
