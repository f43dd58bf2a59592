"""The traces of one job: find them, read each in a process of its own, check they match.

Memory does not grow with the number of ranks: a process keeps what `reduce` returns, which is
small, and never the columns. Under torchrun, srun or mpirun each process reads its share, and
rank 0 gets the results of all.
"""

import contextlib
import glob
import hashlib
import itertools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from stepmark.cases.record import Measured
from stepmark.cases.training import Training
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.grouping import group_by
from stepmark.ground.option_groups import Files
from stepmark.ground.read_text import read_head
from stepmark.ground.units import plural, ranks_text
from stepmark.ground.waiting import Waiting
from stepmark.ground.workers import Workers, cores
from stepmark.store.reader import find_run, read
from stepmark.store.runs import TRACES
from stepmark.store.view import print_text
from stepmark.tables.columns import Row, digits
from stepmark.tables.export import write_json, write_tables
from stepmark.timeline.trace_columns import Damage, RankInfo, RankTrace
from stepmark.traces.kineto.checks import checked
from stepmark.traces.kineto.events import LEFT_OUT
from stepmark.traces.kineto.links import step_numbers
from stepmark.traces.kineto.matching import disjoint
from stepmark.traces.kineto.reader import read_trace
from stepmark.traces.kineto.stream import looks_like_trace
from stepmark.traces.step_groups import is_paused, step_groups, step_windows
from stepmark.traces.trace_cache import read_cached
from stepmark.traces.trace_options import TraceInputs

R = TypeVar("R")
T = TypeVar("T", bound=TraceInputs)
_SUFFIXES = (".json", ".json.gz")
_RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d{1,7})(?!\d)")
_MAX_FILES = 100_000
_MOST_WINDOWS = 6  # with a command each
_MOST_CUT = 3  # traces of which the first line of a report says what was read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult(Generic[R]):
    """What was made of one rank's trace. info.rank is known, see `notes` of the set.

    steps: that are marked. windows: their durations in ns. least_ranks: of the job, by the
    groups of its collectives.
    """

    info: RankInfo
    value: R
    steps: frozenset[int] = frozenset()
    windows: Mapping[int, int] = field(default_factory=dict)
    least_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet(Generic[R]):
    """Results of all traces of one job by rank, and what to say about them.

    lead: the first sentences of every report by JSON key, "" where they do not apply: `cut`,
    which traces end early, and what of them was read; `disjoint`, which do not overlap in time;
    `step_groups`, where steps fall in two groups.
    """

    results: tuple[RankResult[R], ...]
    world_size: int
    missing: tuple[int, ...]
    notes: tuple[str, ...]
    lead: Mapping[str, str]

    @property
    def cut_reason(self) -> str:
        """Return which traces end early, as the end of an error; "" where all are whole."""
        return self.lead["cut"] and f" ({self.lead['cut'].rstrip('.')})"


def map_traces(
    inputs: TraceInputs, reduce: Callable[[RankTrace], R], *, shares: bool = True
) -> TraceSet[R] | None:
    """Return what `reduce` makes of each trace. None on ranks of a launcher but the first.

    reduce: a function of a module, or a partial of one, as other processes get it.
    shares: whether a launcher's ranks share the files; else the one that calls reads all.
    Raises ConfigError for files that are no traces, or not of one job.
    """
    paths = trace_files(inputs)
    work = partial(_read, _reader(inputs), reduce)
    if not (shares and outer_launcher.is_rank()):
        return _checked(_in_processes(work, paths, inputs.jobs), inputs)
    outer_launcher.as_torchrun()
    from stepmark.measuring.ranks import join  # noqa: PLC0415 - torch

    ranks = join("cpu")
    try:
        try:
            own_part: object = _in_processes(
                work, paths[ranks.rank :: ranks.num_ranks], inputs.jobs
            )
        except StepmarkError as error:
            own_part = error
        parts = ranks.gather(own_part)
    finally:
        ranks.close()
    for part in parts:
        if isinstance(part, StepmarkError):
            raise part
    results = [result for part in parts for result in part]
    return _checked(results, inputs) if ranks.rank == 0 else None


def recorded_traces(run: Path, training: Training) -> tuple[str, ...]:
    """Return the traces of a step that a run profiled. Raises ConfigError for another file."""
    files = [run / TRACES / Path(name).name for name in training.traces]
    for file, digest in itertools.zip_longest(files, training.trace_sha256):
        if not file.is_file():
            allowed = f"in {file.parent}; the run was kept without it"
            raise ConfigError("trace", file.name, allowed)
        with file.open("rb") as stream:
            if digest not in (None, hashlib.file_digest(stream, "sha256").hexdigest()):
                allowed = f"the one that run {run.name} recorded: it was changed or replaced"
                raise ConfigError("trace", file.name, allowed)
    return tuple(map(str, files))


