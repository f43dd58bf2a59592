"""stepmark comm: measure a plan of collectives; show nccl-tests' table, wide columns, files."""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepmark.cases.plan import CommHow, How, Plan, entries
from stepmark.collectives import comm_plan, comm_remarks, nccl_tests, peer_formats
from stepmark.collectives.comm_options import MATRIX_OF_PAIRS, CommOptions
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import new_file
from stepmark.ground.options import build, plain
from stepmark.ground.redaction import redact_words
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine
from stepmark.measuring.measure import measure_or_list
from stepmark.model.collectives import FACTS, Api, Collective, placements
from stepmark.store.view import View, print_text, show_rows, view
from stepmark.tables.columns import SHOWN, TEXT, Column, rows_of
from stepmark.tables.export import write_json
from stepmark.tables.table import Table
from stepmark.workloads.models import notes_of, read_models

_DEFAULT_STEP = (4, True)


def _forms(collective: Collective, api: Api) -> str:
    return "/".join("in" if inside else "out" for inside in placements(collective, api))


_LIST_COLUMNS: tuple[Column[Collective], ...] = (
    Column("name", lambda o: o.value, TEXT, "", SHOWN),
    Column("busbw", lambda o: FACTS[o].busbw, TEXT, "busbw/algbw", SHOWN),
    Column("parts", lambda o: FACTS[o].parts, TEXT, "size counts", SHOWN),
    Column("torch", lambda o: _forms(o, Api.TORCH), TEXT, "", SHOWN),
    Column("nccl", lambda o: _forms(o, Api.NCCL), TEXT, "", SHOWN),
)


def run(options: CommOptions) -> int:
    """Plan, then measure on ranks of this host, or as one rank of an outer launcher."""
    if options.list_all:
        print_text(
            [
                *Table(rows_of(_LIST_COLUMNS, Collective), _LIST_COLUMNS).text(),
                "p2p-matrix: every ordered pair, bandwidth and latency, one pair at a time",
                "out, in: of place. Reductions: sum, prod, min, max, avg, mulsum.",
            ]
        )
        return 0
    if options.print_as:
        _check_names(options)
        from stepmark.collectives.comm_workload import print_commands  # noqa: PLC0415 - 60 ms

        print_commands(options)
        return 0
    return measure_or_list(
        lambda machine: plan(options, machine), options, lambda: _check_shown(options)
    )


def plan(options: CommOptions, machine: Machine) -> Plan:
    """Plan every case of the options. Raises ConfigError."""
    _check_names(options)
    device = machine.device
    world_size = machine.num_ranks(options.nproc, "all" if device == "cuda" else "2")
    make_cases = comm_plan.plan
    if options.from_workload:
        from stepmark.collectives import comm_workload  # noqa: PLC0415 - 60 ms

        make_cases = comm_workload.plan
    cases, notes = make_cases(options, device, world_size)
    return Plan(
        command="comm",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=device,
        world_size=world_size,
        how=How(comm=_how(options)),
        entries=entries(cases, options.launches),
        notes=(*notes, *notes_of(read_models(options.model))),
    )


def _check_names(options: CommOptions) -> None:
    if not options.names and not options.from_workload:
        raise ConfigError("collective", "missing", "a name; `stepmark comm --list` shows them")


def _how(options: CommOptions) -> CommHow:
    """Return how calls are timed, from the options that are given."""
    values: dict[str, Any] = {
        "iterations": options.iters,
        "graphs": options.cudagraph,
        "warmups": options.warmup_iters,
        "checks": options.check,
        "timeout_s": options.timeout,
        "budget_s": options.budget,
        "per_call": options.per_iter_timing == 1,
    }
    return CommHow(**{name: value for name, value in values.items() if value is not None})


def _check_shown(options: CommOptions) -> None:
    """Refuse flags of a table that is not shown, and -J to another file than JSON."""
    is_matrix = set(options.names) == {MATRIX_OF_PAIRS}
    if options.wide or options.style or options.to_stdout or is_matrix:
        rule = (
            "it changes nccl-tests' table, which --wide, --style, p2p-matrix or stdout replace"
        )
        names = ("report_timestamps", "memory")
        in_file = ("average", "report_cputime")  # -J has them, too
        comm_plan.refuse(options, names if options.output_file else (*in_file, *names), rule)
    if target := options.output_file:
        if Path(target).suffix != ".json":
            raise ConfigError("-J", target, "a name that ends in .json")
        if not options.dry_run:
            delivery.make_folder("-J", Path(target).parent)


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Show the run and write its files. Returns the exit code."""
    options = build(CommOptions, values)
    run = view(path)
    _write_files(run, options)
    if not options.to_stdout:
        _show(run, options)
    return delivery.finish(run, path, code)


def _show(run: View, options: CommOptions) -> None:
    if options.style:
        sys.stdout.write("\n".join(peer_formats.param_comms(run.records, run.run).values()))
        return
    if options.wide:
        show_rows(run)
        if note := comm_remarks.issued_from(run.comm_rows):
            print_text([f"# {note}"])
        return
    matrices = [
        m
        for m in comm_remarks.matrices(run.comm_rows, run.run.environment.devices)
        if len(m.links) > 1
    ]
    drawn = {matrix.family for matrix in matrices}
    for matrix in matrices:
        print_text([*comm_remarks.matrix_lines(matrix), ""])
    rest = [row for row in run.comm_rows if row["family"] not in drawn]
    if rest:
        step = step_asked(options)
        is_terminal = sys.stdout.isatty()
        print_text(
            nccl_tests.output_lines(
                rest,
                run.run,
                step=step,
                head_per_table=is_terminal,
                report=_report(options),
            )
        )


def _report(options: CommOptions) -> nccl_tests.Report:
    return nccl_tests.Report(
        over_ranks=3 if options.average is None else options.average,
        cputime=options.report_cputime == 1,
        memory=options.memory == 1,
        timestamps=options.report_timestamps == 1,
        per_iter=options.per_iter_timing == 1,
    )


def step_asked(options: CommOptions) -> tuple[int, bool] | None:
    """Return the step of the sizes and whether it is a factor; None for sizes of a model."""
    if options.model or options.from_workload:
        return None
    if options.factor:
        return round(options.factor), True
    if options.step:
        return options.step, False
    # One size alone has nccl-tests' own default.
    is_one = options.begin is not None and options.begin == options.end
    return None if is_one else _DEFAULT_STEP


def _write_files(run: View, options: CommOptions) -> None:
    delivery.write_rows(run.comm_rows, options, by="family")
    if target := options.output_file:
        ended_at = datetime.now(UTC).isoformat(timespec="seconds")
        document = peer_formats.json_document(
            run.comm_rows,
            run.run,
            redact_words(sys.argv),
            ended_at=ended_at,
            report=_report(options),
        )
        file = new_file(Path(target))
        write_json(document, file)
        if file != Path(target):
            sys.stderr.write(f"{target} exists: written to {file}\n")
