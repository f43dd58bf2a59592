"""Measure a plan: make its run directory, start and watch ranks, show what they recorded."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepmark.core.errors import ConfigError
from stepmark.core.plan import Entry, Plan
from stepmark.core.record import Failed
from stepmark.launch import outer_launcher
from stepmark.launch.failure_report import RankFailure
from stepmark.launch.supervise import supervise
from stepmark.store import plans
from stepmark.store.reader import find_run, latest, read_info, read_records
from stepmark.store.runs import Done, RunWriter, new_run_id

# By verb: shows a run and writes its files; from an exit code to that of it all.
SHOW = {
    "op": "stepmark.app.op:show",
    "comm": "stepmark.app.comm:show",
    "train": "stepmark.app.train:show",
    "run": "stepmark.app.run:show",
}
Show = Callable[[Path, Mapping[str, Any], int], int]

RANK_MODULE = "stepmark.app.rank"


def measure(
    make_plan: Callable[[], Plan],
    device: Callable[[], str],
    out: str | None,
    *,
    resume: str | None = None,
    force: bool = False,
) -> int:
    """Measure a plan on ranks of this host, or as one rank of an outer launcher's job.

    Returns the exit code. resume: the run to continue, as --resume names it.
    """
    root = Path(out or "runs")

    def prepared() -> tuple[Plan, Path]:
        plan = make_plan()
        if resume:
            return plan, _continued(plan, find_run(root, resume), force=force)
        return plan, _begun(plan, root)

    if outer_launcher.is_rank():
        from stepmark.app.rank import measure_under_launcher  # noqa: PLC0415

        code, run = measure_under_launcher(device(), prepared, force=force)
        return code if run is None else shown(run, code)
    plan, run = prepared()
    for note in plan.notes:
        sys.stderr.write(f"# {note}\n")
    return _measured(plan, run, force=force)


def measure_quietly(
    plan: Plan, out: str | None, settings: Mapping[str, str] | None = None
) -> tuple[int, Path]:
    """Measure a plan and show nothing. Returns the exit code of the ranks, and the run."""
    plan = dataclasses.replace(plan, settings={**plan.settings, **(settings or {})})
    run = _begun(plan, Path(out or "runs"))
    return _supervised(plan, run, force=False), run


def resume(name: str, out: str | None = None, *, force: bool = False) -> int:
    """Measure what is left of a run, as it was planned. Returns the exit code."""
    run = find_run(Path(out or "runs"), name)
    if not plans.has_plan(run):
        command = f"{read_info(run).command} --resume {run}"
        allowed = f"a run with a plan; an older release wrote this one. Use: {command}"
        raise ConfigError("run", name, allowed)
    if not outer_launcher.is_rank():
        return _measured(plans.read(run), run, force=force)
    from stepmark.app.rank import measure_under_launcher  # noqa: PLC0415

    plan = plans.read(run)
    code, found = measure_under_launcher(plan.device, lambda: (plan, run), force=force)
    return code if found is None else shown(found, code)


def shown(run: Path, code: int) -> int:
    """Show a run as its verb does; the exit code of it all."""
    if code == 2 or not (run / "run.json").is_file():
        return code
    plan = plans.read(run)
    module, _, name = SHOW[plan.command].partition(":")
    show: Show = getattr(importlib.import_module(module), name)
    return show(run, plan.options, code)


def _begun(plan: Plan, root: Path) -> Path:
    """Make the run directory with its plan."""
    run = root / new_run_id(datetime.now(UTC))
    try:
        run.mkdir(parents=True)
        plans.write(run, plan)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError("out", run, f"a folder that can be written ({reason})") from None
    return run


def _continued(plan: Plan, run: Path, *, force: bool) -> Path:
    """Check that the plan is the run's own; it may be measured for longer or shorter."""
    before: set[Done] = set()
    command = ""
    if plans.has_plan(run):
        earlier = plans.read(run)
        before, command = _cases(earlier), earlier.command_line
    elif (run / "run.json").is_file():
        before = {(r.case.case_id, r.launch) for r in latest(read_records(run))}
        command = read_info(run).command
    fits = before == _cases(plan) if plans.has_plan(run) else before <= _cases(plan)
    if not fits and not force:
        raise ConfigError("resume", run, f"the flags it began with: {command}")
    plans.replace(run, plan)
    return run


def _cases(plan: Plan) -> set[Done]:
    return {(entry.case.case_id, entry.launch) for entry in plan.entries}


def _measured(plan: Plan, run: Path, *, force: bool) -> int:
    code = _supervised(plan, run, force=force)
    if not (run / "run.json").is_file():
        sys.stderr.write(f"run {run}: nothing was measured\n")
    return shown(run, code)


def _supervised(plan: Plan, run: Path, *, force: bool) -> int:
    from stepmark.app.rank import FORCE  # noqa: PLC0415

    num_before = _num_records(run)
    return supervise(
        RANK_MODULE,
        [str(run.absolute()), *([FORCE] if force else [])],
        plan.world_size,
        num_cases=len(plan.entries),
        on_failure=lambda failure: record_failure(failure, run, plan, num_before),
    )


def _num_records(run: Path) -> int:
    return len(read_records(run))


def record_failure(failure: RankFailure, run: Path, plan: Plan, num_before: int) -> None:
    """Record a case whose ranks hung or died, unless rank 0 has recorded it itself.

    num_before: records of the run that are older than these ranks.
    """
    if failure.position is None:
        sys.stderr.write(f"stepmark: {failure.message}\n")
        return
    entry = plan.entries[failure.position]
    _say(failure, entry, len(plan.entries))
    key = (entry.case.case_id, entry.launch)
    recorded = {(r.case.case_id, r.launch) for r in read_records(run)[num_before:]}
    if key not in recorded:
        writer, _ = RunWriter.go_on(run)
        with writer:
            writer.append(
                Failed(
                    run_id=run.name,
                    case=entry.case,
                    cause=failure.cause,
                    message=failure.message,
                    ranks=failure.ranks,
                    traceback=failure.stacks,
                    launch=entry.launch,
                )
            )
    if failure.flight:
        folder = run / "traces"
        folder.mkdir(exist_ok=True)
        for rank, text in failure.flight.items():
            (folder / f"flight-{failure.position}-rank{rank}.json").write_text(text)


def _say(failure: RankFailure, entry: Entry, total: int) -> None:
    from stepmark.app.progress import named  # noqa: PLC0415

    sys.stderr.write(
        f"[{entry.position + 1}/{total}] {named(entry.case)}: "
        f"failed ({failure.cause}): {failure.message}\n"
    )
