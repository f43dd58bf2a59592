"""A replay as HTML: the operations of its ranks over time, and its tables."""

from collections.abc import Iterator
from dataclasses import replace

from stepmark.replays.replay_log_text import ReplayLog
from stepmark.tables.figures import Figure
from stepmark.tables.page import Page, Section, preformatted
from stepmark.timeline.bars import bars
from stepmark.traces.trace_page import streams

_NOTE = (
    "The last pass in which operations were timed, by each rank's clock. --timeline writes "
    "every operation for Perfetto."
)


def page(file: str, log: ReplayLog) -> Page:
    """Return the page. file: of the workload."""
    return Page(title=f"Replay: {file}", sections=list(sections(file, log)))


def sections(file: str, log: ReplayLog) -> Iterator[Section | Figure]:
    """Yield the sections of a replay, also for the page of its run."""
    for figure in streams(bars(log.timeline()), _NOTE):
        yield replace(figure, title=f"{figure.title} of {file}")
    yield Section(f"Replay of {file}", [preformatted(*log.lines(), is_table=True)])
