"""stepmark run: the main job. It calibrates, predicts a training step, and measures it.

The parts are entries of the first launch, the step is that of the second one: before new ranks
measure it, rank 0 writes the prediction into the run.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.cases.case import OpCase
from stepmark.cases.plan import (
    STEP_LAUNCH,
    CommHow,
    Entry,
    How,
    Plan,
    Profile,
    ReplayHow,
    TrainHow,
    entries,
)
from stepmark.cases.replay_case import Compute
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope
from stepmark.collectives import comm
from stepmark.collectives.comm_options import CommOptions
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.grouping import group_by
from stepmark.ground.options import plain
from stepmark.ground.units import GIB, KIB, MIB
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import list_plan, measure
from stepmark.operators import op_plan
from stepmark.operators.op_options import LayerOptions
from stepmark.predictions import calibrate
from stepmark.replays import replay_verb
from stepmark.replays.replay_options import ReplayOptions
from stepmark.runs import first_screen
from stepmark.runs.run_options import RunOptions
from stepmark.runs.runs import write_run_page
from stepmark.runs.step_report import reported
from stepmark.step_memory.memory import largest_mbs
from stepmark.store.view import print_text, view
from stepmark.training import framework_options, remedies, train_plan
from stepmark.training.train_options import TrainOptions, given_options
from stepmark.workloads.rules.pytorch.case import of_case

_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_COLLECTIVES = {
    "cuda": CommOptions(names=_NAMES, begin=4 * KIB, end=GIB, factor=8.0, dtype=(DType.BF16,)),
    "cpu": CommOptions(names=_NAMES, begin=4 * KIB, end=4 * MIB, factor=32.0),
}
_MAX_MBS = 8
_SMALLER = ("gpt2-1.5b", "gpt2-125m")
# A CPU trains the smallest model on few tokens: a step takes about two seconds.
_CPU = TrainOptions(model="gpt2-125m", seq_len=64)
_REPLAY = {
    "cuda": ReplayHow(iterations=10, passes=3),
    "cpu": ReplayHow(iterations=3, passes=1),
}
_CPU_STEPS = 8
_STEPS = 30
_CPU_RANKS = 2


def run(options: RunOptions) -> int:
    """Calibrate, predict, train, and write the page."""
    if options.dry_run:
        target = machine(options.device, dry_run=True)
        return list_plan(plan(options, target), options.device)

    def planned() -> Plan:
        combined = plan(options, machine(options.device))
        if options.out:
            delivery.make_folder("out", Path(options.out))
        return combined

    return measure(planned, options.device, options.out)


def plan(requested: RunOptions, machine: Machine) -> Plan:
    """Return the plan of a run: calibration, tables of the machine, and the step."""
    notes: list[str] = []
    case = step_case(requested, machine, notes)
    notes += case.model.unmodelled
    steps = plan_of_steps([case], machine, requested)
    # Operators, collectives, steps and the replay have a quarter of --budget each.
    share_s = requested.budget and requested.budget / 4
    budget_s = share_s or (30.0 if machine.device == "cpu" else 240.0)
    layer = LayerOptions(
        model=case.model_file or case.model.name.partition("@")[0],
        seq_len=case.model.seq_len,
    )
    tables = [] if case.scale else list(entries([*_operators(layer, machine, case)]))
    if case.scale:
        notes.append("operators of one layer are left out: they have no --scale")
    how = replace(
        steps.how,
        op=replace(steps.how.op, budget_s=budget_s),
        train=replace(steps.how.train, budget_s=share_s),
        replay=replace(_REPLAY[machine.device], budget_s=share_s),
    )
    if case.num_ranks > 1:
        collectives = replace(
            _COLLECTIVES[machine.device],
            device=requested.device,
            nproc=str(case.num_ranks),
            budget=share_s or budget_s / 2,
        )
        of_comm = comm.plan(collectives, machine)
        how = replace(how, comm=of_comm.how.comm)
        tables += of_comm.entries
        notes += of_comm.notes
    known = {entry.case.case_id for entry in steps.entries}
    parts = [entry for entry in steps.entries if entry.launch == 1]
    parts += [entry for entry in tables if entry.case.case_id not in known]
    own = [entry for entry in steps.entries if entry.launch >= STEP_LAUNCH]
    text, replays = _replay_of(case, machine, notes)
    parts += replays
    return replace(
        steps,
        how=how,
        workload=text,
        entries=tuple(replace(each, position=i) for i, each in enumerate([*parts, *own])),
        notes=(*steps.notes, *notes),
    )


def _operators(layer: LayerOptions, machine: Machine, step: TrainCase) -> Iterator[OpCase]:
    """Yield the operators of a layer by the backends that the step may run.

    These are torch's own attention, and compiled functions where the step is compiled.
    """
    is_compiled = step.compile is not CompileScope.NONE
    others = {"flex", "varlen", "flash-attn", "torch" if is_compiled else "compile"}
    for cases in group_by(op_plan.layer_cases(layer, machine), lambda case: case.op).values():
        yield from [case for case in cases if case.backend not in others] or cases


def _replay_of(
    case: TrainCase, machine: Machine, notes: list[str]
) -> tuple[str, tuple[Entry, ...]]:
    """Return the workload of the step, and the entry that replays it; none where it cannot."""
    try:
        workload = of_case(case)
        options = ReplayOptions(file=workload.name, compute=Compute.REAL)
        replayed, text = replay_verb.case_of(workload, options, machine)
    except ConfigError as error:
        notes.append(f"the step is not replayed: {error}")
        return "", ()
    return text, entries([replayed])


def plan_of_steps(
    cases: Sequence[TrainCase], machine: Machine, options: RunOptions, launches: int = 1
) -> Plan:
    """Return a plan that calibrates for training steps, and then measures them.

    The cases have the same number of ranks. launches: in which each step is measured.
    """
    parts: dict[str, Entry] = {}
    notes: list[str] = []
    for case in cases:
        own, own_notes = calibrate.calibration_cases(case, machine)
        parts |= {entry.case.case_id: entry for entry in own if entry.case.case_id not in parts}
        notes += own_notes
    steps = [
        Entry(position=0, launch=launch, case=case, profile=profile)
        for launch, profile in zip(
            range(STEP_LAUNCH, STEP_LAUNCH + launches),
            (Profile.PLAIN, *[Profile.NONE] * launches),
            strict=False,
        )
        for case in cases
    ]
    is_cpu = machine.device == "cpu"
    train_how = TrainHow(
        steps=_CPU_STEPS if is_cpu else _STEPS,
        steady_s=calibrate.STEADY_S,
        timeout_s=900.0,
        profile_ranks=(0,) if is_cpu else tuple(range(cases[0].num_ranks)),
    )
    return Plan(
        command="run",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=machine.device,
        world_size=cases[0].num_ranks,
        how=How(comm=CommHow(budget_s=calibrate.COMM_S), train=train_how),
        entries=tuple(
            replace(each, position=i) for i, each in enumerate([*parts.values(), *steps])
        ),
        notes=tuple(dict.fromkeys(notes)),
    )


def step_case(options: RunOptions, machine: Machine, notes: list[str]) -> TrainCase:
    """Return the step that is predicted and measured, sized for the machine where it is not
    given. Raises ConfigError."""
    given = TrainOptions(**{**given_options(options), "device": options.device})
    job = framework_options.with_file(given, machine, fewest=_CPU_RANKS)
    notes += job.notes
    with job.naming_keys():
        return _sized(job.options, machine, notes)


def _sized(base: TrainOptions, machine: Machine, notes: list[str]) -> TrainCase:
    """Return the step of these options. Raises ConfigError."""
    is_cpu = machine.device == "cpu"
    if base.compile is None:
        base = replace(base, compile=not is_cpu)
    if is_cpu:
        base = _with_defaults(base, _CPU)
    nproc = train_plan.default_nproc(base, machine.device)
    if is_cpu and nproc == "1" and not (base.nproc or base.strategy):
        nproc = str(_CPU_RANKS)
    count = machine.num_ranks(base.nproc, nproc)
    if base.model or base.models:
        if not base.mbs:
            base = replace(base, mbs=_batch(base, machine, count, notes))
    else:
        fitting = that_fits("llama-3.1-8b", count, machine.memory_bytes or 0)
        if fitting is None:
            allowed = "one that fits; no built-in model does, by estimate"
            raise ConfigError("model", "missing", allowed)
        base = _with_defaults(base, fitting)
    strategy = ("ddp" if is_cpu else "fsdp") if count > 1 else "single"
    base = replace(base, nproc=str(count), strategy=base.strategy or (strategy,))
    case = train_plan.only_case(base, machine.device, count)
    memory_bytes = machine.memory_bytes
    if is_cpu:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count
    if memory_bytes:
        remedies.check_memory(case, memory_bytes)
    return case


def _with_defaults(options: TrainOptions, defaults: TrainOptions) -> TrainOptions:
    """Return the options; those that are not given are the defaults'."""
    has_model = bool(options.model or options.models)
    names = ("seq_len", "mbs", "strategy", *(() if has_model else ("model", "models")))
    missing = {n: getattr(defaults, n) for n in names if getattr(options, n) in (None, ())}
    return replace(options, **missing)


