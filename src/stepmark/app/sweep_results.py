"""A sweep from its first try to its results: rounds, comparison, recommendation, files."""

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.app import sweep_run, tuner
from stepmark.app.compare import side_of_runs
from stepmark.app.delivery import write_files
from stepmark.app.sweep_run import Means
from stepmark.app.tuner import ProbeError
from stepmark.app.view import console
from stepmark.core.comparison import Comparison, Series, Side
from stepmark.core.errors import ConfigError, worst
from stepmark.core.options import load
from stepmark.core.sweep import Setting, Sweep
from stepmark.core.verb_options import SweepOptions
from stepmark.launch.signals import catching
from stepmark.report import comparison as drawn
from stepmark.report import recommendation
from stepmark.report.comparison import printed
from stepmark.report.recommendation import Advice
from stepmark.store.codec import to_plain
from stepmark.store.compare import Options, compare
from stepmark.store.files import write_text
from stepmark.store.series import STRICT
from stepmark.store.sweeps import Journal


def run(
    sweep: Sweep,
    path: Path | None,
    request: tuner.Request | None,
    options: SweepOptions,
    base: Mapping[str, str],
) -> int:
    """Measure what is missing, compare and recommend. Returns the exit code."""
    means = Means(base=base, budget_s=options.budget, say=_say)
    for note in sweep.notes:
        _say(f"# {note}")
    opened = Journal.go_on(path) if path else Journal.create(options.out, sweep)
    with opened as journal, catching() as signals:
        if journal.sweep != sweep:
            journal.change(
                repeats=sweep.repeats, timeout_s=sweep.timeout_s, baseline=sweep.baseline
            )
        number = sweep_run.make(journal, means, signals)
        if number is None:
            code = _show(journal, request, options, means, signals)
            number = signals[0] if signals else None
        if number is not None:
            word = "interrupted" if number == 2 else "terminated"
            _say(f"{word}; go on with: stepmark sweep --resume {journal.path}")
            return 128 + number
    _say(f"sweep {journal.path}")
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The comparison of a sweep's settings, and which to use."""

    comparison: Comparison
    advice: Advice


def compare_settings(path: Path, sweep: Sweep, min_gain: float) -> _Result | None:
    """Compare settings that were measured in all their rounds with the baseline, by round.

    None where fewer than two were.
    """
    sides, empty = {}, []
    for setting in sweep.settings:
        runs = {
            attempt.run: attempt.round
            for attempt in sweep.tries
            if attempt.setting == setting.name
            and (attempt.round, attempt.setting) in sweep.done
            and attempt.run
        }
        if runs and setting.name not in sweep.failed:
            try:
                sides[setting.name] = side_by_round(setting, path / "runs", runs)
            except ConfigError as error:  # such as a run whose cases were all skipped
                empty.append(f"{setting.name} is left out: {error}")
    if sweep.baseline not in sides or len(sides) < 2:
        return None
    base = sides.pop(sweep.baseline)
    return of_sides([base, *sides.values()], sweep, min_gain, empty)


def of_sides(
    sides: list[Side], sweep: Sweep, min_gain: float, remarks: Sequence[str] = ()
) -> _Result:
    """Compare the first side, the baseline, with the others."""
    comparison = compare(sides, Options(allowed=STRICT))
    notes = (*comparison.notes, *_notes(sweep), *remarks)
    comparison = dataclasses.replace(comparison, notes=notes)
    left_out = {side.name: why for side in sides[1:] if (why := _differences(sides[0], side))}
    advice = recommendation.advise(comparison, min_gain=min_gain, left_out=left_out)
    return _Result(comparison=comparison, advice=advice)


def side_by_round(setting: Setting, folder: Path, rounds: Mapping[str, int]) -> Side:
    """Return a setting's side, in which a try is one launch, because its launches correlate.

    rounds: number of the round by the run's folder.
    """
    side = side_of_runs(setting.name, [folder / run for run in rounds])
    by_id = {Path(run).name: number for run, number in rounds.items()}
    swept = {name for name, _ in setting.variables}  # they are in the side's name
    context = {name: value for name, value in side.context.items() if name not in swept}
    by_round = tuple(_by_round(series, by_id) for series in side.series)
    return dataclasses.replace(side, series=by_round, context=context, by_round=True)


