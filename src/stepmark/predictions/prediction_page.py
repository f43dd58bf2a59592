"""A predicted step as one HTML page: figures, ledger, timeline, sources."""

from collections.abc import Mapping
from typing import Any

from stepmark.predictions import measured_step
from stepmark.predictions import prediction_text as text
from stepmark.predictions.ledger_page import picture, stages
from stepmark.predictions.prediction import Prediction
from stepmark.tables.page import (
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


def page(prediction: Prediction, document: Mapping[str, Any]) -> Page:
    """Return the page of a prediction. document: of the prediction."""
    step = prediction.step
    ledgers = step.ledgers
    results = dict(text.headline(document))
    warnings = []
    if document["memory"] and document["memory"]["verdict"] not in ("fits", "unknown"):
        warnings.append(paragraph(f"memory: {results.pop('memory')}", "warning"))
    lead = f"One optimizer step on {document['num_ranks']} x {document['device']}"
    if shape := text.step_text(document):
        lead += f": {shape}"
    one_stage = len(ledgers) == 1
    sources = {"calibration": document["calibration"] or "none"}  # others are notes
    table = list(text.memory_lines(document))
    memory = [Section("Memory of a rank", [preformatted(*table, is_table=True)])]
    notes = [items(document["notes"])] if document["notes"] else []
    measured = []
    if document["measured"]:
        lines = preformatted(*measured_step.lines(document["measured"]), is_table=True)
        measured = [Section("Measured step", [lines])]
    return Page(
        title=f"Prediction: {document['name']}",
        headline=text.answer(prediction, document),
        lead=lead,
        sections=[
            Section("Prediction", [definitions(results.items()), *warnings]),
            *measured,
            picture(ledgers, ("predicted",), "the step") if one_stage else stages(ledgers),
            *streams(bars(step.timeline()), _NOTE, "stage"),
            *(memory if table else ()),
            Section("Sources and notes", [definitions(sources.items()), *notes]),
            Section("Lines", [preformatted(*text.ledger_lines(document), is_table=True)]),
        ],
    )
