"""A workload as one HTML file that needs no network: pipeline, sizes, layers, tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepmark.findings import histogram_figures
from stepmark.findings.histogram import rows as histogram_rows
from stepmark.ground.units import GIB, TFLOP
from stepmark.step.workload import Workload
from stepmark.tables.columns import number
from stepmark.tables.figures import COLOURS, SHADES, Axis, Figure, Kind, Series, shade
from stepmark.tables.page import Page, Section, definitions, paragraph, preformatted
from stepmark.timeline.timeline import Span
from stepmark.workloads import workload_text
from stepmark.workloads.workload_pipeline import Chart, chart_of
from stepmark.workloads.workload_tables import alike_layers, histogram, stage_rows
from stepmark.workloads.workload_text import NO_DEFAULTS, Settings

_KINDS = ("forward", "backward", "optimizer")
_PASSES = ("forward", "backward")
_MOST_SPANS = 20_000
_MOST_TICKS = 40  # of bars, each with its number


def pipeline(chart: Chart) -> Figure:
    """Return stages over time, a bar per forward and backward, lighter from chunk to chunk."""
    spans = list(chart.timeline)
    chunk_of = _chunks(spans)
    most = max(chunk_of.values(), default=0)

    def chunk(span: Span) -> int:
        return chunk_of.get((span.rank, span.layer), 0)

    # By chunk: the legend has the first one's shade.
    by_kind = {
        kind: sorted((span for span in spans if span.kind == kind), key=chunk)
        for kind in _KINDS
    }
    note = (
        "Units of time: a forward of a stage's chunk one, its backward two, transfers none. "
        f"Numbers are micro-batches; drag to zoom in. Idle {chart.idle_percent:.1f} %."
    )
    if chart.left_out:
        note += f" {chart.left_out} repeats of the steady state are left out."
    return Figure(
        title="Pipeline",
        note=note,
        x=Axis(title="time in units", limits=(0, chart.end)),
        y=Axis(categories=[f"stage {stage}" for stage in range(chart.num_stages)]),
        series=[
            Series(
                kind=Kind.BARS,
                name=kind,
                y=[f"stage {span.rank}" for span in own],
                starts=[span.start_ns for span in own],
                x=[span.time_ns for span in own],
                colour=[_shade(colour, chunk(span), most) for span in own],
                labels=["" if s.microbatch is None else str(s.microbatch) for s in own],
                hover=[_hover(span) for span in own],
            )
            for colour, (kind, own) in zip(COLOURS, by_kind.items(), strict=False)
            if own
        ],
        height=130 + 28 * chart.num_stages,
    )


def _chunks(spans: Iterable[Span]) -> dict[tuple[int, int | None], int]:
    """Return the number of each chunk, by its stage and first layer."""
    layers: dict[int, set[int]] = {}
    for span in spans:
        if span.layer is not None:
            layers.setdefault(span.rank, set()).add(span.layer)
    return {
        (stage, layer): index
        for stage, numbers in layers.items()
        for index, layer in enumerate(sorted(numbers))
    }


def _shade(colour: str, chunk: int, most: int) -> str:
    """Return the shade of a chunk, the darkest of chunk 0 where there are several."""
    dark, light = SHADES
    return shade(colour, dark + (light - dark) * chunk / most) if most else colour


def _hover(span: Span) -> str:
    words = [f"stage {span.rank} {span.kind}"]
    words += [] if span.microbatch is None else [f"micro-batch {span.microbatch}"]
    words += [] if span.layer is None else [f"from layer {span.layer}"]
    return ", ".join(words)


def sizes(workload: Workload, stage: int) -> list[Figure]:
    """Return calls and bytes of a step by message size; none without communication."""
    counted = histogram(workload, stage)
    if not counted:
        return []
    rows = [
        row | {"gib": (number(row, "bytes_per_rank") or 0) / GIB}
        for row in histogram_rows(counted, by=("collective", "group"))
    ]
    note = "One rank, one step. Sizes as nccl-tests counts them."
    if len(workload.stages) > 1:
        note += f" Stage {stage}."
    per = "rank and step"
    return [
        histogram_figures.bars(
            rows, "calls_per_rank", title="Calls", unit="calls", note=note, per=per
        ),
        histogram_figures.bars(rows, "gib", title="Bytes", unit="GiB", note=note, per=per),
    ]


def layers(workload: Workload) -> Iterator[Figure]:
    """Yield computation and messages of each layer, where layers differ."""
    sums_of = {
        layer: sums
        for stage in range(len(workload.stages))
        for alike, sums in alike_layers(workload, stage)
        for layer in alike
        if layer is not None
    }
    numbers = sorted(sums_of)
    for title, what, unit, axis in (
        ("Computation", "flops", TFLOP, "TFLOP"),
        ("Messages", "comm_bytes", GIB, "GiB of messages"),
    ):
        by_pass = {
            when: [sums_of[layer][when, what] / unit for layer in numbers] for when in _PASSES
        }
        if len(set(zip(*by_pass.values(), strict=True))) > 1:
            note = "One rank, one step. Embedding, head and optimizer are in the table below."
            yield _bars(f"{title} by layer", note, numbers, by_pass, ("layer", axis))


def stages(workload: Workload) -> Figure:
    """Return computation of one rank and step by pipeline stage."""
    rows = stage_rows(workload)
    by_pass = {
        when: [(number(row, f"{when}_flops") or 0) / TFLOP for row in rows] for when in _PASSES
    }
    title = "Computation by stage"
    note = "Of one rank and step."
    return _bars(title, note, range(len(rows)), by_pass, ("stage", "TFLOP"))


def _bars(
    title: str,
    note: str,
    numbers: Sequence[int],
    by_pass: Mapping[str, Sequence[float]],
    axes: tuple[str, str],
) -> Figure:
    """Return a bar per number, its passes stacked. axes: what numbers and values are."""
    ticks = {n: str(n) for n in numbers} if len(numbers) <= _MOST_TICKS else {}
    return Figure(
        title=title,
        note=note,
        x=Axis(title=axes[0], ticks=ticks),
        y=Axis(title=axes[1], has_zero=True),
        series=[
            Series(kind=Kind.BARS, name=when, x=numbers, y=values)
            for when, values in by_pass.items()
        ],
        height=300,
    )


def page(workload: Workload, stage: int, defaults: Settings = NO_DEFAULTS) -> Page:
    """Return the page; figures and tables of communication and layers are of one stage.

    `defaults` are those of workload_text.header.
    """
    ranks = f"{workload.world_size} rank{'s' if workload.world_size != 1 else ''}"
    tables = workload_text.tables(workload, stage)
    # All settings, defaults too, and the files that the rules were read from.
    settings = {"source": workload.source, **workload.settings}
    pairs = [(name, workload_text.word(value)) for name, value in settings.items()]
    return Page(
        title=f"stepmark workload {workload.name}",
        lead=f"{workload.rules}, {ranks}, one optimizer step",
        sections=[
            Section("Workload", [preformatted(*workload_text.header(workload, defaults))]),
            *_pipeline(workload),
            *sizes(workload, stage),
            *layers(workload),
            Section("Tables", [preformatted(*tables[1:], is_table=True)]),
            Section("Settings", [definitions(pairs)]),
        ],
    )


def _pipeline(workload: Workload) -> list[Section | Figure]:
    if len(workload.stages) == 1:
        return []
    chart = chart_of(workload, _MOST_SPANS)
    if isinstance(chart, str):
        return [Section("Pipeline", [paragraph(chart)])]
    return [pipeline(chart), stages(workload)]
