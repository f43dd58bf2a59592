"""Ledgers of measured steps: of traces (stepmark trace ledger), training cases, two runs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from stepmark.cases.record import Measured
from stepmark.ground.errors import ConfigError
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import format_time
from stepmark.predictions import ledger_page
from stepmark.store.view import view
from stepmark.tables.columns import Row, number
from stepmark.tables.page import Page, Section
from stepmark.timeline import ledger_text as report
from stepmark.timeline.ledger import (
    TRANSFER,
    WAITING,
    Group,
    Ledger,
    MeasuredLedger,
    without_profiler,
)
from stepmark.timeline.ledger_text import RankLedger
from stepmark.timeline.step_sentence import sentence
from stepmark.timeline.trace_breakdown import StepTimes
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces.kineto.arrivals import RankParts, rank_parts
from stepmark.traces.kineto.ledger import ledgers
from stepmark.traces.trace import waiting_times
from stepmark.traces.trace_files import (
    deliver,
    map_traces,
    recorded_traces,
    without_pauses,
)
from stepmark.traces.trace_options import LedgerOptions, TraceInputs
from stepmark.training.training_rates import means_of
from stepmark.training.training_words import title

# A profiled step takes so many times as long as the others; more on a host that is slow.
_FASTEST = 0.9
_SLOWEST = 3.0


def ledger(options: LedgerOptions) -> int:
    """Print and write the ledger of every step of every rank."""
    options.check_stdout()
    found = _read(without_pauses(options), shares=True)
    if found is None:
        return 0
    steps, notes, lead = found
    rows = report.step_rows(steps)
    document = {"notes": notes, "definitions": report.DEFINITIONS, "rows": rows}
    lines = (*report.step_lines(steps), *(f"note: {note}" for note in notes))
    deliver(options, "ledger", document, {"ledger": rows}, lines, lead)
    return 0


def measured_ledger(folder: Path, record: Measured) -> MeasuredLedger:
    """Return the ledger of a training step that was measured and then profiled.

    folder: of its run. Raises ConfigError where no trace has times of the step.
    """
    training = record.training
    if training is None or not training.traces:
        raise ConfigError("profile", None, "train --profile, which traces the step")
    files = recorded_traces(folder, training)
    found = _read(LedgerOptions(files=files), shares=False)
    assert found is not None  # this process reads all files
    steps, notes, _ = found  # the notes say which traces are cut
    means = means_of(slowest_per_sample(record.samples.seconds), training.cycle)
    if not steps or not means:
        reason = notes[-1] if notes else "the run was interrupted"
        raise ConfigError("trace", files[0], f"one with times of a step that ran ({reason})")
    by_rank = {rank: [s for s in steps if s.rank == rank] for rank in {s.rank for s in steps}}
    # The step in the middle by its time, of two the shorter one.
    medians = [
        sorted(own, key=lambda step: step.ledger.window_ns)[(len(own) - 1) // 2]
        for own in by_rank.values()
    ]

    def own_ns(step: RankLedger) -> int:
        """Return the time in which a rank waits for no other: others wait for the slowest.

        Waiting is also hidden by computation; unknown, all exposed communication counts as it.
        """
        waiting_ns = step.times.waiting_ns
        if waiting_ns is None:
            waiting_ns = step.ledger.total(Group.COMM)
        return step.ledger.window_ns - waiting_ns

    slowest = max(medians, key=lambda step: (own_ns(step), -step.rank))
    if slowest.step is None:
        raise ConfigError("trace", files[0], "a trace with marks of its steps (ProfilerStep)")
    step_s = summarize(means).median * training.cycle
    window_s = slowest.ledger.window_ns * 1e-9
    if not _FASTEST * step_s < window_s < _SLOWEST * step_s:
        times = f"{format_time(window_s)}, the measured one {format_time(step_s)}"
        notes.append(f"the profiled step takes {times}: the trace may be of another step")
    return MeasuredLedger(
        ledger=without_profiler(slowest.ledger, round(step_s * 1e9)),
        profiled=slowest.ledger,
        rank=slowest.rank,
        num_ranks=len(by_rank),
        step=slowest.step,
        num_steps=len(by_rank[slowest.rank]),
        notes=tuple(notes),
    )


def comparison_page(first: Path, second: Path) -> Page:
    """Return a page with the ledgers of the training steps that both runs profiled.

    Where they have no case in common and profiled one step each, it is of these two.
    """
    a, b = (_profiled(path) for path in (first, second))
    pairs = [(a[case_id], b[case_id]) for case_id in a if case_id in b]
    if not pairs and len(a) == len(b) == 1:
        pairs = list(zip(a.values(), b.values(), strict=True))
    if not pairs:
        allowed = f"a run with a profiled training step of a case that {first.name} has, too"
        raise ConfigError("run", second.name, allowed)
    sections: list[Section] = []
    for sides in pairs:
        steps = [
            measured_ledger(path, record)
            for path, (record, _) in zip((first, second), sides, strict=True)
        ]
        titles = [title(row) for _, row in sides]
        text = [
            f"{name}, {line}"
            for name, step, own, (_, row) in zip("AB", steps, titles, sides, strict=True)
            for line in (
                sentence(own, step.ledger, mfu_pct=number(row, "mfu_pct")),
                report.source_line(step),
            )
        ]
        name = titles[0] if titles[0] == titles[1] else "the steps"
        sections += ledger_page.sections(
            steps[0].ledger, steps[1].ledger, ("A", "B"), step=name, text=text
        )
    return Page(title="Two runs", lead=f"A: {first.name}; B: {second.name}", sections=sections)


def _profiled(path: Path) -> dict[str, tuple[Measured, Row]]:
    """Return the training steps that a run profiled, with their rows, by case."""
    run = view(path)
    rows = {row["case_id"]: row for row in run.train_rows if row["rank"] is None}
    return {
        record.case.case_id: (record, rows[record.case.case_id])
        for record in run.records
        if isinstance(record, Measured) and record.training and record.training.traces
    }


def _read(
    inputs: TraceInputs, *, shares: bool
) -> tuple[list[RankLedger], list[str], Mapping[str, str]] | None:
    """Return the ledger of each step of each rank, notes, and the first sentences of a report.

    None on ranks of a launcher that do not report.
    """
    traces = map_traces(inputs, partial(_reduce, inputs), shares=shares)
    if traces is None:
        return None
    own = {r.info.rank or 0: r.value[1] for r in traces.results}
    ranks, _, notes = waiting_times(traces, inputs)
    steps = [
        RankLedger(rank=rank, times=step, ledger=_with_waiting(ledger, step))
        for rank, times in ranks
        for step, ledger in zip(times.steps, own[rank], strict=True)
    ]
    return steps, notes, traces.lead


def _reduce(inputs: TraceInputs, trace: RankTrace) -> tuple[RankParts, tuple[Ledger, ...]]:
    own = ledgers(trace, inputs.has_step)
    return rank_parts(trace, inputs.has_step), tuple(each for _, each in own)


def _with_waiting(ledger: Ledger, step: StepTimes) -> Ledger:
    """Return the ledger with what exposed communication is, where calls are matched."""
    waiting_ns = step.exposed_waiting_ns
    if waiting_ns is None:
        return ledger
    parts = {TRANSFER: step.exposed_comm_ns - waiting_ns, WAITING: waiting_ns}
    return replace(ledger, within={**ledger.within, **parts})
