"""stepmark trace to-workload and convert: a measured step as a workload; other tools' files."""

import gzip
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import config_errors, written
from stepmark.ground.units import ranks_text
from stepmark.model.collectives import is_synchronizing
from stepmark.step.workload import CommOp, Group, Operation, Workload
from stepmark.tables.export import is_folder, write_pieces
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces.kineto import export
from stepmark.traces.kineto.program import RankProgram, program, step_windows
from stepmark.traces.trace_files import TraceSet, map_traces, rank_of
from stepmark.traces.trace_options import ConvertOptions, ToWorkloadOptions, TraceInputs
from stepmark.workloads import file_times, workload_files
from stepmark.workloads.formats.ranks import checked, group_of, name_of, stages_of

_NO_NAME = ("", "undefined", "default_pg")
_TIMES = (
    "times of computations and of the host are those of {}, which waits least (of each stage); "
    "those of collectives are the shortest of their ranks; reductions (sum, average) and roots "
    "are not in a trace; waits between streams are inferred"
)


def to_workload(options: ToWorkloadOptions) -> int:
    """Write the workload."""
    if options.out != "-" and is_folder(options.out):
        raise ConfigError("out", options.out, "a file, e.g. step.json: a workload is one file")
    if workload := read(options, starts=options.starts):
        workload_files.deliver(workload, workload_files.Target(to="native", out=options.out))
    return 0


def read(inputs: TraceInputs, *, starts: bool = False) -> Workload | None:
    """Return one step of a job as a workload. None on ranks of a launcher but the first.

    starts: operations keep their start times, so that no two are alike.
    """
    step = _step(inputs)
    traces = map_traces(inputs, partial(program, step=step))
    if traces is None:
        return None
    notes = filter(None, (traces.lead["cut"], traces.lead["disjoint"], *traces.notes))
    sys.stderr.writelines(f"note: {note}\n" for note in notes)
    programs = {r.info.rank or 0: r.value for r in traces.results if r.value is not None}
    if len(programs) < len(traces.results):
        absent = {r.info.rank or 0 for r in traces.results} - programs.keys()
        raise ConfigError("steps", step, f"a step of all ranks: {ranks_text(absent)} lack it")
    for rank, each in programs.items():
        if each.left_out and not any(isinstance(op, CommOp) for op in each.operations):
            what = "; ".join(f"{count} {text}" for text, count in each.left_out.items())
            allowed = f"traces that state the messages of the step: {what}"
            raise ConfigError("trace", f"rank {rank}", allowed)
    name = Path(inputs.files[0]).name or "trace"
    workload = _workload(traces, programs, name, starts=starts)
    sys.stderr.writelines(f"note: {note}\n" for note in workload.notes)
    return workload


