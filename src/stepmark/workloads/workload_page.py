"""A workload as one HTML file that needs no network: pipeline, sizes, layers, tables."""

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.graph_objects import Figure

from stepmark.findings import histogram_figures
from stepmark.findings.histogram import rows as histogram_rows
from stepmark.ground.units import GIB, TFLOP
from stepmark.step.workload import Workload
from stepmark.tables.columns import Row, number
from stepmark.tables.figures import COLOURS, styled
from stepmark.tables.page import definitions, document, figure_section, section
from stepmark.workloads import workload_text
from stepmark.workloads.workload_lanes import Slot
from stepmark.workloads.workload_pipeline import Timeline, timeline
from stepmark.workloads.workload_tables import alike_layers, histogram, stage_rows
from stepmark.workloads.workload_text import NO_DEFAULTS, Settings

_KINDS = ("forward", "backward", "optimizer")
_PASSES = ("forward", "backward")
_MOST_EDGED = 400  # slots; edges of more would hide their colours
_PALE = 3  # from this chunk on, dark letters read better than white ones


def pipeline(chart: Timeline) -> Figure:
    """Draw stages over time, a bar per forward and backward, lighter from chunk to chunk."""
    chunk_of = _chunks(chart.slots)
    is_edged = len(chart.slots) <= _MOST_EDGED
    figure = go.Figure()
    for kind, colour in zip(_KINDS, COLOURS, strict=False):
        # The legend has the first one's shade.
        shades = sorted(
            (chunk_of.get((slot.stage, slot.layer), 0), place)
            for place, slot in enumerate(chart.slots)
            if slot.kind == kind
        )
        if not shades:
            continue
        own = [chart.slots[place] for _, place in shades]
        figure.add_bar(
            orientation="h",
            y=[f"stage {slot.stage}" for slot in own],
            base=[slot.start for slot in own],
            x=[slot.end - slot.start for slot in own],
            name=kind,
            marker={
                "color": [_lighter(colour, chunk) for chunk, _ in shades],
                "line": {"width": 0.5 if is_edged else 0, "color": "rgba(255,255,255,0.6)"},
            },
            text=["" if slot.microbatch is None else str(slot.microbatch) for slot in own],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={
                "size": 11,
                "color": ["white" if chunk < _PALE else "#222222" for chunk, _ in shades],
            },
            hovertext=[_hover(slot) for slot in own],
            hoverinfo="text",
            offset=-0.45,
            width=0.9,
        )
    names = [f"stage {stage}" for stage in range(chart.num_stages)]
    order = {"categoryorder": "array", "categoryarray": names}
    figure.update_yaxes(autorange="reversed", type="category", **order, showgrid=False)
    figure.update_xaxes(title="time in units", range=[0, chart.end])
    figure.update_layout(barmode="overlay")
    styled(figure, height=130 + 28 * chart.num_stages)
    return figure.update_layout(uniformtext={"mode": "hide", "minsize": 8})


def _chunks(slots: Iterable[Slot]) -> dict[tuple[int, int | None], int]:
    """Return the number of each chunk, by its stage and first layer."""
    layers: dict[int, set[int]] = {}
    for slot in slots:
        if slot.layer is not None:
            layers.setdefault(slot.stage, set()).add(slot.layer)
    return {
        (stage, layer): index
        for stage, numbers in layers.items()
        for index, layer in enumerate(sorted(numbers))
    }


def _lighter(colour: str, steps: int) -> str:
    """Mix a colour with white, so that neighbouring chunks differ."""
    share = 1 - 0.85**steps
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _hover(slot: Slot) -> str:
    words = [f"stage {slot.stage} {slot.kind}"]
    words += [] if slot.microbatch is None else [f"micro-batch {slot.microbatch}"]
    words += [] if slot.layer is None else [f"from layer {slot.layer}"]
    return ", ".join(words)


def sizes(workload: Workload, stage: int) -> list[tuple[str, Figure]]:
    """Draw calls and bytes of a step by message size; none without communication."""
    counted = histogram(workload, stage)
    if not counted:
        return []
    rows = [
        row | {"gib": (number(row, "bytes_per_rank") or 0) / GIB}
        for row in histogram_rows(counted, by=("collective", "group"))
    ]
    return [
        ("Calls by message size", histogram_figures.bars(rows, "calls_per_rank", "calls")),
        ("Bytes by message size", histogram_figures.bars(rows, "gib", "GiB")),
    ]


