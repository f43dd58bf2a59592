"""The breakdown of traces as one HTML page: timeline, steps, hidden communication, messages."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from stepmark.findings import histogram_figures
from stepmark.ground.grouping import group_by
from stepmark.ground.units import format_time
from stepmark.model.kernel_groups import COMMUNICATION, COPIES, COPY_KERNELS, OTHER
from stepmark.tables.columns import Row, digits, number
from stepmark.tables.figures import COLOURS, GREY, INK, Axis, Figure, Kind, Series
from stepmark.tables.page import Page, Section, preformatted
from stepmark.timeline.bars import MOST_BARS, MOST_LANES, Bar, Bars
from stepmark.timeline.ledger import WAITING, Work
from stepmark.timeline.timeline import LEFT_OUT

_MANY = 200  # bars of a stream, which may be narrower than a pixel
_MOST_STEPS = 64  # bars of steps
# Compute is blue and green, what a faster network changes is red, pauses are pale.
_RED = COLOURS[1]
_BLUE = COLOURS[0]
_GREEN = COLOURS[2]
_PALE = "#BD8574"
_DARK = "#6B7280"
# Of groups of kernels, and of kinds of work in a predicted step.
COLOURS_OF = {
    "matrix products": _BLUE,
    Work.MATMUL: _BLUE,
    "attention": COLOURS[5],
    COMMUNICATION: _RED,
    WAITING: _PALE,
    COPIES: COLOURS[4],
    COPY_KERNELS: "#9C7FB5",
    Work.COPY: COLOURS[4],
    "optimizer": COLOURS[3],
    "norms": COLOURS[6],
    "elementwise": _GREEN,
    Work.ELEMENTWISE: _GREEN,
    "fused by compile": "#3C7D5D",
    "softmax and loss": "#6F9A1F",
    Work.LOSS: "#6F9A1F",
    "convolutions": "#4F79B8",
    "indexing": "#B5835A",
    "reductions": "#2F9A8F",
    OTHER: _DARK,
    Work.FILE: _DARK,
    LEFT_OUT: GREY,
}
_PARTS = {
    "compute_ns": ("compute", _BLUE),
    "exposed_waiting_ns": ("exposed communication: waiting for other ranks", _PALE),
    "exposed_comm_ns": ("exposed communication: other", _RED),
    "exposed_copies_ns": ("exposed copies", COLOURS[4]),
    "host_bound_ns": ("idle: host-bound", _DARK),
    "kernel_gap_ns": ("idle: kernel gaps", GREY),
    "unknown_idle_ns": ("idle: cause not known", INK),
}
_PATTERNS = {"unknown_idle_ns": "x"}  # what no cause is known of looks like none of the others


def page(
    title: str,
    tables: Mapping[str, Sequence[Row]],
    bars_of: Mapping[int, Bars],
    messages: Sequence[Row],
    lines: Sequence[str],
    lead: str = "",
) -> Page:
    """Return the page. tables: of the breakdown; messages: rows of a histogram, whose
    ranks are steps of ranks.
    """
    return Page(
        title=title,
        lead=lead,
        sections=[
            *streams(bars_of, "Times are those of each rank's clock."),
            *steps(tables["steps"]),
            *_hidden(tables["communication"], len(tables["steps"])),
            *histogram_figures.figures(messages, per="rank and step"),
            Section("Report", [preformatted(*lines, is_table=True)]),
        ],
    )


def _select_bars(bars_of: Mapping[int, Bars]) -> dict[int, Bars]:
    """Return at most MOST_LANES: extremes by their time in communication, and some between."""
    ranks = sorted(
        bars_of,
        key=lambda rank: sum(b.busy for b in bars_of[rank].bars if b.group == COMMUNICATION),
    )
    if len(ranks) > MOST_LANES:
        places = {round(n * (len(ranks) - 1) / (MOST_LANES - 1)) for n in range(MOST_LANES)}
        ranks = [ranks[place] for place in places]
    return {rank: bars_of[rank] for rank in sorted(ranks)}


def streams(bars_of: Mapping[int, Bars], note: str, lane: str = "rank") -> Iterator[Figure]:
    """Yield the figure of streams over time. lane: what they are numbered by."""
    shown = _select_bars(bars_of)
    if not shown:
        return
    first = min(each.start for each in shown.values())
    is_named = lane == "rank" or len(bars_of) > 1
    names = {rank: f"{lane} {rank}, " if is_named else "" for rank in shown}
    lanes = [names[rank] + stream for rank, each in shown.items() for stream in _streams(each)]
    bars = [(rank, bar) for rank, each in shown.items() for bar in each.bars]
    # The longest are drawn first, so that of too many the shortest are left out.
    bars.sort(key=lambda item: item[1].start - item[1].end)
    bars, left_out = bars[:MOST_BARS], bars[MOST_BARS:]
    counts = Counter((rank, bar.stream) for rank, bar in bars)
    by_group = {
        group: [(rank, bar) for rank, bar in bars if bar.group == group] for group in COLOURS_OF
    }
    last = max(each.end for each in shown.values())
    joined_ns = max(each.joined_ns for each in shown.values())
    steps = dict.fromkeys(each.step for each in shown.values())
    notes = [note, "Drag to zoom in."]
    whole = 0.0, (last - first) / 1e6
    limits = whole
    block = next((each.block for each in shown.values()), None)
    if block:
        limits = (block.start - first) / 1e6, (block.end - first) / 1e6
        share = 100 * (limits[1] - limits[0]) / whole[1]
        notes.insert(0, f"One block is shown: {block.name}, {digits(share, 2)} % of the step.")
    if joined_ns:
        notes.append(
            f"Events with pauses below {format_time(joined_ns / 1e9)} between them are one "
            "bar, in the colour of the group that takes most of it."
        )
    if len(shown) < len(bars_of):
        notes.append(f"{len(shown)} of {len(bars_of)} {lane}s, by their time in communication.")
    if left_out:
        time = sum(bar.end - bar.start for _, bar in left_out) / 1e6
        notes.append(f"{len(left_out)} bars of together {time:.3f} ms are too short to draw.")
    yield Figure(
        title="Streams" if None in steps else f"Streams in step {', '.join(map(str, steps))}",
        note=" ".join(notes),
        x=Axis(title="ms", limits=limits, whole=whole if block else None),
        y=Axis(categories=lanes),
        series=[
            Series(
                kind=Kind.BARS,
                name=group,
                y=[names[rank] + bar.stream for rank, bar in own],
                starts=[(bar.start - first) / 1e6 for _, bar in own],
                x=[(bar.end - bar.start) / 1e6 for _, bar in own],
                colour=[
                    _blended(COLOURS_OF[group], counts[rank, bar.stream]) for rank, bar in own
                ],
                hover=[_hover(bar) for _, bar in own],
            )
            for group, own in by_group.items()
            if own
        ],
        height=max(260, 150 + 26 * len(lanes)),
    )


def _blended(colour: str, num_bars: int) -> str:
    """Return a colour in which many bars keep widths below a pixel.

    Plotly widens opaque bars to a pixel, so that the group drawn last would hide all others.
    """
    if num_bars <= _MANY:
        return colour
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.999)"


def _streams(each: Bars) -> list[str]:
    """Return the streams of a rank, the busiest first."""
    busy: Counter[str] = Counter()
    for bar in each.bars:
        busy[bar.stream] += bar.busy
    return [stream for stream, _ in busy.most_common()]


def _hover(bar: Bar) -> str:
    took = (bar.end - bar.start) / 1e3
    share = min(100.0, 100 * bar.busy / max(bar.end - bar.start, 1))
    count = f"{bar.num_events} events, {share:.0f} % busy" if bar.num_events > 1 else "1 event"
    return f"{bar.name[:90]}\n{bar.group}: {took:.1f} us, {count}"


def steps(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the parts of a step: by rank (means over steps), or by step of one rank."""
    if not rows:
        return
    key = "rank" if len({row["rank"] for row in rows}) > 1 else "step"
    groups = group_by(rows, lambda row: "all" if row[key] is None else f"{key} {row[key]}")
    note = "Means over the steps of each rank" if key == "rank" else "The steps of one rank"
    note += "; compute + exposed communication + exposed copies + idle = step."
    if len(groups) > _MOST_STEPS:
        slowest = sorted(groups, key=lambda name: -_mean(groups[name], "window_ns"))
        groups = {name: own for name, own in groups.items() if name in slowest[:_MOST_STEPS]}
        note += f" The {_MOST_STEPS} slowest of {len(slowest)}."
    names = list(groups)
    times = {column: [_mean(own, column) for own in groups.values()] for column in _PARTS}
    yield Figure(
        title="Parts of a step",
        note=note,
        x=Axis(categories=names),
        y=Axis(title="ms per step"),
        series=[
            Series(
                kind=Kind.BARS,
                name=name,
                x=names,
                y=times[column],
                colour=colour,
                pattern=_PATTERNS.get(column, ""),
            )
            for column, (name, colour) in _PARTS.items()
            if any(times[column])
        ],
        height=380,
    )


