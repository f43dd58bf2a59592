"""A predicted step as one HTML page: figures, ledger, timeline, sources."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from operator import attrgetter
from typing import Any

from stepmark.core.prediction import Span, StepPrediction
from stepmark.core.trace_timeline import Bar, Timeline
from stepmark.report import prediction as text
from stepmark.report.ledger_page import stages, waterfalls
from stepmark.report.page import definitions, document, figure_section, section
from stepmark.report.trace_page import MOST_BARS, MOST_RANKS, streams

_FIRST_PARTS = 20_000  # of the step: what is joined at first
_NOTE = (
    "The step of one rank per pipeline stage. Of an operation of several kinds of work, one "
    "kind is drawn after the other. --timeline writes every operation for Perfetto."
)


def page(facts: Mapping[str, Any], prediction: StepPrediction) -> str:
    """Return the document. facts: report.prediction.document."""
    ledgers = prediction.timeline.ledgers
    ledger = stages(ledgers) if len(ledgers) > 1 else waterfalls(ledgers, ("predicted",))
    timelines = timelines_of([*prediction.timeline.spans()], prediction.step_s)
    results = dict(text.headline(facts, prediction.step_s))
    lines, warning = "\n".join(text.ledger_lines(prediction)), ""
    if facts["memory"] and facts["memory"]["verdict"] not in ("fits", "unknown"):
        warning = f'<p class="warning">memory: {escape(results.pop("memory"))}</p>'
    parts = [
        section("Prediction", definitions(results.items()) + warning),
        figure_section(*ledger),
        *(figure_section(*each) for each in streams(timelines, _NOTE, "stage")),
        section("Sources and notes", _sources(facts)),
        section("Lines", f'<pre class="table">{escape(lines)}</pre>'),
    ]
    lead = f"One optimizer step on {facts['num_ranks']} x {facts['device']}"
    if step := text.step_text(facts):
        lead += f": {step}"
    return document(f"Prediction: {facts['name']}", escape(lead), "\n".join(parts))


def _sources(facts: Mapping[str, Any]) -> str:
    """Return where costs are from, and the notes."""
    total = sum(facts["sources_s"].values())
    shares = {name: time_s / total for name, time_s in facts["sources_s"].items() if time_s}
    pairs = [
        ("calibration", facts["calibration"] or "none"),
        ("compute time", ", ".join(f"{share:.1%} {name}" for name, share in shares.items())),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts["notes"])
    return definitions(pairs) + (f"<ul>{notes}</ul>" if notes else "")


def timelines_of(spans: Sequence[Span], step_s: float) -> dict[int, Timeline]:
    """Return a timeline per stage, of few enough bars to draw."""
    end = round(step_s * 1e9)
    by_stage: dict[int, dict[str, list[Span]]] = {}
    for span in sorted(spans, key=attrgetter("start_ns")):
        by_stage.setdefault(span.stage, {}).setdefault(span.stream, []).append(span)
    most = MOST_BARS // min(len(by_stage), MOST_RANKS) if by_stage else 0
    timelines = {}
    for stage, by_stream in sorted(by_stage.items()):
        joined, parts = 0, [[span] for own in by_stream.values() for span in own]
        while len(parts) > most:
            joined = 2 * joined or end // _FIRST_PARTS + 1
            parts = [part for own in by_stream.values() for part in _joined(own, joined)]
        bars = tuple(map(_bar, parts))
        timelines[stage] = Timeline(step=None, start=0, end=end, joined_ns=joined, bars=bars)
    return timelines


def _joined(spans: Sequence[Span], joined_ns: int) -> Iterator[list[Span]]:
    """Yield spans that are one bar: pauses between them are at most this long, and they are
    of one kind or shorter.
    """
    part: list[Span] = []
    for span in spans:
        if part and (
            span.start_ns - part[-1].end_ns > joined_ns
            or (span.kind != part[-1].kind and max(map(_ns, (span, part[-1]))) > joined_ns)
        ):
            yield part
            part = []
        part.append(span)
    yield part


def _bar(part: Sequence[Span]) -> Bar:
    times: dict[str, int] = {}
    for span in part:
        times[span.kind] = times.get(span.kind, 0) + _ns(span)
    longest = max(part, key=_ns)
    where = {"layer": longest.layer, "micro-batch": longest.microbatch}
    words = [longest.name, longest.module * (longest.module != longest.name), longest.phase]
    words += [f"{name} {value}" for name, value in where.items() if value is not None]
    return Bar(
        stream=longest.stream,
        start=part[0].start_ns,
        end=part[-1].end_ns,
        group=max(times, key=times.__getitem__),
        name=", ".join(filter(None, words)),
        num_events=len(part),
        busy=sum(times.values()),
    )


def _ns(span: Span) -> int:
    return span.end_ns - span.start_ns
