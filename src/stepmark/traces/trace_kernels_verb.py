"""stepmark trace kernels and compare: which operations the time of a step went to."""

import glob
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.stats import summarize
from stepmark.ground.units import ranks_text
from stepmark.model.ops import Gemm, GroupedGemm, Phase
from stepmark.step.trace_ops import PRODUCTS
from stepmark.step.workload import ComputeOp, Workload
from stepmark.store.reader import read_records
from stepmark.store.runs import TRACES
from stepmark.store.view import median_s
from stepmark.timeline.trace_breakdown import RankTimes
from stepmark.timeline.trace_columns import Damage, RankInfo, RankTrace
from stepmark.traces import trace_breakdown, trace_comparison, trace_kernels_text
from stepmark.traces.kineto.breakdown import breakdown
from stepmark.traces.kineto.checks import missing_work
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.trace_files import (
    TraceSet,
    damage_notes,
    deliver,
    map_traces,
    trace_files,
    without_pauses,
)
from stepmark.traces.trace_options import CompareTracesOptions, KernelsOptions
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.workload_files import read as read_workload

_MOST_NOTES = 8
_TOLD = (Phase.FWD, Phase.DGRAD, Phase.WGRAD)
Products = Counter[tuple[str, str]]  # calls by role and phase, of all steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    sums: trace_kernels_text.RankSums
    products: Products
    with_recomputed: bool  # whether products counts those that are recomputed
    missing: tuple[Damage, ...]  # why its times are none of the step: GPU work is missing
    times: RankTimes | None = None


def kernels(options: KernelsOptions) -> int:
    """Print and write the table of operations."""
    options.check_stdout()
    found = _read(without_pauses(options))
    if found is None:
        return 0
    ranks = found.ranks
    rows = trace_kernels_text.rows(ranks, options.by)
    notes = [*found.notes, *trace_kernels_text.hints(rows, options.by)]
    document = {
        "by": options.by,
        "ranks": [rank for rank, _ in ranks],
        "rows": rows,
        "num_steps": trace_kernels_text.num_steps(ranks),
        "notes": notes,
        "definitions": trace_kernels_text.DEFINITIONS,
    }
    lines = [
        *trace_kernels_text.header(ranks),
        *trace_kernels_text.lines(ranks, rows, options.by),
        *(f"note: {note}" for note in notes),
    ]
    deliver(options, "kernels", document, {"kernels": rows}, lines, found.lead)
    return 0


def compare(options: CompareTracesOptions) -> int:
    """Print and write the comparison of two sides: their steps, then their operations."""
    options.check_stdout()
    if len(options.files) != 2:
        allowed = "two sides: a file, folder or run each, or launches of it joined by commas"
        raise ConfigError("trace", ", ".join(options.files), allowed)
    sides = {}
    for name, word in zip("AB", options.files, strict=True):
        launches = _launches_of(options, word)
        if launches is None:
            return 0
        sides[name] = launches
    every = [(name, *item) for name, side in sides.items() for item in side.items()]
    hosts = [word for _, word, launch in every if launch.ranks[0][1].is_host]
    if 0 < len(hosts) < len(every):
        allowed = "a trace with GPU events, as the other one: host and GPU times do not compare"
        raise ConfigError("trace", hosts[0], allowed)
    a, b = ([launch.ranks for launch in side.values()] for side in sides.values())
    steps = trace_comparison.step_rows(
        *([launch.times for launch in side.values()] for side in sides.values())
    )
    rows = trace_comparison.rows(a, b, options.by)
    total = trace_comparison.total(a, b)
    notes = [f"{name}: {note}" for name, _, launch in every for note in launch.notes]
    notes += _side_notes(*(list(side.values()) for side in sides.values()))
    notes += trace_comparison.remarks(a, b, [*steps, *rows])
    lead = {
        key: " ".join(f"{name}: {each.lead[key]}" for name, _, each in every if each.lead[key])
        for key in every[0][2].lead
    }
    document = {
        "a": options.files[0],
        "b": options.files[1],
        "a_launches": len(a),
        "b_launches": len(b),
        "a_steps": sum(map(trace_kernels_text.num_steps, a)),
        "b_steps": sum(map(trace_kernels_text.num_steps, b)),
        "by": options.by,
        "step": steps,
        "rows": rows,
        "total": total,
        "notes": notes,
    }
    lines = [
        *trace_comparison.headline(steps),
        "",
        *trace_comparison.lines(steps, {}, "part"),
        "",
        *(
            f"{name} {word}: {line}"
            for name, word, launch in every
            for line in trace_kernels_text.header(launch.ranks)
        ),
        *trace_comparison.lines(rows, total, options.by),
        *(f"note: {note}" for note in notes),
    ]
    deliver(options, "compare", document, {"compare": rows}, lines, lead)
    return 0


