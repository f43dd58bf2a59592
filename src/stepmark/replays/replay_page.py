"""A replay as HTML: the operations of its ranks over time, and its tables."""

from html import escape

from stepmark.replays.replay_log_text import ReplayLog
from stepmark.tables.page import document, figure_section, section
from stepmark.timeline.step_timeline import timelines_of
from stepmark.traces.trace_page import streams

_NOTE = (
    "The last pass in which operations were timed, by each rank's clock. --timeline writes "
    "every operation for Perfetto."
)


def page(file: str, log: ReplayLog) -> str:
    """Return the document. file: of the workload."""
    return document(f"Replay: {file}", "", sections(file, log))


def sections(file: str, log: ReplayLog) -> str:
    """Return the sections of a replay for the page of its run."""
    spans = log.timeline()
    end_s = max((span.end_ns for span in spans), default=0) / 1e9
    figures = (
        (f"{title} of {escape(file)}", note, figure)
        for title, note, figure in streams(timelines_of(spans, end_s), _NOTE)
    )
    text = escape("\n".join(log.lines()))
    parts = [
        *(figure_section(*each) for each in figures),
        section(f"Replay of {escape(file)}", f'<pre class="table">{text}</pre>'),
    ]
    return "\n".join(parts)