def trace_files(inputs: TraceInputs) -> list[Path]:
    """Return the files of the traces. Raises ConfigError where there are none."""
    paths: list[Path] = []
    for word in inputs.files:
        names = _expand(word, inputs.runs)
        if not names and not paths:
            raise ConfigError("trace", word, "a folder or pattern with .json or .json.gz files")
        if names and paths and not set(names) - set(paths):
            raise ConfigError("trace", word, "given once: its traces are in those before it")
        paths += [path for path in names if path not in paths]
    if len(paths) > _MAX_FILES:
        raise ConfigError("trace", len(paths), f"at most {_MAX_FILES} files")
    return paths


def _expand(word: str, runs: Path) -> list[Path]:
    path = Path(word)
    if path.is_dir():
        folder = path / TRACES if (path / TRACES).is_dir() else path
        named = (each for each in folder.rglob("*") if each.name.endswith(_SUFFIXES))
        files = sorted(each for each in named if each.name[0] != "." and _is_trace(each))
        return _of_steps(folder.parent, files) if folder.name == TRACES else files
    if path.exists():
        return [path]
    if glob.has_magic(word):
        matches = sorted(glob.glob(word))
        return [file for match in matches for file in _expand(match, runs)]
    try:
        run = find_run(runs, word)
    except ConfigError as error:
        allowed = f"a file or folder that exists, or {error.allowed}"
        raise ConfigError("trace", word, allowed) from None
    if not (run / TRACES).is_dir():
        raise ConfigError("trace", word, "a run with traces: train --profile writes them")
    return _expand(str(run / TRACES), runs)


def _of_steps(run: Path, files: list[Path]) -> list[Path]:
    """Return the traces of a run's steps; without one, those of its calibration."""
    names: set[str] = set()
    with contextlib.suppress(ConfigError):  # no run, or a damaged one
        for record in read(run).records:
            if isinstance(record, Measured) and record.training and not record.case.labels:
                names |= {Path(name).name for name in record.training.traces}
    return [file for file in files if file.name in names] or files


def _is_trace(path: Path) -> bool:
    """Return whether a file of a folder is a trace; a damaged one is left to the reader."""
    try:
        return path.is_file() and looks_like_trace(read_head(path))
    except ConfigError:
        return True


def _read(
    read: Callable[[Path], RankTrace], reduce: Callable[[RankTrace], R], path: Path
) -> RankResult[R]:
    trace = read(path)
    sizes = (
        max(args.group_size or 1, 1 + max(args.ranks, default=0)) for args in trace.comm_args
    )
    return RankResult(
        info=trace.info,
        value=reduce(trace),
        steps=frozenset(step_numbers(trace)),
        windows=step_windows(trace),
        least_ranks=max(sizes, default=1),
    )


def _reader(inputs: TraceInputs) -> Callable[[Path], RankTrace]:
    """Return what reads a trace: from the cache unless --no-cache."""
    return _checked_trace if inputs.no_cache else partial(read_cached, read=_checked_trace)


def _checked_trace(path: Path) -> RankTrace:
    """Return a trace, with what is impossible in it. Raises ConfigError for an empty one."""
    trace = read_trace(path)
    _refuse_empty(trace.info)
    return checked(trace)


def _refuse_empty(info: RankInfo) -> None:
    """Raise ConfigError for a trace without events, or whose events are another tool's."""
    reason = f" ({info.cut})" if info.cut else ""
    if not info.num_events:
        allowed = f"a profiler's JSON trace with events: its list has none{reason}"
    elif info.first is None and not any(damage.kind in LEFT_OUT for damage in info.damage):
        allowed = (
            "a trace of PyTorch's profiler: none of its events is an operator, a call of the "
            f"runtime, an annotation or work of a device{reason}"
        )
    else:
        return
    raise ConfigError("trace", info.file, allowed)


def _in_processes(
    work: Callable[[Path], RankResult[R]], paths: Sequence[Path], jobs: int | None
) -> list[RankResult[R]]:
    """Return results in the order of the paths."""
    count = max(1, min(jobs or cores(), len(paths)))
    what = f"reading {len(paths)} trace{'s' if len(paths) > 1 else ''}"
    with Workers(count, work) as workers:
        try:
            results = workers.map(_result, paths)
            with Waiting(what):  # after the fork: a thread of ours would be lost in it
                return list(results)
        except BrokenProcessPool:
            allowed = "read by processes that have enough memory; --jobs 1 needs the least"
            raise ConfigError("trace", f"{len(paths)} files", allowed) from None


def _result(work: Callable[[Path], RankResult[R]], path: Path) -> RankResult[R]:
    return work(path)