def _launches_of(options: CompareTracesOptions, word: str) -> "dict[str, _Kernels] | None":
    """Return the launches of a side by the part of the word that names each.

    None on ranks of a launcher that do not report. Raises ConfigError for one without times,
    and for parts of one launch.
    """
    launches: dict[str, _Kernels] = {}
    parts = [word] if Path(word).exists() else word.split(",")
    # Each folder that a pattern matches is a launch; its files are the ranks of one.
    words = [
        each
        for part in parts
        for each in sorted(filter(os.path.isdir, glob.glob(part))) or [part]
    ]
    for part in words:
        launch = _read(replace(options, files=(part,)), with_times=True)
        if launch is None:
            return None
        if not trace_kernels_text.num_steps(launch.ranks):
            reason = f" ({launch.notes[-1]})" if launch.notes else ""
            raise ConfigError("trace", part, f"a trace with times of a step{reason}")
        if any(_overlap_ns(launch, other) > 0 for other in launches.values()):
            allowed = "another launch than those before it: the two ran at the same time"
            raise ConfigError("trace", part, allowed)
        launches[part] = launch
    return launches


def _side_notes(a: "Sequence[_Kernels]", b: "Sequence[_Kernels]") -> Iterator[str]:
    """Yield what the sides share, and what they differ in besides their times."""
    infos = [[info for launch in side for info in launch.infos] for side in (a, b)]
    files, other_files = ({info.file for info in own} for own in infos)
    if files & other_files:
        yield "both sides have the same traces: of these, neither is a change of the other"
    elif any(_overlap_ns(x, y) > 0 for x in a for y in b):
        folders = sorted({str(Path(file).parent) for file in files | other_files})
        yield (
            "A and B ran at the same time: of ranks of one job, neither is a change of the "
            "other; which rank the others wait for: "
            + shlex.join(["stepmark", "trace", "breakdown", *folders])
        )
    sizes = [{str(info.world_size) for info in own if info.world_size} for own in infos]
    devices = [{name for info in own for name in info.devices or ()} for own in infos]
    for what, sides in (("number of ranks", sizes), ("GPU", devices)):
        first, second = (", ".join(sorted(names)) for names in sides)
        if first and second and first != second:
            yield f"the sides differ in their {what}: A {first}, B {second}"


def _overlap_ns(a: "_Kernels", b: "_Kernels") -> int:
    """Return for how long both ran; less than 0 for the time between them."""
    first, second = (
        (min(info.first or 0 for info in own), max(info.last or 0 for info in own))
        for own in (a.infos, b.infos)
    )
    return min(first[1], second[1]) - max(first[0], second[0])


def profile_lines(folder: Path, record: Measured) -> list[str]:
    """Return what the traces of a training case say: its step, and the time by role."""
    assert record.training is not None
    paths = [folder / Path(name).name for name in record.training.traces]
    options = KernelsOptions(files=tuple(str(path) for path in paths if path.is_file()))
    if not options.files:
        return ["the traces of the profile are not there"]
    try:
        profile = _read(options, with_times=True, shares=False)
    except ConfigError as error:
        return [f"the profile cannot be read: {error}"]
    assert profile is not None
    ranks = profile.ranks
    notes = profile.notes
    cut = list(filter(None, [profile.lead["cut"]]))
    if not trace_kernels_text.num_steps(ranks):
        header = [*cut, *trace_kernels_text.header(ranks)]
        return [*header, *(f"note: {note}" for note in notes)]
    # A rank's median: the first profiled step has the profiler's own start in it.
    profiled = max(summarize(sums.step_ns).median for _, sums in ranks if sums.step_ns) * 1e-9
    unprofiled = median_s(record) * record.training.cycle
    rows = trace_kernels_text.rows(ranks, "role")
    return [
        *cut,
        f"profiled step {profiled * 1e3:.1f} ms, unprofiled {unprofiled * 1e3:.1f} ms "
        f"({profiled / unprofiled - 1:+.1%})",
        *_without_profiler(profile.times, unprofiled),
        *("", *trace_breakdown.summary(profile.times), ""),
        *trace_kernels_text.header(ranks),
        *trace_kernels_text.lines(ranks, rows, "role", most=24),
        *(f"note: {note}" for note in notes),
    ]


