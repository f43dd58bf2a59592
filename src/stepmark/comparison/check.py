"""stepmark check: ten minutes to accept a machine against a reference run.

All launches are one run in the folder `checks` of the runs folder, which `stepmark resume`
continues.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import How, Plan, entries
from stepmark.cases.record import AnyCase, Measured
from stepmark.comparison import comparison_text as drawn
from stepmark.comparison.acceptance import (
    LAUNCH_SD,
    Acceptance,
    accept,
    baseline_needed,
    launches_needed,
)
from stepmark.comparison.check_options import CheckOptions
from stepmark.comparison.compare import Options, compare
from stepmark.comparison.compare_verb import side_of_runs
from stepmark.comparison.comparison import Comparison
from stepmark.comparison.comparison_text import printed
from stepmark.comparison.series import by_process
from stepmark.ground.errors import ConfigError, worst
from stepmark.ground.launches import squares_within
from stepmark.ground.options import build, plain
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import format_duration
from stepmark.measuring.delivery import finish, write_files
from stepmark.measuring.machine import machine
from stepmark.measuring.measure import measure_quietly, show_run
from stepmark.store import plans
from stepmark.store.reader import find_run, is_run, read, read_info
from stepmark.store.view import console, view

Reference = Mapping[str, Sequence[Measured]]  # launches by case_id
BASELINE_KINDS = ("op", "comm", "train")


def run(options: CheckOptions) -> int:
    """Measure the reference run's cases again and compare. Returns the exit code."""
    options.check_stdout()
    if options.current is not None:
        return _judge_current(options, options.current)
    code, path = measure_quietly(plan(options), str(options.runs / "checks"))
    return show_run(path, code)