def _checked(results: Sequence[RankResult[R]], inputs: TraceInputs) -> TraceSet[R]:
    """Return the results by rank. Raises ConfigError for traces of different jobs."""
    notes: list[str] = []
    _refuse_several_windows(results, inputs)
    named = [_with_rank(result, len(results), notes) for result in results]
    _refuse_two_jobs(named)
    sizes = {result.info.world_size for result in named} - {None}
    least = max(max(1 + (r.info.rank or 0), r.least_ranks) for r in named)
    world_size = next(iter(sizes), None) or min(least, MAX_RANKS)
    known = {result.info.rank for result in named}
    missing = tuple(sorted(set(range(world_size)) - known))
    if missing:
        notes.append(
            f"{len(missing)} of {world_size} ranks have no trace here ({ranks_text(missing)}): "
            "how long the others wait for them is not known"
        )
    notes += _unequal_steps(named)
    notes += _left_out_pauses(named[0], inputs)
    notes += damage_notes((r.info.rank or 0, damage) for r in named for damage in r.info.damage)
    if inputs.ranks is not None:
        if absent := set(inputs.ranks) - known:
            allowed = f"ranks that have traces: {ranks_text(r or 0 for r in known)}"
            raise ConfigError("ranks", min(absent), allowed)
        named = [result for result in named if result.info.rank in inputs.ranks]
    named.sort(key=lambda result: result.info.rank or 0)
    return TraceSet(
        results=tuple(named),
        world_size=world_size,
        missing=missing,
        notes=tuple(notes),
        lead={
            "cut": _cut_text([result.info for result in named]),
            "disjoint": disjoint([result.info for result in named]),
            "step_groups": _step_groups_text(named, inputs),
        },
    )


def _cut_text(infos: Sequence[RankInfo]) -> str:
    """Return which traces are cut, why, and what of them was read."""
    cut = [info for info in infos if info.cut]
    if not cut:
        return ""
    which = "The trace is cut"
    parts = [_extent(cut[0])]
    if len(infos) > 1:
        ranks = ranks_text(info.rank or 0 for info in cut)
        which = f"{len(cut)} of {len(infos)} traces are cut ({ranks})"
        parts = [f"of rank {info.rank}, {_extent(info)}" for info in cut[:_MOST_CUT]]
    if len(cut) > len(parts):
        parts.append(f"and of {len(cut) - len(parts)} more ranks")
    return (
        f"{which}, the end is missing: {cut[0].cut}. Only this part was read: "
        f"{'; '.join(parts)}. All figures are of it alone: work that is missing looks idle."
    )


def _step_groups_text(results: Sequence[RankResult[R]], inputs: TraceInputs) -> str:
    """Return which of the chosen steps fall in two groups, on the first rank where they do."""
    for result in results:
        own = {step: time for step, time in result.windows.items() if inputs.has_step(step)}
        if groups := step_groups(own):
            of_rank = f" (rank {result.info.rank})" if len(results) > 1 else ""
            return f"{groups}{of_rank}"
    return ""


def without_pauses(inputs: T) -> T:
    """Return inputs that choose the steps back to back of a calibration's paused profile.

    In its other half the device waits, on purpose, until its clock has recovered.
    """
    files = trace_files(inputs)
    if inputs.steps is not None or not is_paused(files):
        return inputs
    groups = step_groups(step_windows(_reader(inputs)(files[0])))
    if groups is None:
        return inputs
    return replace(inputs, steps=tuple(groups.fast))


def _left_out_pauses(result: RankResult[R], inputs: TraceInputs) -> Iterator[str]:
    """Yield a note where only steps without pauses of a calibration are chosen."""
    groups = step_groups(result.windows)
    if groups and is_paused([result.info.file]) and not any(map(inputs.has_step, groups.slow)):
        slow = ranks_text(groups.slow).replace("rank", "step")
        yield (
            f"{slow} of this calibration's profile have pauses on purpose and are left out; "
            f"--steps {slow.split(' ', 1)[1].replace(' ', '')} has them"
        )


def _extent(info: RankInfo) -> str:
    """Return how much of a trace was read."""
    took_ms = ((info.last or 0) - (info.first or 0)) / 1e6
    return f"{info.num_events:,} events over {took_ms:.3f} ms, in {info.num_bytes:,} bytes"


def _with_rank(result: RankResult[R], num_files: int, notes: list[str]) -> RankResult[R]:
    """Return the result with its rank: as the trace states it, else as its name does."""
    info = result.info
    if info.rank is not None:
        return result
    rank = rank_of(info)
    source = "the only file" if rank is None else "its file's name"
    if rank is None and num_files == 1:
        rank = 0
    if rank is None:
        allowed = "a trace that states its rank, or a name such as rank3.json"
        raise ConfigError("trace", info.file, allowed)
    notes.append(f"rank {rank} is known from {source}: the trace does not state it")
    return replace(result, info=replace(info, rank=rank))


