"""A predicted step as one HTML page: figures, ledger, timeline, sources."""

from collections.abc import Mapping
from typing import Any

from stepmark.predictions import prediction_text as text
from stepmark.predictions.ledger_page import picture, stages
from stepmark.predictions.simulation import SteadyStep
from stepmark.tables.page import (
    Html,
    Page,
    Section,
    definitions,
    items,
    paragraph,
    preformatted,
)
from stepmark.timeline.bars import bars
from stepmark.traces.trace_page import streams

_NOTE = (
    "The step of one rank per pipeline stage. Of an operation of several kinds of work, one "
    "kind is drawn after the other. --timeline writes every operation for Perfetto."
)


def page(document: Mapping[str, Any], step: SteadyStep) -> Page:
    """Return the page of a prediction. document: of Prediction."""
    ledgers = step.ledgers
    results = dict(text.headline(document))
    warnings = []
    if document["memory"] and document["memory"]["verdict"] not in ("fits", "unknown"):
        warnings.append(paragraph(f"memory: {results.pop('memory')}", "warning"))
    lead = f"One optimizer step on {document['num_ranks']} x {document['device']}"
    if shape := text.step_text(document):
        lead += f": {shape}"
    one_stage = len(ledgers) == 1
    return Page(
        title=f"Prediction: {document['name']}",
        lead=lead,
        sections=[
            Section("Prediction", [definitions(results.items()), *warnings]),
            picture(ledgers, ("predicted",), "the step") if one_stage else stages(ledgers),
            *streams(bars(step.timeline()), _NOTE, "stage"),
            Section("Sources and notes", _sources(document)),
            Section("Lines", [preformatted(*text.ledger_lines(document), is_table=True)]),
        ],
    )


def _sources(document: Mapping[str, Any]) -> list[Html]:
    """Return where costs are from, and the notes."""
    total = sum(document["sources_s"].values())
    shares = {name: time_s / total for name, time_s in document["sources_s"].items() if time_s}
    pairs = [
        ("calibration", document["calibration"] or "none"),
        ("compute time", ", ".join(f"{share:.1%} {name}" for name, share in shares.items())),
    ]
    notes = [items(document["notes"])] if document["notes"] else []
    return [definitions(pairs), *notes]
