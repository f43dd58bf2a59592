"""stepmark trace breakdown: where the time of each step went."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from stepmark.findings import histogram
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.read_text import read_head
from stepmark.ground.units import ranks_text
from stepmark.model.kernel_groups import COMMUNICATION, COPIES
from stepmark.tables.columns import Row
from stepmark.text_tables.profiler_tables_verb import looks_like_profiler_table, run_table
from stepmark.timeline.bars import MOST_BARS, MOST_LANES, Bars, bars
from stepmark.timeline.ledger_text import DEFINITIONS
from stepmark.timeline.timeline import Span, Timeline
from stepmark.timeline.trace_breakdown import RankTimes
from stepmark.timeline.trace_columns import Damage, GpuKind, RankTrace
from stepmark.traces import trace_breakdown as report
from stepmark.traces import trace_page
from stepmark.traces.kineto.arrivals import RankParts, matched, rank_parts, with_arrivals
from stepmark.traces.kineto.export import busy_steps
from stepmark.traces.kineto.host_ops import WorkGroups
from stepmark.traces.kineto.links import launches, steps
from stepmark.traces.kineto.matching import Messages
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_files import (
    TraceSet,
    damage_notes,
    deliver,
    map_traces,
    without_pauses,
)
from stepmark.traces.trace_options import BreakdownOptions, TraceInputs

T = TypeVar("T")
_MOST_BARS = MOST_BARS // MOST_LANES  # of one rank: the number of ranks is not known


def breakdown(options: BreakdownOptions) -> int:
    """Print and write the breakdown of traces, or the tables of a profiler in a text file."""
    options.check_stdout()
    if _is_table(options.files):
        for name in ("html", "steps", "ranks"):
            if getattr(options, name) is not None:
                raise ConfigError(name, "given", "it has no effect on a table as text")
        return run_table(Path(options.files[0]), options.json, options.csv)
    times = step_times(options)
    if times is None:
        return 0
    tables = times.tables if options.json or options.csv or options.html else {}
    if options.html:
        lines = list(times.lines(details=True))
        page = trace_page.page(
            f"stepmark trace breakdown {' '.join(options.files)}",
            tables,
            {rank: own for r in times.traces.results for rank, own in r.value[1].items()},
            # A step of a rank is one of as many as messages are means over.
            histogram.rows(times.messages.histogram, num_ranks_seen=times.messages.num_steps),
            lines,
            lead=" ".join(filter(None, (*times.traces.lead.values(), lines[0]))),
        )
        write_text(options.html, page.html(), "html")
    document = {
        "world_size": times.traces.world_size,
        "missing_ranks": times.traces.missing,
        "notes": times.notes,
        "definitions": DEFINITIONS,
        **tables,
    }
    text = times.lines(details=options.details)
    deliver(options, "breakdown", document, tables, text, times.traces.lead)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of each step went, on each rank whose trace was read.

    traces: what was read; with the bars of a step by rank, none unless there is a page.
    """

    traces: TraceSet[tuple[RankParts, dict[int, Bars]]]
    ranks: list[tuple[int, RankTimes]]
    messages: Messages
    notes: list[str]

    @property
    def tables(self) -> dict[str, list[Row]]:
        """Return the rows that --json writes, by table."""
        return report.tables(self.ranks)

    def lines(self, *, details: bool) -> Iterator[str]:
        """Yield the report as text. details: also launch calls and copies."""
        yield from report.lines(self.ranks, details=details)
        yield from (f"note: {note}" for note in self.notes)


def step_times(options: BreakdownOptions) -> StepTimes | None:
    """Read the traces. None on ranks of an outer launcher but the first."""
    options = without_pauses(options)
    traces = map_traces(options, partial(_reduce, options))
    if traces is None:
        return None
    ranks, messages, notes = waiting_times(traces, options)
    return StepTimes(traces=traces, ranks=ranks, messages=messages, notes=notes)


def waiting_times(
    traces: TraceSet[tuple[RankParts, T]], inputs: TraceInputs
) -> tuple[list[tuple[int, RankTimes]], Messages, list[str]]:
    """Return the times of ranks, how they wait for each other, matched calls, and all notes."""
    by_rank = {r.info.rank or 0: (r.info, r.value[0]) for r in traces.results}
    inputs.check_steps(
        {number for _, part in by_rank.values() for number in part.times.all_steps},
        (info.file for info, part in by_rank.values() if not part.times.all_steps),
    )
    messages = matched(by_rank, inputs.has_step)
    ranks = list(with_arrivals(by_rank, messages).items())
    notes = [*traces.notes, *damage_notes(_damage(ranks))]
    if len(ranks) > 1 and (reasons := (messages.unmatched + messages.uncounted).most_common()):
        more = f"; and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        text = "; ".join(f"{count} calls: {reason}" for reason, count in reasons[:3])
        notes.append(f"how ranks wait for each other is not known of {text}{more}")
    return ranks, messages, notes


def _is_table(files: Sequence[str]) -> bool:
    path = Path(files[0])
    return len(files) == 1 and path.is_file() and looks_like_profiler_table(read_head(path))


def _reduce(options: BreakdownOptions, trace: RankTrace) -> tuple[RankParts, dict[int, Bars]]:
    """Return what is kept of a rank's trace, and the bars of a step for a page."""
    parts = rank_parts(trace, options.has_step)
    has_page = options.html and parts.times.steps
    own = timeline(trace, options) if has_page else None
    return parts, bars(own, _MOST_BARS) if own else {}


def _damage(ranks: Sequence[tuple[int, RankTimes]]) -> Iterator[tuple[int, Damage]]:
    """Yield what is wrong, or left out, with its rank."""
    for rank, times in ranks:
        yield from ((rank, damage) for damage in times.damage)
        if count := times.num_outside:
            text = (
                f"GPU events ({times.outside_ns / 1e6:.3f} ms) lie outside the windows of all "
                "steps: they are not counted"
            )
            yield rank, Damage(kind="outside", count=count, text=text)
        if times.empty_steps:
            steps = ranks_text(times.empty_steps).replace("rank", "step")
            text = f"no window of {steps}, which launched nothing"
            yield rank, Damage(kind="empty", count=1, text=text)


def timeline(trace: RankTrace, inputs: TraceInputs) -> Timeline | None:
    """Return the middle one of the chosen steps; None without GPU events."""
    windows = list(busy_steps(trace, inputs).items())
    if not windows:
        return None
    row, window = windows[len(windows) // 2]
    marked = steps(trace)
    step = marked.numbers[row] if marked.is_marked else None
    return Timeline(_spans(trace, *window), window, step)


def _spans(trace: RankTrace, start: int, end: int) -> Iterator[Span]:
    """Yield the GPU events of a window."""
    gpu = trace.gpu
    communicates = is_communication(trace)
    groups = WorkGroups(trace)
    group = groups.of_kernels(np.arange(gpu.start.size), launches(trace))
    streams = [f"GPU {device} stream {stream}" for device, stream in trace.streams]
    for place in np.flatnonzero((gpu.end > start) & (gpu.start < end)).tolist():
        name = int(gpu.name[place])
        kind = groups.names[group[place]]
        if communicates[place]:
            kind = COMMUNICATION
        elif gpu.kind[place] != GpuKind.KERNEL:
            kind = COPIES
        yield Span(
            rank=trace.info.rank or 0,
            stream=streams[gpu.stream[place]],
            kind=kind,
            name=trace.names[name],
            start_ns=int(gpu.start[place]),
            end_ns=int(gpu.end[place]),
        )
