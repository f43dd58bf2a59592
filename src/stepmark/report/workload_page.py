"""A workload as one HTML file that needs no network: pipeline, sizes, layers, tables."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from stepmark.core.units import TFLOP
from stepmark.core.workload import Workload
from stepmark.report import histogram_figures, workload_pipeline, workload_text
from stepmark.report.figures import COLOURS, styled
from stepmark.report.histogram import rows as histogram_rows
from stepmark.report.page import document, figure_section, section
from stepmark.report.tables import Row, number, text
from stepmark.report.workload_pipeline import Slot
from stepmark.report.workload_tables import histogram, layer_rows, stage_rows

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_KINDS = ("idle", "forward", "backward", "optimizer")
_MOST_UNITS = 20_000


def page(workload: Workload, stage: int) -> str:
    """The document; figures and tables of communication and layers are of one stage."""
    said = workload_text.lines(workload, stage)
    head = workload_text.header(workload)
    parts = [
        section("Workload", f"<pre>{escape(chr(10).join(head))}</pre>"),
        _pipeline_section(workload),
        *_size_sections(workload, stage),
        *_layer_sections(workload, stage),
        section("Tables", f"<pre>{escape(chr(10).join(said[len(head) :]))}</pre>"),
    ]
    lead = f"{escape(workload.rules)}, {workload.world_size} ranks, one optimizer step"
    return document(f"stepmark workload {workload.name}", lead, "\n".join(parts))


def _pipeline_section(workload: Workload) -> str:
    if len(workload.stages) == 1:
        return ""
    if workload_pipeline.num_pieces(workload) > workload_pipeline.MOST_PIECES:
        return section("Pipeline", "<p>Too many micro-batches and stages to draw.</p>")
    found = workload_pipeline.slots(workload)
    if not found:
        return section(
            "Pipeline", "<p>By their order of transfers, stages wait for each other.</p>"
        )
    idle = workload_pipeline.idle_percent(found, len(workload.stages))
    note = (
        "Units of time: a forward of a stage's chunk one, its backward two, transfers none. "
        f"Idle {idle:.1f} %."
    )
    if workload_pipeline.shortened(workload) is not workload:
        note += " Repeats of the steady state are left out."
    return figure_section("Pipeline", note, pipeline_figure(found, len(workload.stages)))


def pipeline_figure(found: Sequence[Slot], num_stages: int) -> "Figure":
    """Stages by time; a cell says which micro-batch and which first layer."""
    import plotly.graph_objects as go  # noqa: PLC0415

    end = min(max(slot.end for slot in found), _MOST_UNITS)
    kinds = [[0] * end for _ in range(num_stages)]
    said = [["idle"] * end for _ in range(num_stages)]
    shown = [[""] * end for _ in range(num_stages)]
    for slot in found:
        for unit in range(slot.start, min(slot.end, end)):
            kinds[slot.stage][unit] = _KINDS.index(slot.kind)
            said[slot.stage][unit] = _hover(slot)
        if slot.start < end and slot.microbatch is not None:
            shown[slot.stage][slot.start] = str(slot.microbatch)
    colours = ("rgba(128,128,128,0.12)", COLOURS[0], COLOURS[1], COLOURS[2])
    steps = [(index / 4, colour) for index, colour in enumerate(colours)]
    scale = [[edge, colour] for at, colour in steps for edge in (at, at + 0.25)]
    figure = go.Figure(
        go.Heatmap(
            z=kinds,
            y=[f"stage {stage}" for stage in range(num_stages)],
            hovertext=said,
            hoverinfo="text+y",
            text=shown if end <= 240 else None,
            texttemplate="%{text}" if end <= 240 else None,
            colorscale=scale,
            zmin=-0.5,
            zmax=3.5,
            showscale=False,
            xgap=1 if end <= 600 else 0,
            ygap=2,
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(title="time in units", showgrid=False)
    return styled(figure, height=160 + 26 * num_stages)


def _hover(slot: Slot) -> str:
    words = [slot.kind]
    words += [] if slot.microbatch is None else [f"micro-batch {slot.microbatch}"]
    words += [] if slot.layer is None else [f"from layer {slot.layer}"]
    return ", ".join(words)


def _size_sections(workload: Workload, stage: int) -> list[str]:
    counted = histogram(workload, stage)
    if not counted:
        return []
    table = histogram_rows(counted, by=("collective", "group"))
    of_stage = f" Stage {stage}." if len(workload.stages) > 1 else ""
    return [
        figure_section(title, note + of_stage, figure)
        for title, note, figure in histogram_figures.drawn(table)
    ]


def _layer_sections(workload: Workload, stage: int) -> list[str]:
    rows = layer_rows(workload, stage)
    sections = []
    if any(number(row, "forward_flops") for row in rows):
        figure = _bars(rows, ("forward_flops", "backward_flops"), TFLOP, "TFLOP per layer")
        sections.append(
            figure_section("Computation by layer", "Alike layers share a bar.", figure)
        )
    if any(number(row, "forward_comm_bytes") for row in rows):
        names = ("forward_comm_bytes", "backward_comm_bytes")
        figure = _bars(rows, names, 2**20, "MiB of messages per layer")
        sections.append(
            figure_section("Communication by layer", "Alike layers share a bar.", figure)
        )
    if len(workload.stages) > 1:
        stages = stage_rows(workload)
        figure = _bars(stages, ("forward_flops", "backward_flops"), TFLOP, "TFLOP", "stage")
        sections.append(figure_section("Computation by stage", "Of one rank and step.", figure))
    return sections


def _bars(
    rows: Sequence[Row], keys: Sequence[str], unit: float, title: str, by: str = "layers"
) -> "Figure":
    import plotly.graph_objects as go  # noqa: PLC0415

    figure = go.Figure()
    for index, key in enumerate(keys):
        figure.add_bar(
            x=[text(row, by) for row in rows],
            y=[(number(row, key) or 0) / unit for row in rows],
            name=key.split("_")[0],
            marker_color=COLOURS[index],
        )
    figure.update_xaxes(title=by, type="category")
    figure.update_yaxes(title=title, rangemode="tozero")
    figure.update_layout(barmode="stack")
    return styled(figure, height=360)