def ledger(rows: Sequence[Row]) -> list[Row]:
    """Return the parts of a step, which add up to it: means over ranks and steps."""
    if not rows:
        return []
    times = {name: _mean(rows, column) for column, (name, _) in _PARTS.items()}
    return [
        {"line": name, "time_ns": time_ms * 1e6} for name, time_ms in times.items() if time_ms
    ]


def _mean(rows: Sequence[Row], column: str) -> float:
    """Return the mean in ms; waiting for other ranks is no part of exposed communication.

    Idle time of traces without a GPU is not divided by cause.
    """

    def total(name: str) -> float:
        return sum(number(row, name) or 0.0 for row in rows)

    time_ns = total(column)
    if column == "exposed_comm_ns":
        time_ns -= total("exposed_waiting_ns")
    if column == "unknown_idle_ns":
        time_ns = total("idle_ns") - total("host_bound_ns") - total("kernel_gap_ns")
    return time_ns / len(rows) / 1e6


def _hidden(rows: Sequence[Row], num_steps: int) -> Iterator[Figure]:
    """Yield how much of each collective runs beside compute."""
    if not rows:
        return
    sums: dict[str, list[float]] = {}  # ms: hidden, exposed
    for row in rows:
        size = f" of {row['group_size']}" if row["group_size"] else ""
        group = f"{row['group_desc'] or row['group'] or ''}{size}"
        name = ", ".join(filter(None, (str(row["collective"] or row["kernel"])[:40], group)))
        exposed = number(row, "exposed_ns") or 0.0
        hidden = (number(row, "time_ns") or 0.0) - exposed
        before = sums.get(name, [0.0, 0.0])
        sums[name] = [
            old + new / 1e6 / num_steps
            for old, new in zip(before, (hidden, exposed), strict=True)
        ]
    names = sorted(sums, key=lambda name: -sum(sums[name]))[:12]
    yield Figure(
        title="Communication beside compute",
        note="Time in which any call of a collective runs, waiting for other ranks included; "
        "collectives that run at the same time count each.",
        x=Axis(title="ms per rank and step"),
        y=Axis(categories=names),
        series=[
            Series(
                kind=Kind.BARS,
                name=name,
                x=[sums[row][place] for row in names],
                y=names,
                colour=colour,
            )
            for place, (name, colour) in enumerate(
                [("hidden by compute", COLOURS[5]), ("exposed", _RED)]
            )
        ],
        height=130 + 30 * len(names),
    )
