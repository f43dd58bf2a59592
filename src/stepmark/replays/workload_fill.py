"""stepmark workload fill: times of a workload's computation, measured here or from sources."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.cases.case import Label, OpCase
from stepmark.cases.plan import How, OpHow, Plan, entries
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import build, dashed, plain
from stepmark.ground.options import options as options_of
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import list_plan, measure
from stepmark.model.ops import FAMILY_OF, Op
from stepmark.model.ops.backends import BACKENDS
from stepmark.operators import op_plan
from stepmark.operators.op_options import ConfigOptions
from stepmark.operators.op_plan import Placed
from stepmark.replays.replay_compute import backend_of
from stepmark.step import native
from stepmark.step.workload import Kernel, Workload
from stepmark.store import plans
from stepmark.store.view import view
from stepmark.workloads import workload_files, workload_times
from stepmark.workloads.durations import Own, Source, computations, fill, first_few, untimed
from stepmark.workloads.workload_files import Target, stage_flag
from stepmark.workloads.workload_options import FillMeasuring, FillOptions


def run(options: FillOptions) -> int:
    """Measure and then write, or write at once. Returns the exit code."""
    if not options.measure:
        for option in options_of(FillMeasuring):
            if getattr(options, option.name) != option.default:
                raise ConfigError(dashed(option.name), "given", "only with --measure")
        if options.compute_from is None:
            allowed = "give --measure for times of this device, or --compute-from for others"
            raise ConfigError("measure", "missing", allowed)
        workload = _read(options)
        for note in workload_files.read_notes(workload):
            sys.stderr.write(f"# {note}\n")
        _write(workload, options)
        return 0

    def planned() -> Plan:
        return plan(options, machine(options.device, dry_run=options.dry_run))

    if options.dry_run:
        return list_plan(planned(), options.device)
    return measure(
        planned, options.device, options.runs, resume=options.resume, force=options.force
    )


def _read(options: FillOptions) -> Workload:
    return workload_files.read(options.file, options.group_sizes, options.world_size)


def plan(options: FillOptions, machine: Machine) -> Plan:
    """Plan the distinct operators of a workload; validate the rest. Raises ConfigError."""
    workload = _read(options)
    cases = _cases(workload, options, machine)
    workload_files.check(workload, _target(options))
    if options.compute_from is not None:
        sources = workload_times.resolved(options.compute_from)
        options = dataclasses.replace(options, compute_from=sources)
    _sources(options)
    if not options.dry_run:
        delivery.make_folder("runs", Path(options.runs or "runs"))
        if options.output not in (None, "-"):
            delivery.make_folder("out", Path(options.output).parent)
    return Plan(
        command="fill",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=machine.device,
        world_size=cases[0].num_ranks,
        how=How(
            op=OpHow(budget_s=options.budget, timeout_s=options.timeout or OpHow().timeout_s)
        ),
        entries=entries(cases),
        notes=workload_files.read_notes(workload),
        workload=native.encode(workload).decode(),
    )


def _cases(workload: Workload, options: FillOptions, machine: Machine) -> list[OpCase]:
    """Return a case per distinct operator, or several where --backend names several."""
    known = {name for names in BACKENDS.values() for name in names}
    for name in options.backend:
        if name not in known:
            raise not_one_of("backend", name, sorted(known))
    here = op_plan.capabilities(machine)
    placed: dict[str, list[Placed]] = {}
    for item in computations(workload):
        if not isinstance(item.op, Kernel):
            label = Label(model=workload.name, role=item.module, phase=item.phase)
            placed.setdefault(FAMILY_OF[type(item.op)], []).append((label, item.op))
    if not placed:
        allowed = "a workload with operators that stepmark op has; it has none"
        raise ConfigError("workload", options.file, allowed)
    cases: list[OpCase] = []
    for family, ops in placed.items():
        backends = tuple(name for name in options.backend if name in BACKENDS[family])
        planned = op_plan.cases(family, ops, ConfigOptions(backend=backends), machine)
        usual = {op: backend_of(op, here) for _, op in ops}
        cases += [case for case in planned if backends or usual[case.op] in ("", case.backend)]
    return cases


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Write the workload with the times of a run. Returns the exit code."""
    options = build(FillOptions, values)
    result = delivery.finish(view(path), path, code)
    if code in (130, 143):
        return result
    measured, samples = workload_times.from_run(path.parent, str(path))
    if not samples and options.compute_from is None:
        sys.stderr.write("no workload is written: no operator was measured\n")
        return result
    workload = native.decode(plans.read(path).workload.encode())
    _write(workload, options, measured, samples=samples)
    return result


def _write(
    workload: Workload,
    options: FillOptions,
    *measured: Source,
    samples: Mapping[Op, Sequence[float]] | None = None,
) -> None:
    """Write the workload; name what has no time."""
    filled = fill(workload, *measured, *_sources(options), Own(), partial=True)
    if missing := untimed(filled):
        names = first_few(missing)
        sys.stderr.write(f"# operations without a time ({len(missing)}): {names}\n")
    workload_files.deliver(filled, _target(options), samples)


def _sources(options: FillOptions) -> list[Source]:
    if options.compute_from is None:
        return []
    return workload_times.sources_of(options.compute_from)


def _target(options: FillOptions) -> Target:
    stage = stage_flag(options.stage)
    return Target(to=options.to, out=options.output, rank=options.rank, stage=stage)
