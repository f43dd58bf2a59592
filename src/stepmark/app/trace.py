"""stepmark trace breakdown: where the time of each step went."""

import sys

from stepmark.app.trace_files import map_traces
from stepmark.core.trace_columns import RankTrace
from stepmark.core.trace_options import BreakdownOptions


def breakdown(options: BreakdownOptions) -> int:
    """Print and write the breakdown."""
    options.check_stdout()
    traces = map_traces(options, _reduce)
    if traces is None:
        return 0
    for result in traces.results:
        sys.stdout.write(f"rank {result.info.rank}: {result.value} GPU events\n")
    for note in traces.notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def _reduce(trace: RankTrace) -> int:
    return trace.gpu.start.size
