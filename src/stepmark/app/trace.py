"""stepmark trace breakdown: where the time of each step went."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from stepmark.app.trace_files import RankResult, TraceSet, map_traces
from stepmark.core.columns import Row
from stepmark.core.errors import ConfigError
from stepmark.core.options import load
from stepmark.core.trace_breakdown import RankTimes
from stepmark.core.trace_columns import RankTrace
from stepmark.core.trace_options import BreakdownOptions
from stepmark.core.trace_timeline import Timeline
from stepmark.core.units import ranks_text
from stepmark.report import histogram
from stepmark.report import trace_breakdown as report
from stepmark.store.export import write_json, write_tables
from stepmark.store.files import write_text
from stepmark.trace.kineto import breakdown as kineto
from stepmark.trace.kineto.matching import match
from stepmark.trace.kineto.messages import RankMessages, rank_messages
from stepmark.trace.kineto.timeline import timeline


def breakdown(options: BreakdownOptions) -> int:
    """Print and write the breakdown."""
    options.check_stdout()
    traces = map_traces(options, partial(_reduce, options))
    if traces is None:
        return 0
    results = [RankResult(info=r.info, value=r.value.times) for r in traces.results]
    _check_steps(options, results)
    ranks = [(result.info.rank or 0, result.value) for result in results]
    notes = [*traces.notes, *_notes(results)]
    if options.json:
        header = {"world_size": traces.world_size, "missing_ranks": traces.missing}
        document = header | {"notes": notes, "definitions": report.DEFINITIONS}
        write_json(document | report.tables(ranks), options.json, "breakdown")
    if options.csv:
        filled = {name: rows for name, rows in report.tables(ranks).items() if rows}
        write_tables(filled or {"steps": []}, options.csv, "csv")
    if options.html:
        lines = [*report.lines(ranks), *(f"note: {note}" for note in notes)]
        write_text(options.html, _page(options, traces, report.tables(ranks), lines), "html")
    if not options.to_stdout:
        sys.stdout.writelines(f"{line}\n" for line in report.lines(ranks))
        sys.stdout.writelines(f"note: {note}\n" for note in notes)
    return 0


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is kept of a rank's trace; the last two only for a page."""

    times: RankTimes
    timeline: Timeline | None = None
    messages: RankMessages | None = None


def _reduce(options: BreakdownOptions, trace: RankTrace) -> _Rank:
    times = kineto.breakdown(trace, options.has_step)
    if not options.html or not times.steps:
        return _Rank(times)
    return _Rank(times, timeline(trace, options), rank_messages(trace))


def _page(
    options: BreakdownOptions,
    traces: TraceSet[_Rank],
    tables: dict[str, list[Row]],
    lines: Sequence[str],
) -> str:
    by_rank = {result.info.rank or 0: result for result in traces.results}
    found = match(
        {rank: (r.info, r.value.messages) for rank, r in by_rank.items() if r.value.messages},
        options.has_step,
    )
    page: str = load("stepmark.report.trace_page:page")(  # with plotly
        f"stepmark trace breakdown {' '.join(options.files)}",
        tables,
        {rank: r.value.timeline for rank, r in by_rank.items() if r.value.timeline},
        histogram.rows(found.histogram, num_ranks_seen=len(by_rank)),
        lines,
    )
    return page


def _check_steps(options: BreakdownOptions, results: Sequence[RankResult[RankTimes]]) -> None:
    """Raise ConfigError for --steps that no trace has, or that traces do not mark."""
    if options.steps is None:
        return
    value = ",".join(
        f"{low}-{high}" if low != high else f"{low}" for low, high in options.steps
    )
    for result in results:
        if not result.value.is_marked:
            allowed = f"it has no meaning for {result.info.file}, without ProfilerStep marks"
            raise ConfigError("steps", value, allowed)
    if not any(result.value.steps for result in results):
        numbers = {number for result in results for number in result.value.all_steps}
        allowed = f"among those of the traces: {ranks_text(numbers).split(' ', 1)[1]}"
        raise ConfigError("steps", value, allowed)


def _notes(results: Sequence[RankResult[RankTimes]]) -> Iterator[str]:
    """Yield what is wrong, or left out, once for all ranks where it is of the same kind."""
    by_kind: dict[str, list[tuple[int, int, str]]] = {}
    for result in results:
        rank, times = result.info.rank or 0, result.value
        for damage in times.damage:
            count = f"{damage.count} " if damage.count > 1 else ""
            text = f"{count}{damage.text}"
            by_kind.setdefault(damage.kind, []).append((damage.count, rank, text))
        if times.num_outside:
            text = (
                f"{times.num_outside} GPU events ({times.outside_ns / 1e6:.3f} ms) lie outside "
                "the windows of all steps: they are not counted"
            )
            by_kind.setdefault("outside", []).append((times.num_outside, rank, text))
        if times.empty_steps:
            steps = ranks_text(times.empty_steps).replace("rank", "step")
            text = f"{steps} launched nothing and have no window"
            by_kind.setdefault("empty", []).append((len(times.empty_steps), rank, text))
    for cases in by_kind.values():
        _, rank, text = max(cases, key=lambda case: (case[0], -case[1]))
        ranks = ranks_text(rank for _, rank, _ in cases)
        yield f"{ranks}: {text}" + f" (rank {rank}, the most)" * (len(cases) > 1)
