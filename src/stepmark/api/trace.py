"""Read profiler traces."""

import os
from statistics import fmean
from typing import Any

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.ledger import to_plotly
from stepmark.api.run import Run
from stepmark.findings import histogram
from stepmark.ground.errors import StepmarkError
from stepmark.tables.columns import number
from stepmark.tables.table import Table
from stepmark.traces import trace_page
from stepmark.traces.trace import StepTimes, step_times
from stepmark.traces.trace_breakdown import STEP_COLUMNS
from stepmark.traces.trace_messages_text import slow_rank
from stepmark.traces.trace_options import BreakdownOptions


class Trace(Table):
    """A trace: a row per rank and step with where its time went, in nanoseconds.

    step_s, exposed_comm_s, idle_s: seconds of a step, of its communication that nothing hides,
    and without work on the GPU, each the mean over ranks and steps; None without steps. tables:
    all tables of `stepmark trace breakdown --json`, by name. missing_ranks: those of whose
    traces none was read. ledger: the parts of a step, means in nanoseconds that add up to it.
    messages: their counts by size. slow_rank: the rank that arrives last in most collectives;
    None where there is none, or where fewer than two ranks were matched.
    """

    def __init__(self, times: StepTimes) -> None:
        """Keep what was read."""
        by_name = times.tables
        super().__init__(by_name["steps"], STEP_COLUMNS)
        columns = {"steps": STEP_COLUMNS}
        self.tables = {n: Table(rows, columns.get(n, ())) for n, rows in by_name.items()}
        self.world_size = times.traces.world_size
        self.missing_ranks = times.traces.missing
        self.notes = times.notes
        self.step_s = self._mean_s("window_ns")
        self.exposed_comm_s = self._mean_s("exposed_comm_ns")
        self.idle_s = self._mean_s("idle_ns")
        self.ledger = Table(trace_page.ledger(self.rows()))
        of_messages = histogram.rows(times.messages.histogram, num_ranks_seen=len(times.ranks))
        self.messages = Table(of_messages)
        self.slow_rank = slow_rank(
            {row["rank"]: int(number(row, "num_last") or 0) for row in by_name["arrivals"]}
        )
        self._times = times

    def _mean_s(self, name: str) -> float | None:
        """Return the mean of a column of nanoseconds, in seconds."""
        values = [number(row, name) for row in self.rows()]
        known = [value for value in values if value is not None]
        return fmean(known) * 1e-9 if known else None

    def plot(self) -> Any:
        """Return a plotly figure: the parts of a step, by rank, or by step of one rank."""
        for figure in trace_page.steps(self.rows()):
            return to_plotly(figure)
        raise StepmarkError("the trace has no steps to plot.")

    def show(self, *, details: bool = False) -> None:
        """Print what `stepmark trace breakdown` prints. details: launch calls and copies."""
        first = filter(None, self._times.traces.lead.values())
        print("\n".join([*first, *self._times.lines(details=details)]))  # noqa: T201


@spells_keywords
def read_trace(*files: str | os.PathLike[str] | Run, **options: object) -> Trace:
    """Read the traces of one job: files, folders, patterns, or a run that profiled a step.

    options: those of `stepmark trace breakdown`, e.g. ranks="0,1", steps="5-7";
    `options("trace")` lists them. Raises ConfigError for files that are no traces.
    """
    times = step_times(read(BreakdownOptions, files, options))
    if times is None:
        raise StepmarkError("read_trace works on the first rank of a launcher only.")
    return Trace(times)