def _without_profiler(times: trace_breakdown.Ranks, unprofiled_s: float) -> Iterator[str]:
    """Yield what work of the GPU leaves of the unprofiled step: the profiler slows the host."""
    work = [
        summarize([(s.compute_ns + s.exposed_memory_ns) * 1e-9 for s in rank.steps]).median
        for _, rank in times
        if rank.steps and rank.steps[0].device is not None
    ]
    if work and max(work) < unprofiled_s:
        rest_s = unprofiled_s - max(work)
        yield (
            f"compute and copies take {max(work) * 1e3:.1f} ms: {rest_s * 1e3:.1f} ms "
            f"({rest_s / unprofiled_s:.1%}) of the unprofiled step are left for exposed "
            "communication and idle time; what is more below is the profiler's"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """Sums of each rank, its times if they are asked for; lead: see TraceSet."""

    ranks: trace_kernels_text.Ranks
    times: trace_breakdown.Ranks
    notes: list[str]
    lead: Mapping[str, str]
    infos: tuple[RankInfo, ...]


def _read(
    options: KernelsOptions, *, with_times: bool = False, shares: bool = True
) -> _Kernels | None:
    """Return what the traces say. None on ranks of a launcher that do not report."""
    workload, notes = _workload(options)
    reduce = partial(_reduce, options, workload, with_times)
    traces = map_traces(options, reduce, shares=shares)
    if traces is None:
        return None
    options.check_steps(
        {number for result in traces.results for number in result.steps},
        (result.info.file for result in traces.results if not result.steps),
    )
    ranks = _comparable(traces)
    return _Kernels(
        ranks=[(rank, each.sums) for rank, each in ranks.items()],
        times=[(rank, each.times) for rank, each in ranks.items() if each.times],
        notes=[*traces.notes, *notes, *_notes(traces, workload)],
        lead=traces.lead,
        infos=tuple(result.info for result in traces.results),
    )


def _reduce(
    options: KernelsOptions, workload: Workload | None, with_times: bool, trace: RankTrace
) -> _Rank:
    table = measured_ops(trace, options.has_step, workload)
    products: Products = Counter()
    # On a host recomputation begins products that it then does not carry out.
    is_partial = table.is_host and any(op.key.is_recomputed for op in table.ops)
    for op in table.ops if workload else ():
        if op.key.op in PRODUCTS and not (is_partial and op.key.is_recomputed):
            products[op.key.role, op.key.phase] += op.calls
    sums = trace_kernels_text.summed(table, options.by)
    missing = tuple(missing_work(trace)) if table.is_host else ()
    return _Rank(
        sums=sums,
        products=products,
        with_recomputed=not is_partial,
        missing=missing,
        times=breakdown(trace, options.has_step) if with_times else None,
    )


def _comparable(traces: TraceSet[_Rank]) -> dict[int, _Rank]:
    """Return the ranks that count: times of hosts are not added to those of GPUs."""
    values = {r.info.rank or 0: r.value for r in traces.results if not r.value.missing}
    is_host = all(each.sums.is_host for each in values.values())
    return {rank: each for rank, each in values.items() if each.sums.is_host == is_host}


def _workload(options: KernelsOptions) -> tuple[Workload | None, list[str]]:
    """Return the workload of --workload, or of the training case whose traces these are."""
    if options.workload:
        return read_workload(options.workload), []
    file = trace_files(options)[0]
    run = file.parent.parent
    if file.parent.name != TRACES or not (run / "records.jsonl").is_file():
        return None, []
    for record in read_records(run):
        case = record.case
        if isinstance(case, TrainCase) and case.case_id[:16] in file.name:
            try:
                return of_case(case), []
            except ConfigError as error:
                return None, [f"roles come from annotations alone, no workload: {error}"]
    return None, []


def _notes(traces: TraceSet[_Rank], workload: Workload | None) -> Iterator[str]:
    """Yield notes of ranks, and products whose number is not that of the workload."""
    ranks: dict[str, list[int]] = defaultdict(list)
    if workload is not None and workload.world_size != traces.world_size:
        yield f"the workload has {workload.world_size} ranks, the job {traces.world_size}"
    yield from damage_notes(
        (result.info.rank or 0, each)
        for result in traces.results
        for each in result.value.missing
    )
    comparable = _comparable(traces)
    for result in traces.results:
        rank = result.info.rank or 0
        sums = result.value.sums
        texts = list(sums.notes)
        if rank not in comparable:
            text = "no GPU events, as other ranks have: times of its host are left out"
            texts = [] if result.value.missing else [text]
        elif workload is not None and sums.steps and rank < workload.world_size:
            texts += _wrong_counts(result.value, workload, workload.stage_of(rank))
        for text in texts:
            ranks[text].append(rank)
    yield from (f"{ranks_text(ranks[text])}: {text}" for text in list(ranks)[:_MOST_NOTES])
    if len(ranks) > _MOST_NOTES:
        yield f"and {len(ranks) - _MOST_NOTES} more of this kind"


def _wrong_counts(found: _Rank, workload: Workload, stage: int) -> Iterator[str]:
    count = len(found.sums.steps)
    expected: Products = Counter()
    # A host multiplies experts one by one.
    kinds = (Gemm,) if found.sums.is_host else (Gemm, GroupedGemm)
    for op, calls in workload.tally(stage).items():
        is_product = isinstance(op, ComputeOp) and isinstance(op.op, kinds)
        if is_product and (found.with_recomputed or not op.recompute):
            expected[op.module, str(op.phase)] += calls * count
    unsure = [key for key in found.products if " | " in key[0] or key[1] not in _TOLD]
    if unsure:
        number = sum(found.products[key] for key in unsure) / count
        yield f"{number:.4g} products per step have a shape of several roles or phases"
    skipped = {role for roles, _ in unsure for role in roles.split(" | ")}
    # Attention by products, as on a CPU, is one operation of a workload.
    skipped |= {role for role, _ in found.products} - {"", *(role for role, _ in expected)}
    for key in dict.fromkeys((*expected, *found.products)):
        if found.products[key] != expected[key] and key not in unsure and key[0] not in skipped:
            name = f"{key[0] or 'an unknown role'} {key[1]}"
            yield (
                f"{found.products[key] / count:.4g} products of {name} per step, "
                f"the workload has {expected[key] / count:.4g}"
            )
