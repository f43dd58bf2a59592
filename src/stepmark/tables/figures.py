"""Rows of operators to plotly figures, and the style of all figures; page.py makes documents.

Colours are Okabe and Ito's, which colour-blind readers distinguish, on transparent ground; the
page sets the ink by the reader's light or dark scheme.
"""

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle
from math import ceil, floor, log10
from textwrap import wrap

import plotly.graph_objects as go
from plotly.graph_objects import Figure

from stepmark.cases.record import RunInfo
from stepmark.ground.dtypes import DType
from stepmark.ground.units import GB, TFLOP, format_time
from stepmark.model.device import DeviceSpec
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.outcomes import MATMULS
from stepmark.tables.row_tables import describe

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
INK = "#777777"
GRID = "rgba(128,128,128,0.25)"
Drawn = tuple[str, str, Figure]  # title, note, figure
_FEW_POWERS = 3  # of ten, on a logarithmic axis


def roofline(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Draw TFLOP/s over arithmetic intensity, under the roof of each dtype."""
    points = [row for row in _jobs(rows) if number(row, "tflops")]
    figure = go.Figure()
    intensities = [number(row, "arithmetic_intensity") or 1.0 for row in points] or [1.0]
    low, high = min(20.0, *intensities) / 2, max(1000.0, *intensities) * 2
    roofs = _roofs(points, rows, device)
    for (name, peak, bandwidth), dash in zip(roofs, cycle(_DASHES), strict=False):
        xs, ys = _roof(low, high, peak, bandwidth)
        line = {"color": INK, "width": 1.5, "dash": dash}
        figure.add_scatter(x=xs, y=ys, mode="lines", name=name, line=line, hoverinfo="name")
    for index, family in enumerate(dict.fromkeys(text(row, "family") for row in points)):
        own = [row for row in points if row["family"] == family]
        figure.add_scatter(
            x=[number(row, "arithmetic_intensity") for row in own],
            y=[number(row, "tflops") for row in own],
            mode="markers",
            name=family,
            marker=_marker(index, size=9, line={"width": 0.5, "color": INK}),
            text=[_hover(row, run) for row in own],
            hovertemplate="%{text}<extra></extra>",
        )
    reached = [y for trace in figure.data for y in trace.y if y]
    title = "FLOP per byte of compulsory traffic"
    figure.update_xaxes(type="log", title=title, **log_ticks([low, high]))
    figure.update_yaxes(type="log", title="TFLOP/s", **log_ticks(reached))
    return styled(figure, height=520)


def bandwidth(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Draw the share of the memory bandwidth of operators without matrix products."""
    key = "pct_hbm" if device and device.hbm_bytes_per_s else "pct_ceiling"
    bars = [r for r in _jobs(rows) if not number(r, "flops") and number(r, key) is not None]
    bars.sort(key=lambda row: (text(row, "family"), number(row, key) or 0.0))
    names = _names(bars)
    families = list(dict.fromkeys(text(row, "family") for row in bars))
    figure = go.Figure()
    for index, family in enumerate(families):
        named = zip(names, bars, strict=True)
        own = [(name, row) for name, row in named if row["family"] == family]
        figure.add_bar(
            orientation="h",
            y=[name for name, _ in own],
            x=[number(row, key) for _, row in own],
            name=family,
            marker_color=COLOURS[index % len(COLOURS)],
            text=[f"{digits(number(row, 'gb_per_s'))} GB/s" for _, row in own],
            textposition="auto",
            hovertext=[_hover(row, run) for _, row in own],
            hoverinfo="text",
        )
    of = "HBM bandwidth" if key == "pct_hbm" else "the measured copy"
    figure.update_xaxes(title=f"% of {of}", rangemode="tozero")
    figure.update_yaxes(automargin=True)
    figure.add_vline(x=100, line={"color": INK, "dash": "dash", "width": 1})
    return styled(figure, height=170 + 26 * len(bars))


def time_breakdown(rows: Sequence[Row], run: RunInfo, *, is_layer: bool = True) -> Figure:
    """Draw time x count of each role by pass, of the fastest backend.

    Of one layer, or of what is no part of a layer: head, loss and optimizer.
    """
    best: dict[tuple[str, str, str], tuple[float, Row]] = {}
    for row in _jobs(rows):
        own = _is_of_layer(text(row, "role")) is is_layer
        if own and row["model"] and row["role"] and (time_s := number(row, "time_s")):
            key = (_setting(row), text(row, "role"), text(row, "pass"))
            if key not in best or time_s < best[key][0]:
                best[key] = (time_s, row)
    several = len({setting for setting, *_ in best}) > 1
    figure = go.Figure()
    for index, phase in enumerate(dict.fromkeys(phase for *_, phase in best)):
        timed = {key: each for key, each in best.items() if key[2] == phase}
        names = [_ALTERNATIVES.get(role, role) for _, role, _ in timed]
        figure.add_bar(
            orientation="h",
            y=[
                folded(f"{setting} {name}" if several else name)
                for (setting, *_), name in zip(timed, names, strict=True)
            ],
            x=[time_s * (number(row, "count") or 1) * 1e3 for time_s, row in timed.values()],
            name=phase or "pass not given",
            marker_color=COLOURS[index % len(COLOURS)],
            hovertext=[f"{_hover(row, run)}<br>x {row['count']}" for _, row in timed.values()],
            hoverinfo="text",
        )
    only = next(iter(best), ("",))[0]
    title = "ms (time x count)"
    figure.update_xaxes(title=title if several or not only else f"{title}, {escape(only)}")
    figure.update_yaxes(automargin=True, autorange="reversed")
    figure.update_layout(barmode="stack")
    return styled(figure, height=170 + 26 * len({key[:2] for key in best}))


_ALTERNATIVES = {
    "loss_chunked": "loss_chunked (instead of loss)",
    "optimizer_layer": "optimizer_layer (of each layer)",
    "optimizer_moe_layer": "optimizer_moe_layer (of each MoE layer)",
    "optimizer_ends": "optimizer_ends (embedding, head)",
}


def _is_of_layer(role: str) -> bool:
    """Return whether a layer has the role. The others are once per step, or alternatives."""
    return role not in ("head", "loss", *_ALTERNATIVES)


def _setting(row: Row) -> str:
    mbs = "" if row["mbs"] is None else f" mbs {row['mbs']}"
    scale = "" if row["scale"] is None else f" scaled {row['scale']}"
    return f"{row['model']}{mbs}{scale}"


def _roofs(
    points: Sequence[Row], rows: Sequence[Row], device: DeviceSpec | None
) -> list[tuple[str, float, float | None]]:
    """Return (name, FLOP/s, bytes/s) of each dtype; "measured" where no peak is known."""
    copies = [number(row, "gb_per_s") for row in _jobs(rows) if row["family"] == "copy"]
    best_copy = max((rate for rate in copies if rate), default=None)
    bandwidth = device.hbm_bytes_per_s if device else None
    slope = "memory peak" if bandwidth else "measured copy"
    if not bandwidth and best_copy:
        bandwidth = best_copy * GB
    roofs = []
    for dtype in dict.fromkeys(text(row, "dtype") for row in points):
        peak = device.peak(DType(dtype)) if device else None
        kind = "peak" if peak else "measured ceiling"
        if not peak:
            same = [r for r in points if r["dtype"] == dtype and r["family"] in MATMULS]
            peak = max((number(row, "tflops") or 0.0 for row in same), default=0.0) * TFLOP
        if peak:
            roofs.append(
                (f"{dtype} {kind}" + (f", {slope}" if bandwidth else ""), peak, bandwidth)
            )
    return roofs


def _roof(
    low: float, high: float, peak: float, bandwidth: float | None
) -> tuple[list[float], list[float]]:
    """Return corners of min(peak, intensity x bandwidth), in FLOP/byte and TFLOP/s."""
    if bandwidth is None:
        return [low, high], [peak / TFLOP] * 2
    ridge = peak / bandwidth
    xs = [low, ridge, max(high, 2 * ridge)] if ridge > low else [low, high]
    return xs, [min(peak, x * bandwidth) / TFLOP for x in xs]


def _jobs(rows: Sequence[Row]) -> list[Row]:
    """Return correct measurements of all ranks together."""
    return [row for row in rows if row["rank"] is None and row["status"] == "measured"]


def _names(bars: Sequence[Row]) -> list[str]:
    """Name bars; equal names get their shape, then a number."""
    has_models = len({row["model"] for row in bars if row["role"]}) > 1
    keys = (*["model"] * has_models, "role", "pass", "backend")
    short = [_joined(row, keys if row["role"] else ("family", "shape", *keys)) for row in bars]
    long = [
        name if short.count(name) == 1 else f"{name} {escape(text(row, 'shape'))}"
        for name, row in zip(short, bars, strict=True)
    ]
    return unique(long)


def folded(name: str) -> str:
    """Return a name as HTML in lines that leave room for the figure, also on a phone."""
    return "<br>".join(map(escape, wrap(name, 28, break_on_hyphens=False)))


def unique(names: Sequence[str]) -> list[str]:
    """Number equal names, whose bars would be drawn over each other."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]


def _joined(row: Row, keys: Sequence[str]) -> str:
    return escape(" ".join(word for word in (text(row, key) for key in keys) if word))


def _hover(row: Row, run: RunInfo) -> str:
    rate = f"{digits(number(row, 'gb_per_s'))} GB/s"
    if row["tflops"]:
        rate = f"{digits(number(row, 'tflops'))} TFLOP/s, {rate}"
    time = format_time(number(row, "time_s") or 0.0)
    lines = (describe(row), f"{time}, {rate}", text(row, "rate"), f"run {run.run_id}")
    return "<br>".join(escape(line) for line in lines)


def _marker(index: int, **style: object) -> dict[str, object]:
    symbol = _SYMBOLS[index % len(_SYMBOLS)]
    return {"color": COLOURS[index % len(COLOURS)], "symbol": symbol, **style}


def curve_style(index: int, *, width: float = 2, size: int = 7) -> dict[str, object]:
    """Return a style whose colour, dash and symbol distinguish even curves on one another."""
    dash = _DASHES[index % len(_DASHES)]
    return {
        "mode": "lines+markers",
        "line": {"color": COLOURS[index % len(COLOURS)], "width": width, "dash": dash},
        "marker": _marker(index, size=size),
    }


def log_ticks(
    values: Sequence[float], words: Callable[[float], str] = "{:g}".format
) -> dict[str, object]:
    """Return ticks for a logarithmic axis: 1, 2, 5 of each power of ten, or of many powers 1.

    words: of a tick.
    """
    if not values:
        return {}
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    steps = (1, 2, 5) if high - low <= _FEW_POWERS else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return {"tickvals": ticks, "ticktext": [words(tick) for tick in ticks]}


def reference_line(figure: Figure, y: float, name: str) -> None:
    """Draw a dashed line across the figure, named at its right end."""
    figure.add_hline(
        y=y,
        line={"color": INK, "dash": "dash", "width": 1},
        annotation={"text": name, "font": {"size": 11}},
        annotation_position="bottom right",
    )


def styled(figure: Figure, height: int) -> Figure:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 16, "t": 16, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "x": 0,
            "traceorder": "normal",
        },
        bargap=0.25,
        showlegend=True,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    return figure
