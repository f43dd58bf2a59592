"""stepmark trace critical-path: what a step waited for, from its end back to its start."""

from functools import partial

from stepmark.ground.errors import ConfigError
from stepmark.traces import trace_path_text as report
from stepmark.traces.kineto.critical_path import critical_path
from stepmark.traces.kineto.step_work import StepWork, step_work
from stepmark.traces.trace_files import deliver, map_traces, without_pauses
from stepmark.traces.trace_options import CriticalPathOptions


def run(options: CriticalPathOptions) -> int:
    """Print and write the path of each chosen step."""
    options.check_stdout()
    options = without_pauses(options)
    traces = map_traces(options, partial(step_work, options))
    if traces is None:
        return 0
    steps: dict[int | None, dict[int, StepWork]] = {}
    for result in traces.results:
        for work in result.value:
            steps.setdefault(work.step, {})[result.info.rank or 0] = work
    if not steps:
        value = ", ".join(options.files)
        allowed = "traces with GPU events: without any, trace breakdown shows the host"
        raise ConfigError("trace", value, f"{allowed}{traces.cut_reason}")
    if traces.lead["disjoint"]:
        why = traces.lead["disjoint"].rstrip(".")
        allowed = f"traces of one job, over whose ranks the path goes ({why})"
        raise ConfigError("trace", ", ".join(options.files), allowed)
    if options.steps is None:  # the middle steps of the ranks may differ
        step = max(steps, key=lambda step: len(steps[step]))
        steps = {step: steps[step]}
    paths = [critical_path(steps[step]) for step in sorted(steps, key=lambda step: step or 0)]
    tables = report.tables(paths)
    document = {"notes": traces.notes, "definitions": report.DEFINITIONS, **tables}
    lines = [*report.lines(paths), *(f"note: {note}" for note in traces.notes)]
    deliver(options, "critical-path", document, tables, lines, traces.lead)
    return 0
