"""stepmark run: the main job. It examines the machine, measures it and writes a report."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stepmark.app import comm, delivery, op_plan, train, train_plan
from stepmark.app.machine import Machine, machine
from stepmark.app.measure import measure
from stepmark.app.runs import write_page
from stepmark.app.view import console, show_rows, view
from stepmark.core.comm_options import CommOptions
from stepmark.core.dtypes import DType
from stepmark.core.op_options import LayerOptions
from stepmark.core.option_groups import RunOptions
from stepmark.core.options import load, plain
from stepmark.core.plan import Entry, How, OpHow, Plan, entries
from stepmark.core.train_options import TrainOptions
from stepmark.core.units import GIB, KIB, MIB
from stepmark.launch import outer_launcher
from stepmark.report import summary

_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_COLLECTIVES = {
    "cuda": CommOptions(names=_NAMES, begin=4 * KIB, end=GIB, factor=8.0, dtype=(DType.BF16,)),
    "cpu": CommOptions(names=_NAMES, begin=4 * KIB, end=4 * MIB, factor=32.0),
}
_MAX_MBS = 8
_DOCTOR_LIMIT_S = 180.0  # it imports torch and reads every device
_SMALLER = ("gpt2-1.5b", "gpt2-125m")


def run(options: RunOptions) -> int:
    """Examine the machine, measure operators, collectives and training, write the page."""
    if options.dry_run:
        target = machine(options.device, dry_run=True)
        load("stepmark.app.dry_run:show")(plan(options, target))
        return 0

    def planned() -> Plan:
        combined = plan(options, machine(options.device))
        if options.out:
            delivery.make_folder("out", Path(options.out))
        if outer_launcher.is_first():
            # A process of its own, because importing torch takes seconds and memory.
            command = [sys.executable, "-m", "stepmark", "doctor"]
            try:
                subprocess.run(command, timeout=_DOCTOR_LIMIT_S, check=False)
            except subprocess.TimeoutExpired:
                limit = f"{_DOCTOR_LIMIT_S:.0f} s"
                sys.stderr.write(f"stepmark: doctor took more than {limit} and was ended.\n")
        return combined

    return measure(planned, options.device, options.out)


def plan(requested: RunOptions, machine: Machine) -> Plan:
    """Return one plan of operators, collectives and training steps. Raises ConfigError."""
    options, seq_len = _sized(requested, machine)
    parts: list[Entry] = []
    notes: list[str] = []
    how = How(op=OpHow(budget_s=options.budget))
    layer = LayerOptions(model=options.model, seq_len=seq_len, nproc=options.nproc)
    parts += entries(op_plan.layer_cases(layer, machine))
    world_size = machine.num_ranks(options.nproc)
    share_s = (requested.budget or (60.0 if machine.device == "cpu" else 240.0)) / 4
    count = _num_devices(options, machine)
    if count > 1:
        collectives = replace(
            _COLLECTIVES[machine.device],
            device=options.device,
            nproc=str(count),
            budget=share_s,
        )
        of_comm = comm.plan(collectives, machine)
        how, world_size = replace(how, comm=of_comm.how.comm), max(world_size, count)
        parts += of_comm.entries
        notes += of_comm.notes
    if training := _training(options, machine, count, share_s, notes):
        of_train = train.plan(training, machine)
        how = replace(how, train=of_train.how.train)
        world_size = max(world_size, of_train.world_size)
        notes += of_train.notes
        parts += of_train.entries
    return Plan(
        command="run",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=machine.device,
        world_size=world_size,
        how=how,
        entries=tuple(replace(entry, position=i) for i, entry in enumerate(parts)),
        notes=tuple(notes),
    )


def _num_devices(options: RunOptions, machine: Machine) -> int:
    """Return all accelerators, at least two ranks of a CPU, or 1 where the number is unknown.

    Under an outer launcher it is the number of ranks that were started.
    """
    if outer_launcher.is_rank():
        return outer_launcher.num_ranks()
    if machine.device == "cpu":
        return max(2, machine.num_ranks(options.nproc))
    return machine.num_accelerators or 1


def _sized(options: RunOptions, machine: Machine) -> tuple[RunOptions, int | None]:
    """Return options with a model that fits, and its sequence length.

    A CPU gets a small model, short sequences and 60 s in all.
    """
    if machine.device == "cpu":
        small = replace(
            options, model=options.model or "gpt2-125m", budget=options.budget or 60.0
        )
        return small, None if options.model else 512
    fits = (machine.memory_bytes or 0) >= 40 * GIB
    default = "llama-3.1-8b" if fits else "gpt2-125m"
    return replace(options, model=options.model or default), None


def _training(
    options: RunOptions, machine: Machine, count: int, share_s: float, notes: list[str]
) -> TrainOptions | None:
    """Return options of `stepmark train`: FSDP on accelerators, a tiny model on the CPU."""
    if machine.device == "cpu":
        return TrainOptions(
            model=options.model,
            scale="tiny",
            device="cpu",
            nproc=str(count),
            strategy=("ddp", "fsdp") if count > 1 else ("single",),
            steps=10,
            budget=6.0,
        )
    fitting = that_fits(str(options.model), count, machine.memory_bytes or 0)
    if fitting is None or fitting.model != options.model:
        instead = f"{fitting.model} instead" if fitting else "left out"
        notes.append(f"training {options.model} does not fit, by estimate: {instead}")
    return fitting and replace(
        fitting, device=options.device, steps=10, timeout=900.0, budget=share_s
    )


def that_fits(model: str, num_ranks: int, memory_bytes: int) -> TrainOptions | None:
    """Return options for this model or a smaller one that fits; None where none fits."""
    strategy = "fsdp" if num_ranks > 1 else "single"
    for name in (model, *_SMALLER):
        options = TrainOptions(
            model=name, strategy=(strategy,), nproc=str(num_ranks), compile=True
        )
        cases = train_plan.cases(options, "cuda", num_ranks)
        most = min(train_plan.largest_mbs(case, memory_bytes) for case in cases)
        if most:
            return replace(options, mbs=(min(most, _MAX_MBS),))
    return None


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Show operators, collectives and training steps; write the page. Returns the exit code."""
    run = view(path)
    page = write_page(path)
    show_rows(run)
    lines = summary.comm_lines(run.comm_rows)
    for line in (*lines, *summary.train_lines(run.train_rows)):
        console().print(line, markup=False, highlight=False, soft_wrap=True)
    summary.terminal_summary(run.run, run.rows, console(), report=page)
    return delivery.finish(run, path, code)
