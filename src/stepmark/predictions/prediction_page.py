"""A predicted step as one HTML page: figures, ledger, timeline, sources."""

from collections.abc import Mapping
from html import escape
from typing import Any

from stepmark.predictions import prediction as text
from stepmark.predictions.ledger_page import picture, stages
from stepmark.tables.page import definitions, document, figure_section, section
from stepmark.timeline.prediction import StepPrediction
from stepmark.timeline.step_timeline import timelines_of
from stepmark.traces.trace_page import streams

_NOTE = (
    "The step of one rank per pipeline stage. Of an operation of several kinds of work, one "
    "kind is drawn after the other. --timeline writes every operation for Perfetto."
)


def page(facts: Mapping[str, Any], prediction: StepPrediction) -> str:
    """Return the document. facts: report.prediction.document."""
    ledgers = prediction.timeline.ledgers
    if len(ledgers) > 1:
        ledger = figure_section(*stages(ledgers))
    else:
        ledger = picture(ledgers, ("predicted",), "the step")
    timelines = timelines_of([*prediction.timeline.spans()], prediction.step_s)
    results = dict(text.headline(facts, prediction.step_s))
    lines, warning = "\n".join(text.ledger_lines(prediction)), ""
    if facts["memory"] and facts["memory"]["verdict"] not in ("fits", "unknown"):
        warning = f'<p class="warning">memory: {escape(results.pop("memory"))}</p>'
    parts = [
        section("Prediction", definitions(results.items()) + warning),
        ledger,
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
