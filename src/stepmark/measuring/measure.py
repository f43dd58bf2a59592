"""Measure a plan: make its run directory, start and watch ranks, show what they recorded."""

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from stepmark.cases.kind import PLAN_VERBS
from stepmark.cases.plan import FORCE, Plan
from stepmark.cases.record import Failed, Measured
from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError, worst
from stepmark.ground.option_groups import MeasureOptions, ResumeOptions
from stepmark.ground.options import build, load
from stepmark.ground.packages import require
from stepmark.measuring.delivery import check_outputs
from stepmark.measuring.heartbeat import set_up_limit_s
from stepmark.measuring.local_ranks import ENTRIES
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.progress import line
from stepmark.measuring.supervise import RankFailure, supervise
from stepmark.store import plans, predictions
from stepmark.store.reader import find_run, latest, read_info, read_records
from stepmark.store.runs import TRACES, Done, RunWriter, new_run_id

# Environment variable of ranks: when the command began to start some, on the monotonic clock.
BEGAN = "STEPMARK_BEGAN"
_UNDER_LAUNCHER = f"{ENTRIES['rank']}:measure_under_launcher"


def measure(
    make_plan: Callable[[], Plan],
    device: str | None,
    out: str | None,
    *,
    resume: str | None = None,
    force: bool = False,
) -> int:
    """Measure a plan and show the run as its verb does. Returns the exit code."""
    return _show_run(*measured(make_plan, device, out, resume=resume, force=force))


def measured(
    make_plan: Callable[[], Plan],
    device: str | None,
    out: str | None,
    *,
    resume: str | None = None,
    force: bool = False,
) -> tuple[int, Path | None]:
    """Measure a plan on ranks of this host, or as one rank of an outer launcher's job.

    Returns the exit code, and the run where this process is to show it: of an outer launcher's
    ranks on the first. resume: the run to continue, as --resume names it.
    """
    root = Path(out or "runs")

    def prepare() -> tuple[Plan, Path]:
        plan = make_plan()
        _check_processes(plan)
        if resume:
            run = find_run(root, resume)
            plan = _check_continued(plan, run, force=force)
        else:
            run = _create_run(plan, root)
        for note in plan.notes:
            sys.stderr.write(f"# {note}\n")
        return plan, run

    return _carry_out(prepare, device, force=force, has_own_plan=resume is None)


