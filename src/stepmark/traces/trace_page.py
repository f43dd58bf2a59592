"""The breakdown of traces as one HTML page: timeline, steps, hidden communication, messages."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import plotly.graph_objects as go

from stepmark.findings import histogram_figures
from stepmark.ground.units import format_time
from stepmark.model.kernel_groups import COMMUNICATION, COPIES, COPY_KERNELS, OTHER
from stepmark.tables.columns import Row, number
from stepmark.tables.figures import COLOURS, Drawn, styled
from stepmark.tables.page import document, figure_section, section
from stepmark.timeline.ledger import WAITING, Work
from stepmark.timeline.prediction import LEFT_OUT
from stepmark.timeline.step_timeline import MOST_BARS, MOST_LANES
from stepmark.timeline.trace_timeline import Bar, Timeline

_MANY = 200  # bars of a stream, which may be narrower than a pixel
_MOST_STEPS = 64  # bars of steps
# Compute is blue and green, what a faster network changes is red, pauses are pale.
_RED, _BLUE, _GREEN, _GREY = COLOURS[1], COLOURS[0], COLOURS[2], "#9aa5b1"
_PALE = "#f2b8a0"
# Of groups of kernels, and of kinds of work in a predicted step.
COLOURS_OF = {
    "matrix products": _BLUE,
    Work.MATMUL: _BLUE,
    "attention": COLOURS[5],
    COMMUNICATION: _RED,
    WAITING: _PALE,
    COPIES: COLOURS[4],
    COPY_KERNELS: "#c9b1d6",
    Work.COPY: COLOURS[4],
    "optimizer": COLOURS[3],
    "norms": COLOURS[6],
    "elementwise": _GREEN,
    Work.ELEMENTWISE: _GREEN,
    "fused by compile": "#3c7d5d",
    "softmax and loss": "#a6d854",
    Work.LOSS: "#a6d854",
    "convolutions": "#264b8a",
    "indexing": "#b5835a",
    "reductions": "#7fc7af",
    OTHER: "#6b7280",
    Work.FILE: "#6b7280",
    LEFT_OUT: "#cfd6dd",
}
_PARTS = {
    "compute_ns": ("compute", _BLUE),
    "exposed_waiting_ns": ("exposed communication: waiting for other ranks", _PALE),
    "exposed_comm_ns": ("exposed communication", _RED),
    "exposed_copies_ns": ("exposed copies", COLOURS[4]),
    "host_bound_ns": ("idle: host-bound", "#5f6b7a"),
    "kernel_gap_ns": ("idle: kernel gaps", _GREY),
    "unknown_idle_ns": ("idle: unknown", "#cfd6dd"),
}


def page(
    title: str,
    tables: Mapping[str, Sequence[Row]],
    timelines: Mapping[int, Timeline],
    messages: Sequence[Row],
    lines: Sequence[str],
) -> str:
    """Return the document. tables: of the breakdown; messages: rows of a histogram."""
    drawn = [
        *streams(timelines, "Times are those of each rank's clock."),
        *_steps(tables["steps"]),
        *_hidden(tables["communication"], len(tables["steps"])),
        *histogram_figures.drawn(messages),
    ]
    report = section("Report", f"<pre>{escape(chr(10).join(lines))}</pre>")
    return document(title, "", "\n".join([*(figure_section(*each) for each in drawn), report]))


def _shown(timelines: Mapping[int, Timeline]) -> dict[int, Timeline]:
    """Return at most MOST_LANES: extremes by their time in communication, and some between."""
    ranks = sorted(
        timelines,
        key=lambda rank: sum(b.busy for b in timelines[rank].bars if b.group == COMMUNICATION),
    )
    if len(ranks) > MOST_LANES:
        places = {round(n * (len(ranks) - 1) / (MOST_LANES - 1)) for n in range(MOST_LANES)}
        ranks = [ranks[place] for place in places]
    return {rank: timelines[rank] for rank in sorted(ranks)}


def streams(
    timelines: Mapping[int, Timeline], note: str, lane: str = "rank"
) -> Iterator[Drawn]:
    """Yield the figure of streams over time. lane: what timelines are numbered by."""
    shown = _shown(timelines)
    if not shown:
        return
    first = min(each.start for each in shown.values())
    names = {
        rank: f"{lane} {rank}, " * (lane == "rank" or len(timelines) > 1) for rank in shown
    }
    lanes = [names[rank] + stream for rank, each in shown.items() for stream in _streams(each)]
    bars = [(rank, bar) for rank, each in shown.items() for bar in each.bars]
    # The longest are drawn first, so that of too many the shortest are left out.
    bars.sort(key=lambda item: item[1].start - item[1].end)
    bars, left_out = bars[:MOST_BARS], bars[MOST_BARS:]
    counts = Counter((rank, bar.stream) for rank, bar in bars)
    figure = go.Figure()
    for group, colour in COLOURS_OF.items():
        own = [(rank, bar) for rank, bar in bars if bar.group == group]
        if own:
            figure.add_bar(
                orientation="h",
                y=[names[rank] + escape(bar.stream) for rank, bar in own],
                base=[(bar.start - first) / 1e6 for _, bar in own],
                x=[(bar.end - bar.start) / 1e6 for _, bar in own],
                name=group,
                marker={
                    "color": [_blended(colour, counts[rank, bar.stream]) for rank, bar in own],
                    "line": {"width": 0},
                },
                hovertext=[_hover(bar) for _, bar in own],
                hoverinfo="text",
                width=0.8,
            )
    last = max(each.end for each in shown.values())
    figure.update_xaxes(title="ms", range=[0, (last - first) / 1e6])
    figure.update_yaxes(
        autorange="reversed", type="category", categoryarray=lanes, showgrid=False
    )
    figure.update_layout(barmode="overlay")
    joined_ns = max(each.joined_ns for each in shown.values())
    steps = dict.fromkeys(each.step for each in shown.values())
    notes = [note, "Drag to zoom in."]
    if joined_ns:
        notes.append(
            f"Events with pauses below {format_time(joined_ns / 1e9)} between them are one "
            "bar, in the colour of the group that takes most of it."
        )
    if len(shown) < len(timelines):
        notes.append(
            f"{len(shown)} of {len(timelines)} {lane}s, by their time in communication."
        )
    if left_out:
        time = sum(bar.end - bar.start for _, bar in left_out) / 1e6
        notes.append(f"{len(left_out)} bars of together {time:.3f} ms are too short to draw.")
    title = "Streams" if None in steps else f"Streams in step {', '.join(map(str, steps))}"
    yield title, " ".join(notes), styled(figure, height=max(260, 150 + 26 * len(lanes)))


def _blended(colour: str, num_bars: int) -> str:
    """Return a colour in which many bars keep widths below a pixel.

    Plotly widens opaque bars to a pixel, so that the group drawn last would hide all others.
    """
    if num_bars <= _MANY:
        return colour
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.999)"


def _streams(each: Timeline) -> list[str]:
    """Return the streams of a rank as HTML, the busiest first."""
    busy: Counter[str] = Counter()
    for bar in each.bars:
        busy[bar.stream] += bar.busy
    return [escape(stream) for stream, _ in busy.most_common()]


def _hover(bar: Bar) -> str:
    took = (bar.end - bar.start) / 1e3
    share = min(100.0, 100 * bar.busy / max(bar.end - bar.start, 1))
    count = f"{bar.num_events} events, {share:.0f} % busy" if bar.num_events > 1 else "1 event"
    return f"{escape(bar.name[:90])}<br>{bar.group}: {took:.1f} us, {count}"


def _steps(rows: Sequence[Row]) -> Iterator[Drawn]:
    """Yield the parts of a step: by rank (means over steps), or by step of one rank."""
    if not rows:
        return
    key = "rank" if len({row["rank"] for row in rows}) > 1 else "step"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = "all" if row[key] is None else f"{key} {row[key]}"
        groups.setdefault(name, []).append(row)
    note = "Means over the steps of each rank" if key == "rank" else "The steps of one rank"
    note += "; compute + exposed communication + exposed copies + idle = step."
    if len(groups) > _MOST_STEPS:
        slowest = sorted(groups, key=lambda name: -_mean(groups[name], "window_ns"))
        groups = {name: own for name, own in groups.items() if name in slowest[:_MOST_STEPS]}
        note += f" The {_MOST_STEPS} slowest of {len(slowest)}."
    figure = go.Figure()
    for column, (name, colour) in _PARTS.items():
        times = [_mean(own, column) for own in groups.values()]
        if any(times):
            figure.add_bar(
                x=list(groups),
                y=times,
                name=name,
                marker_color=colour,
                hovertemplate="%{x}: %{y:.3f} ms " + name + "<extra></extra>",
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(type="category")
    figure.update_yaxes(title="ms per step")
    yield "Parts of a step", note, styled(figure, height=380)


def _mean(rows: Sequence[Row], column: str) -> float:
    """Return the mean in ms; waiting for other ranks is no part of exposed communication."""
    total = sum(number(row, column) or 0.0 for row in rows)
    if column == "exposed_comm_ns":
        total -= sum(number(row, "exposed_waiting_ns") or 0.0 for row in rows)
    return total / len(rows) / 1e6


def _hidden(rows: Sequence[Row], num_steps: int) -> Iterator[Drawn]:
    """Yield how much of each collective runs beside compute."""
    if not rows:
        return
    sums: dict[str, list[float]] = {}  # ms: hidden, exposed
    for row in rows:
        size = f" of {row['group_size']}" if row["group_size"] else ""
        name = f"{str(row['collective'] or row['kernel'])[:40]}, "
        name += f"{row['group_desc'] or row['group']}{size}"
        exposed = number(row, "exposed_ns") or 0.0
        hidden = (number(row, "time_ns") or 0.0) - exposed
        before = sums.get(name, [0.0, 0.0])
        sums[name] = [
            old + new / 1e6 / num_steps
            for old, new in zip(before, (hidden, exposed), strict=True)
        ]
    names = sorted(sums, key=lambda name: -sum(sums[name]))[:12]
    figure = go.Figure()
    for place, title, colour in ((0, "hidden by compute", COLOURS[5]), (1, "exposed", _RED)):
        figure.add_bar(
            orientation="h",
            y=[escape(name) for name in names],
            x=[sums[name][place] for name in names],
            name=title,
            marker_color=colour,
            hovertemplate="%{x:.3f} ms " + title + "<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(title="ms per rank and step")
    note = (
        "Time in which any call of a collective runs, waiting for other ranks included; "
        "collectives that run at the same time count each."
    )
    yield "Communication beside compute", note, styled(figure, height=130 + 30 * len(names))
