"""Rows of collectives to plotly figures."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log2

import plotly.graph_objects as go
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from stepmark.cases.record import RunInfo
from stepmark.collectives.comm_remarks import PairMatrix, matrices
from stepmark.ground.units import GB, format_bytes, format_time
from stepmark.model.device import DeviceSpec
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.figures import COLOURS, INK, Drawn, curve_style, log_ticks, styled
from stepmark.tables.row_tables import describe, grouped

# Settings that distinguish curves of one figure; those that differ make up their names.
_CURVE = (
    *("placement", "num_ranks", "world_size", "split", "mode", "aligned", "api", "backend"),
    *("device", "redop", "root", "skew_s", "max_ctas", "beside", "calls_per_group", "spread"),
)


def drawn(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> list[Drawn]:
    """Return all figures of the collectives of a run; none for what was not measured."""
    right = [row for row in rows if row["status"] == "measured"]
    figures: list[Drawn] = []
    for group in _grouped([row for row in right if not row["pair"]], ("collective", "dtype")):
        if len({row["size_bytes"] for row in group}) < 2:
            continue
        note = "Median of the slowest rank: bus bandwidth, and time."
        title = f"{text(group[0], 'collective')} {text(group[0], 'dtype')}"
        figures.append((title, note, over_size(group, run, device)))
    if any(row["slowdown"] or row["slowdown_beside"] for row in right):
        note = "Time together over time alone: 1 is undisturbed."
        figures.append(("Beside compute", note, contention(right, run)))
    for matrix in matrices(rows):
        note = f"{format_bytes(matrix.size_bytes)} {matrix.setting}; from line to column."
        figures.append((f"Pairs: {matrix.title}", note, heat_map(matrix)))
    return figures


def over_size(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Draw bus bandwidth and time over the message size, a curve for each setting."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.15)
    curves = _grouped(rows, _CURVE)
    for index, (curve, name) in enumerate(zip(curves, _names(curves), strict=True)):
        for column, key in ((1, "busbw_gb_s"), (2, "time_s")):
            figure.add_scatter(
                x=[number(row, "size_bytes") for row in curve],
                y=[number(row, key) or 0.0 for row in curve],
                name=name,
                legendgroup=str(index),
                showlegend=column == 1,
                **curve_style(index),
                text=[_hover(row, run) for row in curve],
                hovertemplate="%{text}<extra></extra>",
                row=1,
                col=column,
            )
    if device and device.link_bytes_per_s and any(row["pct_link"] for row in rows):
        _add_link(figure, device, rows)
    figure.update_xaxes(title="message size", type="log", **size_ticks(_sizes(rows)))
    figure.update_yaxes(title="busbw (GB/s)", rangemode="tozero", row=1, col=1)
    times = [time_s for row in rows if (time_s := number(row, "time_s"))]
    ticks = log_ticks(times, format_time)
    figure.update_yaxes(title="time", type="log", **ticks, row=1, col=2)
    return styled(figure, height=400 + 20 * (len(curves) // 5))


def contention(rows: Sequence[Row], run: RunInfo) -> Figure:
    """Draw how much slower collective and compute are together than alone."""
    figure = go.Figure()
    overlapped = [row for row in rows if row["beside"]]
    keys = ("collective", "dtype", *_CURVE)
    curves = _grouped(overlapped, keys)
    names = _names(curves, keys)
    for index, (curve, name) in enumerate(zip(curves, names, strict=True)):
        compute = text(curve[0], "beside")
        for key, what, dash in (
            ("slowdown", text(curve[0], "collective"), "solid"),
            ("slowdown_beside", compute, "dash"),
        ):
            measured = [row for row in curve if row[key] is not None]
            line = {"color": COLOURS[index % len(COLOURS)], "dash": dash}
            figure.add_scatter(
                x=[number(row, "size_bytes") for row in measured],
                y=[number(row, key) for row in measured],
                name=escape(what) + (f", {name}" if len(curves) > 1 else ""),
                **curve_style(index) | {"line": line},
                text=[_hover(row, run) for row in measured],
                hovertemplate="%{y:.3f} x<br>%{text}<extra></extra>",
            )
    figure.add_hline(y=1, line={"color": INK, "dash": "dash", "width": 1})
    figure.update_xaxes(title="message size", type="log", **size_ticks(_sizes(overlapped)))
    figure.update_yaxes(title="time together / alone", type="log", dtick="D1")
    return styled(figure, height=360)


def heat_map(matrix: PairMatrix) -> Figure:
    """Draw source by line, destination by column; a frame around each slow link."""
    names = [str(rank) for rank in matrix.ranks]
    place = {rank: index for index, rank in enumerate(matrix.ranks)}
    values, faster_is_more = [value for *_, value in matrix.known], matrix.more_is_better
    figure = go.Figure()
    # A cell is a bar of width 1: page.py's plotly has no heat maps, which saves 0.3 MB a page.
    figure.add_bar(
        orientation="h",
        y=[place[source] for source, *_ in matrix.known],
        base=[place[destination] - 0.5 for _, destination, _ in matrix.known],
        x=[1] * len(values),
        marker={
            "color": values,
            # Light is fast, dark is slow, whichever way the unit goes.
            "colorscale": "Cividis" if faster_is_more else "Cividis_r",
            # Half the median wide at least: a few percent of noise must not look like a
            # pattern.
            "cmin": min([matrix.median * (0.5 if faster_is_more else 0.95), *values]),
            "cmax": max([matrix.median * (1.05 if faster_is_more else 1.5), *values]),
            "colorbar": {"title": matrix.unit, "thickness": 12, "outlinewidth": 0},
        },
        text=[] if len(names) > 24 else [digits(value, 3) for value in values],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[f"{a} to {b}: {digits(v, 3)} {matrix.unit}" for a, b, v in matrix.known],
        hoverinfo="text",
    )
    for source, destination, _ in matrix.slow:
        x, y = place[destination], place[source]
        edge = {"color": COLOURS[1], "width": 3}
        figure.add_shape(type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.5, y1=y + 0.5, line=edge)
    edges = -0.5, len(names) - 0.5
    axis = {"tickvals": list(place.values()), "ticktext": names, "showgrid": False}
    styled(figure, height=min(900, 150 + 44 * len(names)))
    figure.update_xaxes(title="to rank", range=edges, **axis)
    figure.update_yaxes(title="from rank", range=edges[::-1], **axis)
    width = min(1100, 260 + 76 * len(names))
    figure.update_layout(showlegend=False, width=width, bargap=0.04)
    return figure


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows that agree in all keys, each group by size."""
    groups = grouped(rows, keys)
    return [sorted(group, key=lambda row: number(row, "size_bytes") or 0) for group in groups]