def _step(inputs: TraceInputs) -> int:
    """Return the number of the step: the one of --steps, else that of median duration."""
    if inputs.steps is not None:
        number, *others = inputs.steps
        if others:
            raise ConfigError("steps", inputs.steps, "one step, e.g. 6")
        return number
    if outer_launcher.is_rank():  # whose other ranks do not learn which step it is
        raise ConfigError("steps", "missing", "the number of a step, under a launcher")
    traces = map_traces(inputs, partial(step_windows, inputs))
    assert traces is not None
    took = [result.value for result in traces.results]
    whole = {
        number: max(times[number] for times in took)
        for number in took[0]
        if all(number in times for times in took)
    }
    if not whole:
        value = ", ".join(inputs.files)
        allowed = "traces with a step that has GPU events on all ranks"
        raise ConfigError("trace", value, f"{allowed}{traces.cut_reason}")
    return sorted(whole, key=lambda number: whole[number])[(len(whole) - 1) // 2]


def _workload(
    traces: TraceSet[RankProgram | None],
    programs: Mapping[int, RankProgram],
    name: str,
    *,
    starts: bool,
) -> Workload:
    world = traces.world_size
    groups = dict[str, Group]()
    by_rank = {rank: _name_groups(each, world, groups) for rank, each in programs.items()}
    # Without their waits, which times decide.
    bare = {rank: [replace(op, after=()) for op in own] for rank, own in by_rank.items()}
    messages = {rank: [op for op in bare[rank] if isinstance(op, CommOp)] for rank in bare}
    notes = [*filter(None, [traces.lead["cut"]]), *_notes(programs)]
    first = min(programs)
    if len(programs) < world:
        if unlike := [rank for rank in messages if messages[rank] != messages[first]]:
            allowed = (
                f"traces of all {world} ranks: messages of ranks {first} and {unlike[0]} "
                "differ, so that those of the others are not known"
            )
            raise ConfigError("trace", f"{len(programs)} ranks", allowed)
        absent = ranks_text(set(range(world)) - programs.keys())
        notes.append(f"{absent}: no trace is read; the program is that of rank {first}")
    ranks: list[Sequence[Operation]] = []
    slowest: list[int] = []  # the rank of each stage that waits least
    begun: list[Sequence[float | None]] = []
    for _, alike in groupby(range(world), lambda rank: messages.get(rank, messages[first])):
        members = list(alike)
        sent = {rank: _sent(programs[rank]) for rank in members if rank in programs}
        rank = min(sent, key=lambda rank: sum(time or 0 for time in sent[rank]))
        slowest.append(rank)
        timed = _timed(rank, by_rank[rank], programs[rank].times, sent, groups)
        ranks += [timed] * len(members)
        begun += [programs[rank].starts_s] * len(members)
        if unequal := [other for other in sent if bare[other] != bare[rank]]:
            notes.append(
                f"{ranks_text(unequal)}: the same messages as rank {rank}, but other "
                "computations: those of that rank stand for them"
            )
    notes.append(_TIMES.format(ranks_text(set(slowest))))
    stages, blocks = stages_of(ranks, begun if starts else None)
    info = traces.results[0].info
    return checked(
        Workload(
            name=name,
            rules="trace",
            source=", ".join(["torch.profiler", *map(" ".join, info.versions)]),
            world_size=world,
            settings={
                "step": programs[first].step,
                "devices": ", ".join(sorted(set(info.devices or ()))),
                **_durations(programs, slowest),
            },
            groups=groups,
            blocks=blocks,
            stages=stages,
            notes=tuple(notes),
        )
    )


def _durations(programs: Mapping[int, RankProgram], slowest: Sequence[int]) -> dict[str, float]:
    """Return the settings with times: of the step, and of the host where it takes longest."""
    step_ns = max(each.window_ns for each in programs.values())
    hosts = [programs[rank].host_ns for rank in slowest]
    host_ns = max(hosts, key=lambda own: sum(own.values()))
    host_s = {name: ns / 1e9 for name, ns in host_ns.items()}
    return {file_times.STEP: step_ns / 1e9, **file_times.host_settings(host_s)}


def _name_groups(
    each: RankProgram, world: int, groups: dict[str, Group]
) -> tuple[Operation, ...]:
    """Return the operations with groups whose names are alike on all ranks."""
    names = {}
    for name, members in each.members.items():
        group = group_of(members, f"group {name}")
        desc = name.partition(" ")[2]
        names[name] = name_of(group, world)
        if desc not in _NO_NAME:
            names[name] = f"{desc}: {names[name]}"
        groups[names[name]] = group
    return tuple(
        replace(op, group=names[op.group]) if isinstance(op, CommOp) else op
        for op in each.operations
    )


def _sent(program: RankProgram) -> list[int | None]:
    """Return the times of the messages."""
    pairs = zip(program.operations, program.times, strict=True)
    return [time for op, time in pairs if isinstance(op, CommOp)]


def _timed(
    rank: int,
    operations: Sequence[Operation],
    times: Sequence[int | None],
    sent: Mapping[int, Sequence[int | None]],
    groups: Mapping[str, Group],
) -> tuple[Operation, ...]:
    """Return the operations of a rank with times in ns.

    sent: times of the messages of each rank, of which the shortest is without waiting: that of
    the last rank of a collective to arrive.
    """
    timed: list[Operation] = []
    messages = zip(*sent.values(), strict=True)
    for op, own in zip(operations, times, strict=True):
        time = own
        if isinstance(op, CommOp):
            by_rank = dict(zip(sent, next(messages), strict=True))
            known = [by_rank.get(member) for member in groups[op.group].members(rank)]
            time = min((each for each in known if each is not None), default=None)
            if not is_synchronizing(op.collective) or None in known:
                time = None
        timed.append(op if time is None else replace(op, time_s=time / 1e9))
    return tuple(timed)


def _notes(programs: Mapping[int, RankProgram]) -> Iterator[str]:
    left_out = sum((each.left_out for each in programs.values()), Counter[str]())
    yield from (f"left out: {count} {what}" for what, count in left_out.most_common())


def convert(options: ConvertOptions) -> int:
    """Write the files; they appear together, when all are written."""
    folder = options.out
    if str(folder) == "-":
        raise ConfigError("out", folder, "a folder: a file is written for each rank")
    if options.to == "chakra":
        if workload := read(options):
            target = workload_files.Target(to="chakra", out=f"{folder}/")
            workload_files.deliver(workload, target)
        return 0
    is_new = not folder.exists()
    with config_errors(folder, "out"):
        if not is_new and any(not each.name.startswith(".") for each in folder.iterdir()):
            raise ConfigError("out", folder, "a new or empty folder")
        unfinished = folder / ".unfinished"
        unfinished.mkdir(parents=True, exist_ok=True)
    try:
        traces = map_traces(options, partial(_write, options, unfinished))
        if traces is None:
            return 0
        with config_errors(folder, "out"):
            for file in sorted(unfinished.iterdir()):
                os.replace(file, folder / file.name)
    except ConfigError:
        shutil.rmtree(folder if is_new else unfinished, ignore_errors=True)
        raise
    unfinished.rmdir()
    if traces.lead["cut"]:
        sys.stdout.write(f"{traces.lead['cut']}\n")
    sys.stderr.writelines(f"note: {note}\n" for note in traces.notes)
    for result in traces.results:
        for name, amount in result.value:
            sys.stdout.write(f"{folder / name}: {amount}\n")
    return 0


def _write(
    options: ConvertOptions, folder: Path, trace: RankTrace
) -> tuple[tuple[str, str], ...]:
    """Write the files of one rank. Return their names, and what they hold."""
    rank = rank_of(trace.info) or 0
    if options.ranks is not None and rank not in options.ranks:
        return ()
    if options.to == "trimmed":
        file = folder / f"rank{rank}.json.gz"
        selection = export.select(trace, options)
        with written(file, "out") as stream, gzip.GzipFile("", "wb", 4, stream, 0) as packed:
            packed.writelines(export.trimmed(Path(trace.info.file), selection))
        return ((file.name, f"{file.stat().st_size:,} bytes"),)
    files = []
    for table in export.tables(trace, rank, options):
        file = folder / f"{table.name}.rank{rank}.{options.to}"
        files.append((file.name, f"{write_pieces(table.types, table.pieces, file):,} rows"))
    return tuple(files)
