"""Figures of operators: roofline, share of the memory bandwidth, time by role."""

from collections.abc import Sequence

from stepmark.cases.record import RunInfo
from stepmark.ground.dtypes import DType
from stepmark.ground.units import GB, TFLOP, format_time
from stepmark.model.device import DeviceSpec
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.figures import (
    INK,
    Axis,
    Figure,
    Kind,
    Mark,
    Series,
    folded,
    unique,
)
from stepmark.tables.outcomes import MATMULS
from stepmark.tables.row_tables import describe, grouped

_LAYER_NOTE = "Fastest backend and dtype of each role of a layer (of each kind), once."
_OTHERS_NOTE = (
    "No part of a layer. Of loss and loss_chunked a step has one: they do not add up."
)


def figures(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> list[Figure]:
    """Return the figures of the operators of a run that have something to show."""
    drawn = (
        roofline(rows, run, device),
        bandwidth(rows, run, device),
        time_breakdown(rows, run),
        time_breakdown(rows, run, is_layer=False),
    )
    return [figure for figure in drawn if figure.series]


def roofline(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Return TFLOP/s over arithmetic intensity, under the roof of each dtype."""
    points = [row for row in _jobs(rows) if number(row, "tflops")]
    intensities = [number(row, "arithmetic_intensity") or 1.0 for row in points] or [1.0]
    low = min(20.0, *intensities) / 2
    high = max(1000.0, *intensities) * 2
    roofs = []
    for index, (name, peak, bandwidth) in enumerate(_roofs(points, rows, device)):
        xs, ys = _roof(low, high, peak, bandwidth)
        roofs.append(Series(kind=Kind.LINE, name=name, x=xs, y=ys, colour=INK, index=index))
    operators = [
        Series(
            kind=Kind.POINTS,
            name=text(own[0], "family"),
            x=[number(row, "arithmetic_intensity") for row in own],
            y=[number(row, "tflops") for row in own],
            hover=[_hover(row, run) for row in own],
        )
        for own in grouped(points, ["family"])
    ]
    return Figure(
        title="Roofline",
        note="Each point is one operator; the lines are what bounds it.",
        x=Axis(title="FLOP per byte of compulsory traffic", base=10),
        y=Axis(title="TFLOP/s", base=10),
        series=roofs + operators,
        height=520,
    )


def bandwidth(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Return the share of the memory bandwidth of operators without matrix products."""
    key = "pct_hbm" if device and device.hbm_bytes_per_s else "pct_ceiling"
    bars = [r for r in _jobs(rows) if not number(r, "flops") and number(r, key) is not None]
    bars.sort(key=lambda row: (text(row, "family"), -(number(row, key) or 0.0)))
    bars = [row | {"bar": name} for row, name in zip(bars, _names(bars), strict=True)]
    of = "HBM bandwidth" if key == "pct_hbm" else "the measured copy"
    return Figure(
        title="Memory bandwidth",
        note="Operators without matrix products: compulsory bytes over time.",
        x=Axis(title=f"% of {of}", has_zero=True),
        y=Axis(categories=[text(row, "bar") for row in bars]),
        series=[
            Series(
                kind=Kind.BARS,
                name=text(own[0], "family"),
                x=[number(row, key) for row in own],
                y=[text(row, "bar") for row in own],
                labels=[f"{digits(number(row, 'gb_per_s'))} GB/s" for row in own],
                hover=[_hover(row, run) for row in own],
            )
            for own in grouped(bars, ["family"])
        ],
        marks=[Mark(x=(100, 100))],
        height=170 + 26 * len(bars),
    )


def time_breakdown(rows: Sequence[Row], run: RunInfo, *, is_layer: bool = True) -> Figure:
    """Return time x count of each role by pass, of the fastest backend.

    Of one layer, or of what is no part of a layer: head, loss and optimizer.
    """
    best: dict[tuple[object, ...], Row] = {}
    for row in _jobs(rows):
        # The others are once per step, or alternatives.
        own = (text(row, "role") not in ("head", "loss", *_ALTERNATIVES)) is is_layer
        if own and row["model"] and row["role"] and number(row, "time_s"):
            key = (_setting(row), row["role"], row["pass"])
            best[key] = min(best.get(key, row), row, key=_total_ms)
    bars = list(best.values())
    settings = list(dict.fromkeys(map(_setting, bars)))
    only = f", {settings[0]}" if len(settings) == 1 else ""

    def name(row: Row) -> str:
        role = text(row, "role")
        role = _ALTERNATIVES.get(role, role)
        return folded(role if only else f"{_setting(row)} {role}")

    names = list(dict.fromkeys(map(name, bars)))
    return Figure(
        title="One layer" if is_layer else "Head, loss and optimizer",
        note=_LAYER_NOTE if is_layer else _OTHERS_NOTE,
        x=Axis(title=f"ms (time x count){only}"),
        y=Axis(categories=names),
        series=[
            Series(
                kind=Kind.BARS,
                name=text(own[0], "pass") or "pass not given",
                x=[_total_ms(row) for row in own],
                y=[name(row) for row in own],
                hover=[f"{_hover(row, run)}\nx {row['count']}" for row in own],
            )
            for own in grouped(bars, ["pass"])
        ],
        height=170 + 26 * len(names),
    )


_ALTERNATIVES = {
    "loss_chunked": "loss_chunked (instead of loss)",
    "optimizer_layer": "optimizer_layer (of each layer)",
    "optimizer_moe_layer": "optimizer_moe_layer (of each MoE layer)",
    "optimizer_ends": "optimizer_ends (embedding, head)",
}


def _total_ms(row: Row) -> float:
    return 1e3 * (number(row, "time_s") or 0.0) * (number(row, "count") or 1)


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
    keys = ("model", "role", "pass", "backend") if has_models else ("role", "pass", "backend")
    short = []
    for row in bars:
        words = [
            text(row, key) for key in (keys if row["role"] else ("family", "shape", *keys))
        ]
        short.append(" ".join(filter(None, words)))
    long = [
        name if short.count(name) == 1 else f"{name} {text(row, 'shape')}"
        for name, row in zip(short, bars, strict=True)
    ]
    return unique(long)


def _hover(row: Row, run: RunInfo) -> str:
    rate = f"{digits(number(row, 'gb_per_s'))} GB/s"
    if row["tflops"]:
        rate = f"{digits(number(row, 'tflops'))} TFLOP/s, {rate}"
    time = format_time(number(row, "time_s") or 0.0)
    return "\n".join([describe(row), f"{time}, {rate}", text(row, "rate"), f"run {run.run_id}"])