def _judge_current(options: CheckOptions, current: str) -> int:
    """Compare runs that were measured before with the reference. Returns the exit code."""
    for name in ("budget", "launches"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(name, value, "left out with --current, which is measured already")
    before = _runs_named(options, options.baseline)
    now = _runs_named(options, current)
    if {path.resolve() for path in before} & {path.resolve() for path in now}:
        raise ConfigError("current", current, "another run than --baseline")
    reference = _reference(before)
    records = [
        record
        for path in now
        for record in _measured_in(path)
        if record.case.case_id in reference
    ]
    if not records:
        allowed = f"a run with a case of {_name(before)}, by the same method"
        raise ConfigError("current", current, allowed)
    return _judge(options, now, records, 0, None)


def plan(options: CheckOptions) -> Plan:
    """Plan every case of the baseline in every launch. Raises ConfigError."""
    before = _runs_named(options, options.baseline)
    reference = _reference(before)
    cases = [launches[0].case for launches in reference.values()]
    world_size = max(
        case.world_size if isinstance(case, CommCase) else case.num_ranks for case in cases
    )
    machine(cases[0].device).num_ranks(str(world_size))  # refuses a device that is not here
    _check_baseline(before[0], reference, options)
    names = ",".join(str(path.absolute()) for path in before)
    return Plan(
        command="check",
        argv=tuple(sys.argv[1:]),
        options=plain(replace(options, baseline=names)),
        device=cases[0].device,
        world_size=world_size,
        how=_how(before[0], cases, options.budget_s),
        entries=entries(cases, options.num_launches),
        settings={"check_of": _name(before)},
    )


def _how(first: Path, cases: Sequence[AnyCase], budget_s: float) -> How:
    """Return how the baseline was measured, without traces, in this time."""
    how = plans.read(first).how if plans.has_plan(first) else How()
    counts = Counter(case.kind for case in cases)
    share_s = {kind: budget_s * counts[kind] / len(cases) or None for kind in BASELINE_KINDS}
    return How(
        op=replace(how.op, budget_s=share_s["op"], steps=None, warmups=None),
        comm=replace(how.comm, budget_s=share_s["comm"]),
        train=replace(how.train, budget_s=share_s["train"], profile=False, messages=False),
    )


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Compare a run with its baseline and decide. Returns the exit code."""
    options = build(CheckOptions, values)
    now = view(path)
    code = finish(now, path, code)
    measured = [record for record in now.records if isinstance(record, Measured)]
    if code in (130, 143) or not measured:
        return code
    return _judge(options, [path], measured, code, _launch_s(measured))


def _judge(
    options: CheckOptions,
    now: Sequence[Path],
    measured: Sequence[Measured],
    code: int,
    launch_s: float | None,
) -> int:
    """Compare what was measured with the baseline, print and decide. Returns the exit code.

    It is 0 only if every case is accepted (comparison/acceptance.py). launch_s: wall seconds of
    a launch; None where they are unknown.
    """
    before = _runs_named(options, options.baseline)
    reference = _reference(before)
    wrong = {record.case.case_id for record in measured if record.num_wrong}
    if wrong >= set(reference):
        sys.stderr.write(f"all {len(wrong)} results are wrong\n")
        return 1
    # Means, because under a power cap the clock and so the median hop between a few states.
    sides = [side_of_runs("reference", before), side_of_runs("now", now)]
    comparison = compare(sides, Options(statistic="mean"))
    ratios = [line.cells[comparison.names[1]].ratio for line in comparison.lines]
    accepted = accept(ratios, options.floor)
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
    undecided = _needs(comparison, accepted, options, launch_s)
    text = f"{slower} of {len(rows)} cases slower than {_name(before)}"
    text += f"; {len(wrong)} with wrong results" if wrong else ""
    text += f"; {missing} not compared" if missing else ""
    text += "".join(f"; cannot tell for {count}: {need}" for need, count in undecided.items())
    sys.stderr.write(f"{text}\n")
    return worst(code, 1 if slower else 0, 3 if missing or undecided else 0)


def _name(runs: Sequence[Path]) -> str:
    return ", ".join(path.name for path in runs)


def _runs_named(options: CheckOptions, text: str) -> list[Path]:
    """Return the runs of --baseline or --current, which commas join as launches."""
    if is_run(Path(text)):
        return [Path(text)]
    return [find_run(options.runs, name) for name in text.split(",")]


def _check_baseline(first: Path, reference: Reference, options: CheckOptions) -> None:
    """Raise ConfigError for a baseline of too few launches to accept an equal machine."""
    processes = [by_process(records) for records in reference.values()]
    launches = min(map(len, processes))
    squares, df = squares_within(
        {
            name: math.log(fmean(fmean(slowest_per_sample(r.samples.seconds)) for r in own))
            for name, own in by_name.items()
        }
        for by_name in processes
    )
    # A noisy baseline is not refused: what decides is how the launches of today vary.
    launch_sd = min(LAUNCH_SD, math.sqrt(squares / df)) if df else LAUNCH_SD
    num_cases = len(reference)
    now = options.num_launches
    needed = baseline_needed(options.floor, now=now, num_cases=num_cases, launch_sd=launch_sd)
    if needed is None:
        allowed = (
            f"use a larger one, or more than {now} --launches: no baseline decides on "
            f"{num_cases} cases if launches vary by {launch_sd:.1%}"
        )
        raise ConfigError("floor", f"{options.floor:g}", allowed)
    if launches < needed:
        command = re.sub(r" --launches[ =]\d+", "", read_info(first).command)
        verbs = tuple(f"stepmark {kind} " for kind in BASELINE_KINDS)
        command = command if command.startswith(verbs) else "stepmark op ..."
        raise ConfigError(
            "baseline",
            options.baseline,
            f"it has {launches} launch{'es' * (launches > 1)}, and --floor {options.floor:g} "
            f"with --launches {now} needs {needed} to decide on {num_cases} cases whose "
            f"launches vary by {launch_sd:.1%}; measure one by "
            f"`{command} --launches {needed}`",
        )


def _launch_s(records: Sequence[Measured]) -> float | None:
    """Return the wall seconds from one launch to the next; None of one launch."""
    starts: dict[int, float] = {}
    for record in records:
        starts[record.launch] = min(record.started_at, starts.get(record.launch, math.inf))
    between = [after - before for before, after in pairwise(sorted(starts.values()))]
    return median(between) if between else None


def _needs(
    comparison: Comparison, accepted: Acceptance, options: CheckOptions, launch_s: float | None
) -> dict[str, int]:
    """Return what would decide on cases, and the number of such cases.

    launch_s: wall seconds of a launch.
    """
    base, now = comparison.names
    needs: Counter[str] = Counter()
    more: dict[bool, list[int]] = {False: [], True: []}  # launches: here, or of both sides
    for place in accepted.undecided:
        cells = comparison.lines[place].cells
        ratio = cells[now].ratio
        if ratio is None or not ratio.se_log:
            reason = ratio.reason if ratio else "no time"
            more_launches = "use more --launches that are measured"
            if options.current is not None:
                more_launches = "give more launches in --current"
            needs[f"no interval ({reason}); {more_launches}"] += 1
            continue
        counts = {
            both: launches_needed(
                ratio,
                options.floor,
                base=len(cells[base].series.launches),
                now=len(cells[now].series.launches),
                num_cases=len(comparison.lines),
                both=both,
            )
            for both in more
        }
        both = counts[False] is None
        if (count := counts[both]) is None:
            needs["use a quieter machine, or a larger --floor"] += 1
        else:
            more[both].append(count)
    for both, numbers in more.items():
        if numbers:
            needs[_launches_text(max(numbers), both, options, launch_s)] += len(numbers)
    return needs


def _launches_text(
    count: int, both: bool, options: CheckOptions, launch_s: float | None
) -> str:
    """Return how to measure this many launches, each as long as those of now."""
    if options.current is not None:
        text = f"give {count} launches in --current"
    else:
        budget = math.ceil(options.budget_s / options.num_launches * count)
        text = f"use --launches {count} --budget {budget}s"
    text += f", which takes about {format_duration(count * launch_s)}" if launch_s else ""
    if both:
        text += f", and a baseline of {count} launches"
    return text


def _reference(paths: Sequence[Path]) -> Reference:
    """Return the launches of what runs measured. Raises ConfigError."""
    reference: dict[str, list[Measured]] = {}
    for path in paths:
        measured = [record for record in _measured_in(path) if not record.num_wrong]
        if not measured:
            allowed = "a run that measured operators, collectives or training steps"
            raise ConfigError("baseline", path, allowed)
        if any(isinstance(r.case, OpCase) and r.case.num_ranks > 1 for r in measured):
            raise ConfigError("baseline", path, "a run of operators on one rank")
        for record in measured:
            reference.setdefault(record.case.case_id, []).append(record)
    return reference


def _measured_in(path: Path) -> list[Measured]:
    """Return what a run measured that can be compared, also wrong results."""
    return [
        record
        for record in read(path).latest
        if isinstance(record, Measured)
        and record.case.kind in BASELINE_KINDS
        and any(record.samples.seconds)
    ]
