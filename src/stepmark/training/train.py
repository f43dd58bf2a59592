"""stepmark train: its plan, and what it shows: a block per case, messages, profile, a table."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.cases.plan import How, Plan, TrainHow, entries
from stepmark.cases.record import Failed, Measured, Record
from stepmark.ground.options import build, plain
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine
from stepmark.measuring.measure import measure_or_list
from stepmark.measuring.progress import case_text
from stepmark.store.reader import read_records
from stepmark.store.runs import TRACES
from stepmark.store.view import View, console, print_text, view
from stepmark.training import (
    framework_options,
    train_columns,
    train_plan,
    train_refusals,
    training_memory,
    training_printing,
)
from stepmark.training.train_options import TrainOptions
from stepmark.workloads.models import notes_of


def run(options: TrainOptions) -> int:
    """Plan, then measure on ranks of this host, or as one rank of an outer launcher."""
    return measure_or_list(lambda machine: plan(options, machine), options)


def plan(options: TrainOptions, machine: Machine) -> Plan:
    """Plan every case of the options. Raises ConfigError."""
    device = machine.device
    job = framework_options.with_file(options, machine)
    with job.naming_keys():
        nproc = train_plan.default_nproc(job.options, device)
        world_size = machine.num_ranks(job.options.nproc, nproc)
        cases = train_plan.cases(job.options, device, world_size)
    return Plan(
        command="train",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=device,
        world_size=world_size,
        how=How(train=how(options, world_size)),
        entries=entries(cases, options.launches),
        notes=(
            *job.notes,
            *notes_of(case.model for case in cases),
            *train_plan.placement_notes(cases, machine.ranks_per_host(world_size)),
        ),
    )


def how(options: TrainOptions, world_size: int) -> TrainHow:
    """Return how thoroughly steps are measured."""
    return TrainHow(
        steps=options.steps,
        budget_s=options.budget,
        timeout_s=options.timeout or 600.0,
        messages=options.messages,
        profile=options.profile,
        profile_ranks=train_refusals.profiled_ranks(options, world_size),
        find_batch=options.find_batch,
        compile_fallback=options.compile_fallback,
    )


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Show the run, write the files of --json and --csv. Returns the exit code."""
    options = build(TrainOptions, values)
    # A batch that is too large is how a search ends.
    has_batch = options.find_batch and found_batch(read_records(path), options.launches)
    run = view(path)
    delivery.write_rows(run.train_rows, options)
    if not options.to_stdout:
        _show(run, path)
    code = delivery.finish(run, path, 0 if has_batch and code == 3 else code)
    return 0 if has_batch and code == 3 else code


def found_batch(records: Sequence[Record], launches: int) -> bool:
    """Return whether every launch measured a batch and nothing failed but for memory."""
    measured = {record.launch for record in records if isinstance(record, Measured)}
    causes = {record.cause for record in records if isinstance(record, Failed)}
    return measured >= set(range(1, launches + 1)) and causes == {"oom"}


def _show(run: View, path: Path) -> None:
    per_rank = train_columns.per_rank_rows(run.records, run.run)
    several = [row for row in per_rank if len(run.run.environment.devices) > 1]
    training_printing.print_training(run.train_rows, console(), several)
    for record in run.records:
        if not isinstance(record, Measured) or (facts := record.training) is None:
            continue
        print_text(training_memory.lines(record.train, facts))
        if facts.messages or facts.traces:
            sys.stdout.write(f"\n{case_text(record.case)}\n")
        if facts.messages:
            lines = training_printing.message_lines(facts, record.case.num_ranks)
            print_text(lines)
        if facts.traces:
            from stepmark.traces.trace_kernels_verb import profile_lines  # noqa: PLC0415 - numpy

            print_text(profile_lines(path / TRACES, record))