def rank_of(info: RankInfo) -> int | None:
    """Return the rank that the trace or its name states."""
    numbers = _RANK_IN_NAME.findall(Path(info.file).name)
    return int(numbers[0]) if info.rank is None and len(numbers) == 1 else info.rank


def _refuse_two_jobs(results: Sequence[RankResult[R]]) -> None:
    """Refuse traces whose number of ranks or groups over all ranks differ."""
    first = results[0].info
    for other in (result.info for result in results[1:]):
        for what, a, b in (
            ("ranks", first.world_size, other.world_size),
            ("backend", first.backend, other.backend),
        ):
            if a and b and a != b:
                value = f"{first.file} ({what}: {a}) and {other.file} ({what}: {b})"
                raise ConfigError("trace", value, "traces of one job")


def _refuse_several_windows(results: Sequence[RankResult[R]], inputs: TraceInputs) -> None:
    """Refuse several traces of one rank, with a command for each job and window."""
    ranks = [rank_of(result.info) for result in results]
    if len({*ranks} - {None}) == len(ranks) - ranks.count(None):
        return
    windows = _windows(results)
    commands = []
    for word, own in windows.items():
        groups = step_groups(own[0].windows)
        took = median(groups.fast.values() if groups else own[0].windows.values() or [0]) / 1e6
        step = f"step of {digits(took)} ms, " if took else ""
        command = shlex.join(["stepmark", "trace", "breakdown", word])
        commands.append(f"{command} ({step}{plural(len(own), 'rank')})")
    if (more := len(commands) - _MOST_WINDOWS) > 0:
        commands[_MOST_WINDOWS:] = [f"and {more} more"]
    allowed = f"one trace of each rank, of one job and window. Here are {len(windows)}: "
    raise ConfigError("trace", " ".join(inputs.files), allowed + "; ".join(commands))


def _windows(results: Sequence[RankResult[R]]) -> dict[str, list[RankResult[R]]]:
    """Return the traces of each job and window by the word that names them on a command line.

    Paths of one differ in the rank alone; or it has a folder, with one trace of each rank.
    """
    windows: dict[str, list[RankResult[R]]] = {}
    patterns = group_by(results, lambda result: _RANK_IN_NAME.sub("rank*", result.info.file))
    for folder, items in group_by(patterns.items(), lambda item: Path(item[0]).parent).items():
        own = [result for _, part in items for result in part]
        ranks = {rank_of(result.info) for result in own} - {None}
        if len(items) > 1 and len(ranks) == len(own):
            windows[str(folder)] = own
        else:
            windows |= {p if len(part) > 1 else part[0].info.file: part for p, part in items}
    return windows


def _unequal_steps(results: Sequence[RankResult[R]]) -> Iterator[str]:
    """Yield a note where ranks have other steps than most of them."""
    counts = Counter(result.steps for result in results)
    usual = max(counts, key=lambda steps: counts[steps])
    if len(counts) > 1:
        others = [result for result in results if result.steps != usual]
        first, expected = (
            ranks_text(steps).replace("rank", "step") if steps else "no steps"
            for steps in (others[0].steps, usual)
        )
        yield (
            f"{ranks_text(result.info.rank or 0 for result in others)}: {first} are marked, "
            f"on the other ranks {expected}: means over ranks are of different steps"
        )


def deliver(
    options: Files,
    name: str,
    document: Mapping[str, object],
    tables: Mapping[str, list[Row]],
    lines: Iterable[str],
    lead: Mapping[str, str],
) -> None:
    """Write the files of a report, and print it unless stdout is one of them.

    name: of the files in a folder. lead: its first lines, see TraceSet.
    """
    if options.json:
        first_keys = {key: text or None for key, text in lead.items()}
        write_json({**first_keys, **document}, options.json, name)
    if options.csv:
        filled = {name: rows for name, rows in tables.items() if rows}
        write_tables(filled or dict(list(tables.items())[:1]), options.csv, "csv")
    first = list(filter(None, lead.values()))
    if not options.to_stdout:
        print_text([*first, *lines])
    elif options.csv == "-":  # rows have no room for it
        sys.stderr.writelines(f"{line}\n" for line in first)


def damage_notes(damages: Iterable[tuple[int, Damage]]) -> Iterator[str]:
    """Yield what is wrong with ranks, once for all of them where it is of one kind."""
    for cases in group_by(damages, lambda case: case[1].kind).values():
        rank, most = max(cases, key=lambda case: (case[1].count, -case[0]))
        text = f"{most.count} {most.text}" if most.count > 1 else most.text
        affected = ranks_text(rank for rank, _ in cases)
        where = f" (rank {rank}, the most)" if len(cases) > 1 else ""
        yield f"{affected}: {text}{where}"