def _by_round(series: Series, rounds: Mapping[str, int]) -> Series:
    pooled: dict[str, tuple[float, ...]] = {}
    starts: dict[str, float] = {}
    for launch, values in series.launches.items():
        number = str(rounds[launch.partition("/")[0]])
        pooled[number] = (*pooled.get(number, ()), *values)
        starts.setdefault(number, series.starts[launch])
    return dataclasses.replace(series, launches=pooled, starts=starts)


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
    return [*sweep.notes, *changed]


def _show(
    journal: Journal,
    request: tuner.Request | None,
    options: SweepOptions,
    means: Means,
    signals: list[int],
) -> int:
    sweep = journal.sweep
    result = compare_settings(journal.path, sweep, options.min_gain)
    code = 3 if sweep.failed else 0
    failed = [
        f"failed: {name} in round {last.round} after {last.seconds:.1f} s: {last.outcome}, "
        f"exit code {last.exit_code}" + "".join(f"\n  {line}" for line in last.stderr)
        for name, last in sweep.failed.items()
    ]
    if result is None:
        for line in failed:
            _say(line)
        _say("nothing to compare: the baseline and another setting must be measured")
        return 3
    lines = [*failed, *_advice_lines(result.advice, sweep)]
    _files(result, sweep, options, lines)
    if not options.to_stdout:
        printed(result.comparison, console())
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    else:
        for line in lines:
            _say(line)
    if request is None:
        return code
    try:
        remarks, tuned = tuner.emit(journal, result.advice, request, means, signals)
    except ProbeError:
        if not signals:
            raise
        return code  # a signal ended the probe
    for line in remarks:
        _say(line)
    return worst(code, tuned)


def _advice_lines(advice: Advice, sweep: Sweep) -> list[str]:
    settings = {setting.name: setting for setting in sweep.settings}
    base = settings[sweep.baseline]
    exports = {name: export_lines(setting, base) for name, setting in settings.items()}
    lines = recommendation.text_of(advice, exports)
    swept = {name for name, _ in sweep.settings[0].variables}
    by_size = len({span.winner for span in advice.ranges}) > 1
    if by_size and sweep.command[0] == "comm" and swept & set(tuner.CHOSEN):
        lines.append("by size only a tuner plugin can set it: --emit-tuner FILE")
    return lines


def export_lines(setting: Setting, base: Setting) -> str:
    """Return shell lines that turn the baseline into a setting."""
    values = [f"{name}={shlex.quote(value)}" for name, value in setting.variables if value]
    in_base = {name for name, value in base.variables if value}
    unset = [name for name, value in setting.variables if not value and name in in_base]
    flags = setting.command(())
    lines = [f"export {' '.join(values)}"] if values else []
    lines += [f"unset {' '.join(unset)}"] if unset else []
    lines += [f"and in the command: {shlex.join(flags)}"] if flags else []
    return "\n".join(lines)


def _files(result: _Result, sweep: Sweep, options: SweepOptions, lines: Sequence[str]) -> None:
    comparison = result.comparison
    rows = drawn.rows(comparison)
    document = {
        "sweep": sweep.sweep_id,
        "command": list(sweep.command),
        "baseline": sweep.baseline,
        "lines": rows,
        "overall": drawn.overall_rows(comparison),
        "recommended": result.advice.single,
        "ranges": recommendation.rows(result.advice),
        "failed": [to_plain(failure) for failure in sweep.failed.values()],
        "notes": list(comparison.notes),
    }
    write_files(options, "sweep", document, rows)
    if target := options.html:
        page = load("stepmark.report.comparison_page:html")  # with plotly
        write_text(target, page(comparison, lines), "html")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
