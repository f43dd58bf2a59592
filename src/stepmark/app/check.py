"""stepmark check: ten minutes to accept a machine against a reference run."""

import sys
from pathlib import Path

from stepmark.app import op
from stepmark.app.compare import side_of_runs
from stepmark.app.delivery import exit_code, write_files
from stepmark.app.machine import machine
from stepmark.app.measure import measure_quietly
from stepmark.app.view import console, view
from stepmark.core.case import OpCase
from stepmark.core.errors import ConfigError, worst
from stepmark.core.op_options import ConfigOptions
from stepmark.core.plan import OpHow
from stepmark.core.record import Measured
from stepmark.core.verb_options import CheckOptions
from stepmark.report import comparison as drawn
from stepmark.report.comparison import printed
from stepmark.store.compare import Options, compare
from stepmark.store.reader import find_run, read


def run(options: CheckOptions) -> int:
    """Measure the reference run's cases again and compare. Returns the exit code."""
    options.check_stdout()
    path = find_run(options.runs, options.baseline)
    reference = _reference(path)
    paths, code, wrong = _measure_again(path.name, reference, options)
    if code in (2, 130, 143):
        return code
    if wrong >= set(reference):
        sys.stderr.write(f"all {len(wrong)} results are wrong\n")
        return 1
    # Means, because under a power cap the clock and so the median hop between a few states.
    sides = [side_of_runs("reference", [path]), side_of_runs("now", paths)]
    comparison = compare(sides, Options(statistic="mean", fail_if_slower=options.floor))
    rows = drawn.rows(comparison)
    write_files(options, "check", rows, rows)
    if not options.to_stdout:
        printed(comparison, console())
    missing = len(reference) - len(rows)
    slower = len(comparison.too_slow or ())
    text = f"{slower} of {len(rows)} cases slower than {path.name}"
    text += f"; {len(wrong)} with wrong results" if wrong else ""
    text += f"; {missing} not compared" if missing else ""
    sys.stderr.write(f"{text}\n")
    return worst(code, 1 if slower else 0, 3 if missing else 0)


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
        raise ConfigError("baseline", path, "a run with measured cases")
    if any(record.case.num_ranks > 1 for record in measured.values()):
        raise ConfigError("baseline", path, "a run of one rank")
    return measured
