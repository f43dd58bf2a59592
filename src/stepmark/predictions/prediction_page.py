"""A predicted step as one HTML page: figures, ledger, timeline, sources."""

from collections.abc import Mapping
from typing import Any

from stepmark.predictions import prediction as text
from stepmark.predictions.ledger_page import picture, stages
from stepmark.tables.page import (
    Html,
    Page,
    Section,
    definitions,
    items,
    paragraph,
    preformatted,
)
from stepmark.timeline.prediction import StepPrediction
from stepmark.timeline.step_timeline import timelines_of
from stepmark.traces.trace_page import streams

_NOTE = (
    "The step of one rank per pipeline stage. Of an operation of several kinds of work, one "
    "kind is drawn after the other. --timeline writes every operation for Perfetto."
)


def page(facts: Mapping[str, Any], prediction: StepPrediction) -> Page:
    """Return the page. facts: report.prediction.document."""
    ledgers = prediction.timeline.ledgers
    timelines = timelines_of([*prediction.timeline.spans()], prediction.step_s)
    results = dict(text.headline(facts, prediction.step_s))
    warnings = []
    if facts["memory"] and facts["memory"]["verdict"] not in ("fits", "unknown"):
        warnings.append(paragraph(f"memory: {results.pop('memory')}", "warning"))
    lead = f"One optimizer step on {facts['num_ranks']} x {facts['device']}"
    if step := text.step_text(facts):
        lead += f": {step}"
    one_stage = len(ledgers) == 1
    return Page(
        title=f"Prediction: {facts['name']}",
        lead=lead,
        sections=[
            Section("Prediction", [definitions(results.items()), *warnings]),
            picture(ledgers, ("predicted",), "the step") if one_stage else stages(ledgers),
            *streams(timelines, _NOTE, "stage"),
            Section("Sources and notes", _sources(facts)),
            Section("Lines", [preformatted(*text.ledger_lines(prediction), is_table=True)]),
        ],
    )


def _sources(facts: Mapping[str, Any]) -> list[Html]:
    """Return where costs are from, and the notes."""
    total = sum(facts["sources_s"].values())
    shares = {name: time_s / total for name, time_s in facts["sources_s"].items() if time_s}
    pairs = [
        ("calibration", facts["calibration"] or "none"),
        ("compute time", ", ".join(f"{share:.1%} {name}" for name, share in shares.items())),
    ]
    notes = [items(facts["notes"])] if facts["notes"] else []
    return [definitions(pairs), *notes]
