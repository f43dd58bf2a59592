"""A sweep from its first try to its results: rounds, comparison, recommendation, files."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from stepmark.cases.sweep import Setting, Sweep
from stepmark.comparison import comparison_text as drawn
from stepmark.comparison import recommendation, sweep_run, tuner_verb
from stepmark.comparison.comparison_page import page
from stepmark.comparison.comparison_text import printed
from stepmark.comparison.recommendation import Advice
from stepmark.comparison.sweep_budget import next_step
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_race import Result, compare_settings, least
from stepmark.comparison.sweep_run import RunSettings
from stepmark.comparison.tuner_verb import ProbeError
from stepmark.ground.errors import worst
from stepmark.ground.files import write_text
from stepmark.ground.signals import catching
from stepmark.measuring.delivery import write_files
from stepmark.store.codec import to_plain
from stepmark.store.sweeps import Journal
from stepmark.store.view import console, print_text

NOTHING_TO_COMPARE = "nothing to compare: the baseline and another setting must be measured"


def run(
    sweep: Sweep,
    path: Path | None,
    request: tuner_verb.Request | None,
    options: SweepOptions,
    base: Mapping[str, str],
) -> int:
    """Measure what is missing, compare and recommend. Returns the exit code."""
    return measure(sweep, path, options, base, partial(_show, request, options))


def measure(
    sweep: Sweep,
    path: Path | None,
    options: SweepOptions,
    base: Mapping[str, str],
    show: Callable[[Journal, RunSettings, list[int]], int],
) -> int:
    """Measure what is missing and show the sweep. Returns the exit code."""
    settings = RunSettings(base=base, budget_s=options.budget, report=_report)
    _report(*(f"# {note}" for note in sweep.notes))
    opened = Journal.reopen(path) if path else Journal.create(options.out, sweep)
    with opened as journal, catching() as signals:
        if journal.sweep != sweep:
            journal.change(
                repeats=sweep.repeats,
                timeout_s=sweep.timeout_s,
                baseline=sweep.baseline,
                min_gain=sweep.min_gain,
                selection=sweep.selection,
                repeated=sweep.repeated,
            )
        number = sweep_run.make(journal, settings, signals)
        if number is None:
            code = show(journal, settings, signals)
            number = signals[0] if signals else None
        if number is not None:
            word = "interrupted" if number == 2 else "terminated"
            _report(f"{word}; go on with: stepmark sweep --resume {journal.path}")
            return 128 + number
    _report(f"sweep {journal.path}")
    return code


def _show(
    request: tuner_verb.Request | None,
    options: SweepOptions,
    journal: Journal,
    settings: RunSettings,
    signals: list[int],
) -> int:
    sweep = journal.sweep
    result = compare_settings(journal.path, sweep)
    code = 3 if sweep.failed else 0
    failed = failed_lines(sweep, journal.path)
    lines = [*failed, *closing_lines(result, sweep, journal.path)]
    if result is None:
        _report(*lines)
        return 3
    _files(result, sweep, options, lines)
    if not options.to_stdout:
        print_result(result, lines)
    else:
        _report(*lines)
    if request is None:
        return code
    try:
        remarks, tuned = tuner_verb.emit(journal, result.advice, request, settings, signals)
    except ProbeError:
        if not signals:
            raise
        return code  # a signal ended the probe
    _report(*remarks)
    return worst(code, tuned)


def failed_lines(sweep: Sweep, path: Path) -> list[str]:
    """Return which settings failed, why, and how to repeat them."""
    failed = [
        f"failed: {name} in round {last.round} after {last.seconds:.1f} s: {last.outcome}, "
        f"exit code {last.exit_code}" + "".join(f"\n  {line}" for line in last.stderr)
        for name, last in sweep.failed.items()
    ]
    if failed:
        failed.append(f"stepmark sweep --resume {path} repeats what failed")
    return failed


def print_result(result: Result, lines: Sequence[str]) -> None:
    """Print the comparisons, and lines such as the recommendation."""
    printed(result.comparison, console())
    if result.fresh:
        sys.stdout.write("\nfresh rounds, which had no part in the selection:\n")
        printed(result.fresh, console())
    print_text(lines)
    sys.stdout.flush()


def closing_lines(result: Result | None, sweep: Sweep, path: Path) -> list[str]:
    """Return the recommendation; without a verdict also the budget that would give one."""
    needed = least(path, sweep)
    if result is None:
        return [NOTHING_TO_COMPARE, *next_step(sweep, path, needed, None)]
    return [*advice_lines(result.advice, sweep), *next_step(sweep, path, needed, result.advice)]


def advice_lines(advice: Advice, sweep: Sweep) -> list[str]:
    """Return the recommendation, with what to export."""
    settings = {setting.name: setting for setting in sweep.settings}
    base = settings[sweep.baseline]
    exports = {name: export_lines(setting, base) for name, setting in settings.items()}
    lines = recommendation.text_of(advice, exports)
    swept = {name for name, _ in sweep.settings[0].variables}
    by_size = len({span.winner for span in advice.ranges}) > 1
    if by_size and sweep.command[0] == "comm" and swept & set(tuner_verb.CHOSEN):
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
    if setting.executable != base.executable:
        lines.append(f"with {shlex.quote(setting.executable or sys.executable)}")
    return "\n".join(lines)


def _files(result: Result, sweep: Sweep, options: SweepOptions, lines: Sequence[str]) -> None:
    comparison = result.comparison
    rows = drawn.rows(comparison)
    document = {
        "sweep": sweep.sweep_id,
        "command": list(sweep.command),
        "baseline": sweep.baseline,
        "lines": rows,
        "overall": drawn.overall_rows(comparison),
        "fresh_lines": drawn.rows(result.fresh) if result.fresh else [],
        "selection": to_plain(sweep.selection) if sweep.selection else None,
        "dropped": dict(sweep.dropped),
        "recommended": result.advice.single,
        "ranges": recommendation.rows(result.advice),
        "failed": [to_plain(failure) for failure in sweep.failed.values()],
        "notes": list(comparison.notes),
    }
    write_files(options, "sweep", document, rows)
    if target := options.html:
        write_text(target, page(comparison, lines).html(), "html")


def _report(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
