"""A replay as one HTML page: the operations of its ranks over time, and its tables."""

from collections.abc import Sequence
from html import escape

from stepmark.core.prediction import Span
from stepmark.report.page import document, figure_section, section
from stepmark.report.step_timeline import timelines_of
from stepmark.report.trace_page import streams

_NOTE = (
    "The last pass in which operations were timed, by each rank's clock. --timeline writes "
    "every operation for Perfetto."
)


def page(title: str, spans: Sequence[Span], lines: Sequence[str]) -> str:
    """Return the document. spans: of the ranks, which are in the place of stages."""
    end_s = max((span.end_ns for span in spans), default=0) / 1e9
    figures = streams(timelines_of(spans, end_s), _NOTE)
    text = escape("\n".join(lines))
    parts = [
        *(figure_section(*each) for each in figures),
        section("Report", f'<pre class="table">{text}</pre>'),
    ]
    return document(f"Replay: {title}", "", "\n".join(parts))
