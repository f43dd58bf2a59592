"""A sweep from its first try to what it says: rounds, comparison, recommendation, files.

Over 250 lines: one path, from which nothing else takes a part.
"""

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.app import sweep_run, tuner
from stepmark.app.compare import side_of_runs
from stepmark.app.delivery import make_folder, write_files
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


def check(options: SweepOptions) -> None:
    """Validate the outputs before measuring. Raises ConfigError."""
    options.check_stdout()
    if options.dry_run:
        return
    for name in ("json", "csv", "html"):
        if (target := getattr(options, name)) and target != "-":
            make_folder(name, Path(target).parent)
    make_folder("out", options.out)


def made(
    sweep: Sweep,
    path: Path | None,
    request: tuner.Request | None,
    options: SweepOptions,
    base: Mapping[str, str],
) -> int:
    """Try what is missing, compare, recommend; the exit code."""
    means = Means(base=base, budget_s=options.budget, say=_say)
    for note in sweep.notes:
        _say(f"# {note}")
    with _journal(sweep, path, options.out) as journal, catching() as signals:
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


@contextlib.contextmanager
def _journal(sweep: Sweep, path: Path | None, out: Path) -> Iterator[Journal]:
    with Journal.go_on(path) if path else Journal.create(out, sweep) as journal:
        if journal.sweep != sweep:
            journal.change(
                repeats=sweep.repeats, timeout_s=sweep.timeout_s, baseline=sweep.baseline
            )
        yield journal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a sweep comes to; nothing where less than two settings were measured."""

    comparison: Comparison
    advice: Advice


def compared(path: Path, sweep: Sweep, min_gain: float) -> _Found | None:
    """Settings that went well in all their rounds, against the baseline, by round."""
    sides, empty = {}, []
    for setting in sweep.settings:
        runs = [
            path / "runs" / one.run
            for one in sweep.tries
            if one.setting == setting.name
            and (one.round, one.setting) in sweep.done
            and one.run
        ]
        if runs and setting.name not in sweep.failed:
            try:
                sides[setting.name] = side_by_round(setting, runs)
            except ConfigError as error:  # as where all was skipped
                empty.append(f"{setting.name} is left out: {error}")
    if sweep.baseline not in sides or len(sides) < 2:
        return None
    base = sides.pop(sweep.baseline)
    found = of_sides([base, *sides.values()], sweep, min_gain)
    comparison = dataclasses.replace(found.comparison, notes=(*found.comparison.notes, *empty))
    return dataclasses.replace(found, comparison=comparison)


def of_sides(sides: list[Side], sweep: Sweep, min_gain: float) -> _Found:
    """The baseline first."""

    comparison = compare(sides, Options(allowed=STRICT))
    comparison = dataclasses.replace(comparison, notes=(*comparison.notes, *_notes(sweep)))
    left_out = {side.name: why for side in sides[1:] if (why := _unlike(sides[0], side))}
    advice = recommendation.advise(comparison, min_gain=min_gain, left_out=left_out)
    return _Found(comparison=comparison, advice=advice)


def side_by_round(setting: Setting, runs: list[Path]) -> Side:
    """Launches within one try share its moment: a try is one launch of the comparison."""

    side = side_of_runs(setting.name, runs)
    swept = {name for name, _ in setting.variables}  # the side's name says these
    context = {name: value for name, value in side.context.items() if name not in swept}
    return dataclasses.replace(side, series=tuple(map(_by_run, side.series)), context=context)


def _by_run(series: Series) -> Series:
    pooled: dict[str, tuple[float, ...]] = {}
    for launch, values in series.launches.items():
        run = launch.partition("/")[0]
        pooled[run] = (*pooled.get(run, ()), *values)
    return dataclasses.replace(series, launches=pooled)


def _unlike(base: Side, side: Side) -> str:
    """What was not measured as the baseline was, so that no gain follows; "" if all was."""
    found = ((name, _stated(base, name), _stated(side, name)) for name in STRICT)
    return ", ".join(
        f"another {name} than {base.name} ({theirs}, not {mine})"
        for name, mine, theirs in found
        if mine != theirs
    )


def _stated(side: Side, name: str) -> str:
    values = {series.fields.get(name) for series in side.series}
    return " and ".join(sorted("none" if v in (None, "") else str(v) for v in values))


def _notes(sweep: Sweep) -> list[str]:
    changed = dict.fromkeys(
        f"round {one.round}, {one.setting}: {what}"
        for one in sweep.tries
        for what in one.differs
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
    found = compared(journal.path, sweep, options.min_gain)
    code = 3 if sweep.failed else 0
    failed = [
        f"failed: {name} in round {one.round} after {one.seconds:.1f} s: {one.outcome}, "
        f"exit code {one.exit_code}" + "".join(f"\n  {line}" for line in one.stderr)
        for name, one in sweep.failed.items()
    ]
    if found is None:
        for line in failed:
            _say(line)
        _say("nothing to compare: the baseline and another setting must be measured")
        return 3
    lines = [*failed, *_advised(found.advice, sweep)]
    _files(found, sweep, options, lines)
    if not options.to_stdout:
        _print(found.comparison, lines)
    else:
        for line in lines:
            _say(line)
    if request is None:
        return code
    try:
        remarks, tuned = tuner.emit(journal, found.advice, request, means, signals)
    except ProbeError:
        if not signals:
            raise
        return code  # a probe that a signal ended
    for line in remarks:
        _say(line)
    return worst(code, tuned)


def _advised(advice: Advice, sweep: Sweep) -> list[str]:
    base = next(one for one in sweep.settings if one.name == sweep.baseline)
    exports = {one.name: export_lines(one, base) for one in sweep.settings}
    lines = recommendation.text_of(advice, exports)
    swept = {name for name, _ in sweep.settings[0].variables}
    by_size = len({one.winner for one in advice.ranges}) > 1
    if by_size and sweep.command[0] == "comm" and swept & set(tuner.CHOSEN):
        lines.append("by size only a tuner plugin can set it: --emit-tuner FILE")
    return lines


def export_lines(setting: Setting, base: Setting) -> str:
    """Shell lines that make a setting of what the baseline leaves."""
    given = [f"{name}={shlex.quote(value)}" for name, value in setting.variables if value]
    had = {name for name, value in base.variables if value}
    unset = [name for name, value in setting.variables if not value and name in had]
    flags = setting.command(())
    lines = [f"export {' '.join(given)}"] if given else []
    lines += [f"unset {' '.join(unset)}"] if unset else []
    lines += [f"and in the command: {shlex.join(flags)}"] if flags else []
    return "\n".join(lines)


def _print(comparison: Comparison, lines: list[str]) -> None:

    printed(comparison, console())
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _files(found: _Found, sweep: Sweep, options: SweepOptions, lines: Sequence[str]) -> None:

    comparison = found.comparison
    rows = drawn.rows(comparison)
    document = {
        "sweep": sweep.sweep_id,
        "command": list(sweep.command),
        "baseline": sweep.baseline,
        "lines": rows,
        "overall": drawn.overall_rows(comparison),
        "recommended": found.advice.single,
        "ranges": recommendation.rows(found.advice),
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