def layers(workload: Workload) -> list[tuple[str, Figure]]:
    """Draw computation and messages of each layer, where layers differ."""
    sums_of = {
        layer: sums
        for stage in range(len(workload.stages))
        for alike, sums in alike_layers(workload, stage)
        for layer in alike
        if layer is not None
    }
    figures = []
    for title, what, unit, of in (
        ("Computation by layer", "flops", TFLOP, "TFLOP"),
        ("Messages by layer", "comm_bytes", GIB, "GiB of messages"),
    ):
        rows: list[Row] = []
        for layer in sorted(sums_of):
            row: Row = {when: sums_of[layer][when, what] for when in _PASSES}
            rows.append(row | {"layer": layer})
        if len({tuple(row[when] for when in _PASSES) for row in rows}) > 1:
            figures.append((title, _bars(rows, _PASSES, unit, of, "layer")))
    return figures


def stages(workload: Workload) -> Figure:
    """Draw computation of one rank and step by pipeline stage."""
    rows = stage_rows(workload)
    return _bars(rows, ("forward_flops", "backward_flops"), TFLOP, "TFLOP", "stage")


def _bars(rows: Sequence[Row], keys: Sequence[str], unit: float, title: str, by: str) -> Figure:
    figure = go.Figure()
    for index, key in enumerate(keys):
        figure.add_bar(
            x=[number(row, by) for row in rows],
            y=[(number(row, key) or 0) / unit for row in rows],
            name=key.split("_")[0],
            marker_color=COLOURS[index],
        )
    figure.update_xaxes(title=by, dtick=1 if len(rows) <= 40 else None)
    figure.update_yaxes(title=title, rangemode="tozero")
    figure.update_layout(barmode="stack")
    return styled(figure, height=300)


_MOST_SLOTS = 20_000


def page(workload: Workload, stage: int, defaults: Settings = NO_DEFAULTS) -> str:
    """Return the document; figures and tables of communication and layers are of one stage.

    `defaults` are those of workload_text.header.
    """
    head = workload_text.header(workload, defaults)
    tables = workload_text.tables(workload, stage)
    of_stage = f" Stage {stage}." if len(workload.stages) > 1 else ""
    size_note = f"One rank, one step. Sizes as nccl-tests counts them.{of_stage}"
    layer_note = "One rank, one step. Embedding, head and optimizer are in the table below."
    parts = [
        section("Workload", f"<pre>{escape(chr(10).join(head))}</pre>"),
        _pipeline(workload),
        *(figure_section(title, size_note, figure) for title, figure in sizes(workload, stage)),
        *(figure_section(title, layer_note, figure) for title, figure in layers(workload)),
        section("Tables", f"<pre>{escape(chr(10).join(tables[1:]))}</pre>"),
        _settings(workload),
    ]
    ranks = f"{workload.world_size} rank{'s' if workload.world_size != 1 else ''}"
    lead = f"{escape(workload.rules)}, {ranks}, one optimizer step"
    return document(f"stepmark workload {workload.name}", lead, "\n".join(parts))


def _pipeline(workload: Workload) -> str:
    if len(workload.stages) == 1:
        return ""
    chart = timeline(workload, _MOST_SLOTS)
    if isinstance(chart, str):
        return section("Pipeline", f"<p>{escape(chart)}</p>")
    note = (
        "Units of time: a forward of a stage's chunk one, its backward two, transfers none. "
        f"Numbers are micro-batches; drag to zoom in. Idle {chart.idle_percent:.1f} %."
    )
    if chart.left_out:
        note += f" {chart.left_out} repeats of the steady state are left out."
    figure = pipeline(chart)
    by_stage = figure_section("Computation by stage", "Of one rank and step.", stages(workload))
    return figure_section("Pipeline", note, figure) + by_stage


def _settings(workload: Workload) -> str:
    """Return all settings, defaults too, and the files that the rules were read from."""
    settings = {"source": workload.source, **workload.settings}
    pairs = ((name, workload_text.word(value)) for name, value in settings.items())
    return section("Settings", definitions(pairs))
