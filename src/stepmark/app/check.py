"""stepmark check: ten minutes to accept a machine against a reference run."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from stepmark.app import op
from stepmark.app.compare import side_of_runs
from stepmark.app.delivery import exit_code, write_files
from stepmark.app.machine import machine
from stepmark.app.measure import measure_quietly
from stepmark.app.view import console, view
from stepmark.core.acceptance import Acceptance, accept, launches_needed
from stepmark.core.case import OpCase
from stepmark.core.comparison import Comparison
from stepmark.core.errors import ConfigError, worst
from stepmark.core.op_options import ConfigOptions
from stepmark.core.plan import OpHow
from stepmark.core.ratio import Ratio
from stepmark.core.record import Measured
from stepmark.core.verb_options import CheckOptions
from stepmark.report import comparison as drawn
from stepmark.report.comparison import printed
from stepmark.store.compare import Options, compare
from stepmark.store.reader import find_run, is_run, read


def run(options: CheckOptions) -> int:
    """Measure the reference run's cases again and compare. Returns the exit code.

    It is 0 only if every case is accepted (core/acceptance.py).
    """
    options.check_stdout()
    before = _runs_named(options)
    reference = {k: v for path in before for k, v in _reference(path).items()}
    name = ", ".join(path.name for path in before)
    paths, code, wrong = _measure_again(name, reference, options)
    if code in (2, 130, 143):
        return code
    if not any(isinstance(r, Measured) for path in paths for r in read(path).records):
        sys.stderr.write("nothing was measured: no launch has a result to compare\n")
        return worst(code, 3)
    if wrong >= set(reference):
        sys.stderr.write(f"all {len(wrong)} results are wrong\n")
        return 1
    # Means, because under a power cap the clock and so the median hop between a few states.
    sides = [side_of_runs("reference", before), side_of_runs("now", paths)]
    comparison = compare(sides, Options(statistic="mean"))
    accepted = accept(_ratios(comparison), options.floor)
    comparison = replace(
        comparison,
        too_slow=tuple((place, "now") for place in accepted.slow),
        fail_if_slower=options.floor,
    )
    rows = [
        {**row, "too_slow": None if place in accepted.undecided else place in accepted.slow}
        for place, row in enumerate(drawn.rows(comparison))
    ]
    write_files(options, "check", rows, rows)
    if not options.to_stdout:
        printed(comparison, console())
    missing = len(reference) - len(rows)
    slower = len(accepted.slow)
    undecided = _needs(comparison, accepted, options.floor)
    text = f"{slower} of {len(rows)} cases slower than {name}"
    text += f"; {len(wrong)} with wrong results" if wrong else ""
    text += f"; {missing} not compared" if missing else ""
    text += "".join(f"; cannot tell for {count}: {need}" for need, count in undecided.items())
    sys.stderr.write(f"{text}\n")
    return worst(code, 1 if slower else 0, 3 if missing or undecided else 0)


def _runs_named(options: CheckOptions) -> list[Path]:
    """Return the runs of --baseline, which commas join as launches."""
    if is_run(Path(options.baseline)):
        return [Path(options.baseline)]
    return [find_run(options.runs, name) for name in options.baseline.split(",")]


def _ratios(comparison: Comparison) -> list[Ratio | None]:
    return [line.cells[comparison.names[1]].ratio for line in comparison.lines]


def _needs(comparison: Comparison, accepted: Acceptance, limit: float) -> dict[str, int]:
    """Return what would decide on cases, and the number of such cases."""
    base, now = comparison.names
    needs: Counter[str] = Counter()
    more: list[int] = []
    for place in accepted.undecided:
        cells = comparison.lines[place].cells
        ratio, num_base = cells[now].ratio, cells[base].num_launches
        num_now = cells[now].num_launches
        if ratio is None or not ratio.se_log:
            reason = ratio.reason if ratio else "no time"
            needs[f"no interval ({reason}); use more --launches that are measured"] += 1
            continue
        count = launches_needed(
            ratio, limit, base=num_base, now=num_now, num_cases=len(comparison.lines)
        )
        if count:
            more.append(count)
        elif num_base < num_now:
            needs["use a reference of several launches, --baseline A,B,C"] += 1
        else:
            needs["use a quieter machine, or a larger --floor"] += 1
    if more:
        needs[f"use --launches {max(more)}"] = len(more)
    return needs


def _measure_again(
    name: str, reference: dict[str, Measured], options: CheckOptions
) -> tuple[list[Path], int, set[str]]:
    """Return run folders, the worst exit code, and the cases with wrong results."""
    how = OpHow(budget_s=options.budget / options.launches)
    machine(next(iter(reference.values())).case.device)  # refuses a device that is not here
    plan = op.plan([record.operator for record in reference.values()], ConfigOptions(), how=how)
    paths: list[Path] = []
    code, wrong = 0, set[str]()
    for number in range(options.launches):
        settings = {"check_of": name, "launch": f"{number + 1}/{options.launches}"}
        ranks_code, run = measure_quietly(plan, str(options.runs / "checks"), settings)
        if ranks_code in (2, 130, 143):
            return paths, ranks_code, wrong
        outcome = view(run)
        code = worst(code, ranks_code, exit_code(outcome))
        paths.append(run)
        wrong |= {
            record.case.case_id
            for record in outcome.records
            if isinstance(record, Measured) and record.num_wrong
        }
    return paths, code, wrong


def _reference(path: Path) -> dict[str, Measured]:
    """Return the measured operators of a run of one rank, by case_id. Raises ConfigError."""
    measured = {
        record.case.case_id: record
        for record in read(path).latest
        if isinstance(record, Measured)
        and isinstance(record.case, OpCase)
        and not record.num_wrong
    }
    if not measured:
        raise ConfigError("baseline", path, "a run that measured operators (stepmark op)")
    if any(record.case.num_ranks > 1 for record in measured.values()):
        raise ConfigError("baseline", path, "a run of one rank")
    return measured