def _names(curves: Sequence[Sequence[Row]], keys: Sequence[str] = _CURVE) -> list[str]:
    """Name each curve by the settings that not all have."""
    heads = [curve[0] for curve in curves]
    differing = [key for key in keys if len({head[key] for head in heads}) > 1]
    return [
        escape(
            " ".join(word for key in differing or ["placement"] if (word := _word(head, key)))
        )
        or "plain"
        for head in heads
    ]


def _word(row: Row, key: str) -> str:
    match key:
        case "placement" | "mode" | "collective" | "dtype" | "redop" | "backend" | "device":
            return text(row, key)
        case "num_ranks":
            return f"x{row[key]}"
        case "aligned":
            return "" if row[key] else "not aligned"
        case "beside":
            return f"beside {row[key]}" if row[key] else ""
        case "skew_s":
            skew = number(row, key)
            return f"skew {format_time(skew)}" if skew else ""
        case _:
            return f"{key} {row[key]}" if row[key] is not None else ""


def _add_link(figure: Figure, device: DeviceSpec, rows: Sequence[Row]) -> None:
    sizes = _sizes(rows)
    rate = (device.link_bytes_per_s or 0.0) / GB
    figure.add_scatter(
        x=[min(sizes), max(sizes)],
        y=[rate, rate],
        mode="lines",
        name=f"{escape(device.link_kind or 'link')}, {rate:g} GB/s per direction",
        line={"color": INK, "dash": "dash", "width": 1.5},
        hoverinfo="name",
        row=1,
        col=1,
    )


def size_ticks(sizes: Sequence[float]) -> dict[str, object]:
    """Return about six powers of two, named as sizes, for a logarithmic axis of bytes."""
    if not sizes:
        return {}
    low, high = floor(log2(min(sizes))), ceil(log2(max(sizes)))
    step = max(1, ceil((high - low) / 6))
    ticks = [2.0**power for power in range(low, high + 1, step)]
    return {"tickvals": ticks, "ticktext": [format_bytes(tick) for tick in ticks]}


def _sizes(rows: Sequence[Row]) -> list[float]:
    return [size for row in rows if (size := number(row, "size_bytes"))]


def _hover(row: Row, run: RunInfo) -> str:
    rate = number(row, "busbw_gb_s")
    low, high = (format_time(number(row, key) or 0.0) for key in ("p10_s", "p99_s"))
    lines = [
        describe(row),
        f"{format_time(number(row, 'time_s') or 0.0)}, {digits(rate)} GB/s busbw",
        f"p10 {low}, p99 {high}, {row['n']} samples in {row['launches']} launches",
        f"run {run.run_id}",
    ]
    return "<br>".join(escape(line) for line in lines)