def _batch(
    options: TrainOptions, machine: Machine, count: int, notes: list[str]
) -> tuple[int, ...]:
    """Return the largest micro-batch up to 8 that fits by estimate; on a CPU the smallest.

    A pipeline divides it into parts, thus it is a multiple of the default one.
    """
    cases = train_plan.cases(replace(options, nproc=str(count)), machine.device, count)
    unit = cases[0].mbs
    if not machine.memory_bytes:
        return (unit,)
    most = min(largest_mbs(case, machine.memory_bytes) for case in cases)
    if not most:
        notes.append("by estimate not even one sequence fits in memory")
    return (max(unit, min(most, _MAX_MBS) // unit * unit),)


def that_fits(model: str, num_ranks: int, memory_bytes: int) -> TrainOptions | None:
    """Return options for this model or a smaller one that fits; None where none fits."""
    strategy = "fsdp" if num_ranks > 1 else "single"
    for name in (model, *_SMALLER):
        options = TrainOptions(
            model=name, strategy=(strategy,), nproc=str(num_ranks), compile=True
        )
        cases = train_plan.cases(options, "cuda", num_ranks)
        most = min(largest_mbs(case, memory_bytes) for case in cases)
        if most:
            return replace(options, mbs=(min(most, _MAX_MBS),))
    return None


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Write the page; show the machine, the answer and the ledger. Returns the exit code."""
    run = view(path)
    report = reported(path, run)
    page = write_run_page(path, run, report)
    if isinstance(report, ConfigError):
        delivery.finish(run, path, code)
        raise report
    rows = run.rows, run.comm_rows, run.train_rows
    print_text(first_screen.lines(run.run, *rows, report, page))
    return delivery.finish(run, path, code)
