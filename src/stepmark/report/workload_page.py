"""A workload as one HTML file that needs no network: pipeline, sizes, layers, tables."""

from html import escape

from stepmark.core.workload import Workload
from stepmark.report import workload_figures, workload_text
from stepmark.report.page import document, figure_section, section
from stepmark.report.workload_pipeline import timeline
from stepmark.report.workload_text import NO_DEFAULTS, Settings

_MOST_SLOTS = 20_000


def page(workload: Workload, stage: int, defaults: Settings = NO_DEFAULTS) -> str:
    """The document; figures and tables of communication and layers are of one stage.

    defaults: as of workload_text.header.
    """
    head = workload_text.header(workload, defaults)
    said = workload_text.tables(workload, stage)
    of_stage = f" Stage {stage}." if len(workload.stages) > 1 else ""
    size_note = f"One rank, one step. Sizes as nccl-tests counts them.{of_stage}"
    layer_note = "One rank, one step. Embedding, head and optimizer are in the table below."
    parts = [
        section("Workload", f"<pre>{escape(chr(10).join(head))}</pre>"),
        _pipeline(workload),
        *(
            figure_section(title, size_note, figure)
            for title, figure in workload_figures.sizes(workload, stage)
        ),
        *(
            figure_section(title, layer_note, figure)
            for title, figure in workload_figures.layers(workload)
        ),
        section("Tables", f"<pre>{escape(chr(10).join(said[1:]))}</pre>"),
        _settings(workload),
    ]
    ranks = f"{workload.world_size} rank{'s' if workload.world_size != 1 else ''}"
    lead = f"{escape(workload.rules)}, {ranks}, one optimizer step"
    return document(f"stepmark workload {workload.name}", lead, "\n".join(parts))


def _pipeline(workload: Workload) -> str:
    if len(workload.stages) == 1:
        return ""
    found = timeline(workload, _MOST_SLOTS)
    if isinstance(found, str):
        return section("Pipeline", f"<p>{escape(found)}</p>")
    note = (
        "Units of time: a forward of a stage's chunk one, its backward two, transfers none. "
        f"Numbers are micro-batches; drag to zoom in. Idle {found.idle_percent:.1f} %."
    )
    if found.left_out:
        note += f" {found.left_out} repeats of the steady state are left out."
    figure = workload_figures.pipeline(found)
    by_stage = figure_section(
        "Computation by stage", "Of one rank and step.", workload_figures.stages(workload)
    )
    return figure_section("Pipeline", note, figure) + by_stage


def _settings(workload: Workload) -> str:
    """All of them, defaults too, and the files that the rules were read from."""
    pairs = {"source": workload.source, **workload.settings}
    cells = (
        f"<dt>{escape(name)}</dt><dd>{escape(workload_text.word(value))}</dd>"
        for name, value in pairs.items()
    )
    return section("Settings", f"<dl>{''.join(cells)}</dl>")