def measure_or_list(
    make_plan: Callable[[Machine], Plan],
    options: MeasureOptions,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Carry out a measuring verb: measure its plan, or with --dry-run print it.

    check: validates what only this verb writes. Returns the exit code.
    """

    def planned() -> Plan:
        check_outputs(options, options.out, dry_run=options.dry_run)
        check()
        return make_plan(machine(options.device, dry_run=options.dry_run))

    if options.dry_run:
        return list_plan(planned(), options.device, options.json, options.csv)
    return measure(
        planned, options.device, options.out, resume=options.resume, force=options.force
    )


def list_plan(
    plan: Plan, device: str | None, json: str | None = None, csv: str | None = None
) -> int:
    """Print the cases of a plan, or write them to --json and --csv. Returns the exit code."""
    load(PLAN_VERBS[plan.command].list_plan)(plan, machine(device, dry_run=True), json, csv)
    return 0


def measure_quietly(
    plan: Plan, out: str | None, settings: Mapping[str, str] | None = None
) -> tuple[int, Path]:
    """Measure a plan and show nothing. Returns the exit code of the ranks, and the run."""
    require("torch")
    plan = dataclasses.replace(plan, settings={**plan.settings, **(settings or {})})
    run = _create_run(plan, Path(out or "runs"))
    return _supervise(plan, run, run / plans.FILE, force=False), run


def resume(options: ResumeOptions) -> int:
    """Measure what is left of a run, as it was planned. Returns the exit code."""
    name = options.run

    def prepare() -> tuple[Plan, Path]:
        run = find_run(options.out, name)
        if not plans.has_plan(run):
            command = f"{read_info(run).command} --resume {run}"
            allowed = f"a run with a plan; an older release wrote this one. Use: {command}"
            raise ConfigError("run", name, allowed)
        plan = plans.read(run)
        _check_processes(plan)
        predictions.read(run)  # refused where it was changed
        num_ranks = machine(plan.device).num_ranks(str(plan.world_size))
        if num_ranks != plan.world_size:
            allowed = f"resumed with {plan.world_size} ranks, as it began, not {num_ranks}"
            raise ConfigError("run", name, allowed)
        planned = build(MeasureOptions, plan.options)
        check_outputs(planned, planned.out, dry_run=planned.dry_run)
        if outer_launcher.is_rank() and plan.device != (device := machine(None).device):
            allowed = f"a run on {device}; resume a run on {plan.device} without a launcher"
            raise ConfigError("run", name, allowed)
        return plan, run

    return _show_run(*_carry_out(prepare, None, force=options.force, has_own_plan=True))


def _show_run(code: int, run: Path | None) -> int:
    return code if run is None else show_run(run, code)


def show_run(run: Path, code: int) -> int:
    """Show a run as its verb does. Returns the exit code."""
    is_begun = (run / "run.json").is_file()
    if not is_begun:
        sys.stderr.write(f"run {run}: nothing was measured\n")
    if code == 2 or not is_begun:
        return worst(code, 3)
    plan = plans.read(run)
    return int(load(PLAN_VERBS[plan.command].show)(run, plan.options, code))


def _check_processes(plan: Plan) -> None:
    """Raise ConfigError for launches that would share a launcher's processes but must not."""
    own = (e.launch for e in plan.entries if e.case.kind == "op" or plan.command == "check")
    launches = max(own, default=1)
    if launches > 1 and outer_launcher.is_rank():
        name = "check" if plan.command == "check" else "operators"
        allowed = f"1 under torchrun, srun or mpirun: a launch of {name} is a new process"
        raise ConfigError("launches", launches, allowed)


def _create_run(plan: Plan, root: Path) -> Path:
    """Make the run directory with its plan."""
    run = root / new_run_id(datetime.now(UTC))
    try:
        run.mkdir(parents=True)
        plans.write(run, plan)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError("out", run, f"a folder that can be written ({reason})") from None
    return run


def _check_continued(plan: Plan, run: Path, *, force: bool) -> Plan:
    """Check that the plan is the run's own; it may be measured for longer or shorter.

    The plan keeps the order of the run's. Rank 0 writes it once the run accepts it.
    """
    before: set[Done] = set()
    command = ""
    if plans.has_plan(run):
        earlier = plans.read(run)
        before = _cases(earlier)
        command = earlier.command_line
        if before == _cases(plan):
            return dataclasses.replace(plan, entries=earlier.entries)
    elif (run / "run.json").is_file():
        before = {(r.case.case_id, r.launch) for r in latest(read_records(run))}
        command = read_info(run).command
    fits = not plans.has_plan(run) and before <= _cases(plan)
    if not fits and not force:
        raise ConfigError(
            "resume", run, f"it needs the flags that the run began with: {command}"
        )
    return plan


def _cases(plan: Plan) -> set[Done]:
    return {(entry.case.case_id, entry.launch) for entry in plan.entries}


def _carry_out(
    prepare: Callable[[], tuple[Plan, Path]],
    device: str | None,
    *,
    force: bool,
    has_own_plan: bool,
) -> tuple[int, Path | None]:
    """Prepare a plan and its run, and measure it. Returns what `measured` does.

    has_own_plan: the plan is the one that lies in the run.
    """
    require("torch")  # of the ranks, before a folder is made for their run
    if outer_launcher.is_rank():
        result: tuple[int, Path | None] = load(_UNDER_LAUNCHER)(
            machine(device).device, prepare, force=force
        )
        return result
    plan, run = prepare()
    if has_own_plan:
        code = _supervise(plan, run, run / plans.FILE, force=force)
    else:
        # Ranks get a temporary file, because the run keeps its plan until it accepts another.
        with tempfile.TemporaryDirectory(prefix="stepmark-plan-") as folder:
            file = Path(folder) / plans.FILE
            plans.write(file.parent, plan)
            code = _supervise(plan, run, file, force=force)
    return code, run


def _supervise(plan: Plan, run: Path, plan_file: Path, *, force: bool) -> int:
    num_before = len(read_records(run))
    os.environ[BEGAN] = str(time.monotonic())
    return supervise(
        "rank",
        plan_file.absolute(),
        [str(run.absolute()), *([FORCE] if force else [])],
        plan.world_size,
        num_cases=len(plan.entries),
        on_failure=lambda failure: record_failure(failure, run, plan, num_before),
        start_s=set_up_limit_s(plan.options.get("timeout"), plan.world_size),
    )


def record_failure(failure: RankFailure, run: Path, plan: Plan, num_before: int) -> bool:
    """Record a case whose ranks hung or died, unless rank 0 has recorded it itself.

    num_before: records of the run that are older than these ranks. Returns whether anything
    was lost.
    """
    if failure.position is None:
        sys.stderr.write(f"stepmark: {failure.message}\n")
        return True
    entry = plan.entries[failure.position]
    key = (entry.case.case_id, entry.launch)
    recorded = {(r.case.case_id, r.launch): r for r in read_records(run)[num_before:]}
    if isinstance(recorded.get(key), Measured):
        sys.stderr.write(f"stepmark: {failure.message}; its case is measured already\n")
        return False
    record = Failed(
        run_id=run.name,
        case=entry.case,
        cause=failure.cause,
        message=failure.message,
        ranks=failure.ranks,
        traceback=failure.stacks,
        launch=entry.launch,
    )
    sys.stderr.write(f"[{entry.position + 1}/{len(plan.entries)}] {line(record)}\n")
    if key not in recorded:
        writer, _ = RunWriter.reopen(run)
        with writer:
            writer.append(record)
    if failure.flight:
        folder = run / TRACES
        folder.mkdir(exist_ok=True)
        for rank, text in failure.flight.items():
            (folder / f"flight-{failure.position}-rank{rank}.json").write_text(text)
    return True
