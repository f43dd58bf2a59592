"""stepmark replay: plan the replay of a workload file; show iterations and messages."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.cases.comm_case import CommCase
from stepmark.cases.comm_curve import Curve
from stepmark.cases.plan import CommHow, How, Plan, ReplayHow, entries
from stepmark.cases.replay_case import Compute, Pace, ReplayCase
from stepmark.collectives import comm_plan, comm_workload
from stepmark.collectives.comm_options import CommOptions
from stepmark.collectives.measured_curves import read_curves
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.options import build, plain
from stepmark.ground.units import format_time
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine
from stepmark.measuring.measure import measure_or_list
from stepmark.model.collectives import FACTS
from stepmark.operators import op_plan
from stepmark.replays import replay_log_verb
from stepmark.replays.replay_compute import count_computes
from stepmark.replays.replay_options import ReplayOptions
from stepmark.replays.replay_page import page
from stepmark.step import native
from stepmark.step.rank_program import check_ends, communicators
from stepmark.step.workload import ComputeOp, Item, Run, Workload
from stepmark.store.view import console, view
from stepmark.tables.export import write_csv, write_json
from stepmark.workloads import workload_files
from stepmark.workloads.formats import aicb
from stepmark.workloads.shrink import shrunk

_FILLER_S = 1e-4  # of computation that has no time
_ALONE_S = 60.0  # for all collectives of --alone


def run(options: ReplayOptions) -> int:
    """Plan, then replay on ranks of this host, or as one rank of an outer launcher."""
    return measure_or_list(lambda machine: plan(options, machine), options)


def plan(options: ReplayOptions, machine: Machine) -> Plan:
    """Plan the replay. Raises ConfigError for a workload that cannot run on the ranks."""
    if options.budget and not options.warmup:
        rule = "at least 1 with --budget: it tells how many --iters and --passes fit"
        raise ConfigError("warmup", options.warmup, rule)
    share_s = options.budget and options.budget / (2 if options.alone else 1)
    if options.alone and options.curve:
        rule = "it cannot be combined with --alone, which measures them"
        raise ConfigError("curve", options.curve, rule)
    if options.comm_only and options.compute is Compute.REAL:
        raise ConfigError("comm-only", "given", "it cannot be combined with --compute real")
    curves_of(options)  # refused now, not after the measurement
    compute = Compute.NONE if options.comm_only else options.compute
    notes: list[str] = []
    original = workload_files.read(
        options.file,
        options.group_sizes,
        options.world_size,
        starts=options.pace is Pace.ORIGINAL,
    )
    num_ranks = machine.num_ranks(options.nproc, str(original.world_size))
    workload = _on(original, num_ranks, options)
    workload = _with_times(workload, options, compute, notes)
    if compute is Compute.REAL:
        counts = count_computes(workload, Compute.REAL, op_plan.capabilities(machine))
        texts = [f"{counts[name]} {text}" for name, text in _STAND_INS.items() if counts[name]]
        notes.append(f"of {counts.total()} distinct computations {'; '.join(texts)}")
    _check_pace(workload, options)
    case, text = case_of(workload, replace(options, compute=compute), machine)
    if workload.world_size < original.world_size:
        case = replace(case, shrunk_from=original.world_size)
    return Plan(
        command="replay",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=machine.device,
        world_size=num_ranks,
        how=How(
            comm=CommHow(budget_s=share_s or _ALONE_S),
            replay=ReplayHow(
                budget_s=share_s,
                timeout_s=options.timeout or ReplayHow().timeout_s,
                warmups=options.warmup,
                iterations=options.iters,
                passes=options.passes,
                check=options.check,
            ),
        ),
        entries=entries([case, *_alone(workload, options, machine, notes)]),
        notes=(*workload.all_notes, *notes),
        workload=text,
    )


def case_of(
    workload: Workload, options: ReplayOptions, machine: Machine
) -> tuple[ReplayCase, str]:
    """Return the case of a workload, and its file in our own format, which the plan carries.

    Raises ConfigError for a workload that would not end, or that ranks cannot communicate in.
    """
    communicators(workload)
    check_ends(workload)
    text = native.encode(workload)
    case = ReplayCase(
        file=options.file,
        digest=hashlib.sha256(text).hexdigest(),
        num_ranks=workload.world_size,
        device=machine.device,
        compute=options.compute,
        compute_from=options.compute_from or "",
        blocking=options.blocking,
        pace=options.pace,
    )
    return case, text.decode()


def curves_of(options: ReplayOptions) -> Sequence[Curve]:
    """Return the times of collectives alone of --curve. Raises ConfigError."""
    return read_curves(options.curve, Path(options.out or "runs")) if options.curve else ()


def _alone(
    workload: Workload, options: ReplayOptions, machine: Machine, notes: list[str]
) -> list[CommCase]:
    """Return the collectives of --alone, as `comm` measures them, on the first ranks."""
    if not options.alone:
        return []
    of_groups = [
        case
        for case in comm_workload.labelled(workload)
        if not FACTS[case.collective].pair and case.num_ranks > 1
    ]
    if not of_groups:
        notes.append("the workload has no collectives to measure alone")
        return []
    num_ranks = workload.world_size
    base = comm_plan.shared(CommOptions(), machine.device, num_ranks, num_ranks)
    cases, more = comm_workload.placed(of_groups, base)
    notes += more
    return cases


def _on(workload: Workload, num_ranks: int, options: ReplayOptions) -> Workload:
    if num_ranks == workload.world_size:
        return workload
    if not options.shrink:
        allowed = f"{workload.world_size}, as the file has; or add --shrink for fewer"
        raise ConfigError("nproc", num_ranks, allowed)
    return shrunk(workload, num_ranks)


def _with_times(
    workload: Workload, options: ReplayOptions, compute: Compute, notes: list[str]
) -> Workload:
    """Return the workload with the times of computation that it needs. Raises ConfigError."""
    if compute is Compute.NONE:
        if options.compute_from:
            rule = "it cannot be combined with --compute none"
            raise ConfigError("compute-from", options.compute_from, rule)
        return workload
    if options.compute_from:
        return workload_files.timed(workload, options.compute_from)
    if compute is Compute.REAL:
        return workload
    filled: dict[ComputeOp, ComputeOp] = {}

    def fill(item: Item) -> Item:
        if isinstance(item, ComputeOp) and item.time_s is None and not item.is_wait:
            return filled.setdefault(item, replace(item, time_s=_FILLER_S))
        return item

    blocks = {name: tuple(map(fill, items)) for name, items in workload.blocks.items()}
    if filled:
        times = f"take {format_time(_FILLER_S)} each; --compute-from gives others"
        notes.append(f"{len(filled)} computations have no time in the file: they {times}")
    return replace(workload, blocks=blocks)


_STAND_INS = {
    "operator": "run as operators",
    "busy": "are busy for their time",
    "copy": "are copies of as many bytes",
    "nothing": "are left out, since neither their time nor their bytes are known",
}


def _check_pace(workload: Workload, options: ReplayOptions) -> None:
    """Raise ConfigError if the file has no start times for --pace original."""
    items = (item for block in workload.blocks.values() for item in block)
    if options.pace is Pace.ORIGINAL and not any(
        not isinstance(item, Run) and item.start_s is not None for item in items
    ):
        allowed = "free, or a file with start times: trace to-workload --starts, or PARAM's"
        raise ConfigError("pace", options.pace, allowed)


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Show a replay, write its files. Returns the exit code."""
    options = build(ReplayOptions, values)
    measured = view(path)
    for file, log in replay_log_verb.of_run(path, measured.records, curves_of(options)):
        if options.json:
            write_json(log.document(), options.json, "replay")
        if options.csv:
            write_csv(log.comm_logs, options.csv, "replay")
        if options.timeline:
            events = log.timeline().perfetto("rank")
            write_json(events, options.timeline, "timeline", "timeline")
        if options.html:
            write_text(options.html, page(file, log).html(), "html")
        if options.aicb_log:
            iterations = log.spans[0, :, :, 1].tolist()
            text = "".join(aicb.write_log(log.workload, iterations))
            write_text(options.aicb_log, text, "aicb-log")
        if not options.to_stdout:
            for line in log.lines():
                console().print(line, markup=False, highlight=False, soft_wrap=True)
    return delivery.finish(measured, path, code)
