"""A comparison as a page: curves of every side, ratios with their intervals, all lines."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from stepmark.collectives.comm_figures import size_ticks
from stepmark.comparison.comparison import Comparison, Line
from stepmark.comparison.comparison_text import (
    closing,
    headline,
    mean_text,
    ratio_of,
    ratio_text,
    shown_busbw_gb_s,
    split_fields,
    table_of,
    unit_text,
    value_text,
)
from stepmark.ground.ratio import EFFECT_FLOOR, Ratio
from stepmark.ground.units import format_bytes
from stepmark.tables.figures import INK, Drawn, curve_style, styled
from stepmark.tables.page import document, figure_section, section
from stepmark.tables.row_tables import page_table

# Fields that divide lines into figures; size runs along the axis.
_GROUP = ("family", "dtype", "redop", "placement", "num_ranks", "phase")


def html(comparison: Comparison, lead: Sequence[str] = ()) -> str:
    """Return the document; `lead` are lines that come first, such as a recommendation."""
    constant, _ = split_fields(comparison.lines)
    paragraphs = [*map(mean_text, comparison.overall), *closing(comparison)]
    summary = f"<pre>{escape(chr(10).join(lead))}</pre>" if lead else ""
    summary += "".join(f"<p>{escape(text)}</p>" for text in paragraphs)
    figures = (figure_section(*figure) for figure in drawn(comparison))
    parts = (
        section("Summary", summary),
        *figures,
        section("All lines", page_table(table_of(comparison))),
    )
    names = " and ".join([", ".join(comparison.names[:-1]), comparison.names[-1]])
    return document(
        f"Comparison of {names}", escape(headline(comparison, constant)), "\n".join(parts)
    )


def drawn(comparison: Comparison) -> list[Drawn]:
    """Return a figure of each group of lines."""
    base = comparison.names[0]
    note = (
        f"The second: speed over {base}, with 99 % intervals; the band is +-{EFFECT_FLOOR:.0%}."
    )
    sized: dict[tuple[str | int | float | None, ...], list[Line]] = {}
    for line in comparison.lines:
        if line.size_bytes:
            key = tuple(line.fields.get(name) for name in _GROUP)
            sized.setdefault(key, []).append(line)
    figures: list[Drawn] = []
    for key, lines in sized.items():
        if len(lines) > 1:
            title = " ".join(str(word) for word in key[:4] if word not in (None, "", "none"))
            title += f", {key[4]} ranks" if key[4] else ""
            figures.append((title or "values", note, over_size(lines, comparison.names)))
    rest = [line for line in comparison.lines if not line.size_bytes]
    if rest:
        note = f"Speed over {base}, with 99 % intervals."
        figures.append(("Ratios", note, ratios(rest, comparison)))
    return figures


def over_size(lines: Sequence[Line], names: Sequence[str]) -> Figure:
    """Draw the values of each side on the left, its speed over the baseline's on the right."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.09)
    ordered = sorted(lines, key=lambda line: line.size_bytes or 0)
    for index, name in enumerate(names):
        own = [line for line in ordered if name in line.cells]
        points = [line for line in own if line.cells[name].value is not None]
        figure.add_scatter(
            x=[line.size_bytes for line in points],
            y=[_height(line, name) for line in points],
            name=escape(name),
            legendgroup=name,
            **curve_style(index),
            text=[escape(_hover(line, name)) for line in points],
            hovertemplate="%{text}<extra></extra>",
            row=1,
            col=1,
        )
        _add_ratios(figure, own, name, index)
    low, high = 1 / (1 + EFFECT_FLOOR), 1 + EFFECT_FLOOR
    figure.add_hrect(
        y0=low, y1=high, fillcolor=INK, opacity=0.25, line_width=0, layer="below", row=1, col=2
    )
    sizes = [float(line.size_bytes or 1) for line in ordered]
    figure.update_xaxes(title="size", type="log", **size_ticks(sizes))
    figure.update_yaxes(title=unit_text(ordered[0]), type="log", dtick="D2", row=1, col=1)
    figure.update_yaxes(
        title=f"speed over {escape(names[0])}", range=_window(ordered), row=1, col=2
    )
    return styled(figure, height=420)


def _window(lines: Sequence[Line]) -> list[float] | None:
    """Return the range of all speeds; very wide intervals are cut, not to flatten the rest."""
    intervals = [cell.ratio for line in lines for cell in line.cells.values() if cell.ratio]
    if not intervals:
        return None
    slowest, fastest = min(r.speed for r in intervals), max(r.speed for r in intervals)
    low = max(slowest / 2, min(r.low or r.speed for r in intervals))
    high = min(fastest * 2, max(r.high or r.speed for r in intervals))
    low, high = min(low, 1 / (1 + EFFECT_FLOOR)), max(high, 1 + EFFECT_FLOOR)
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)]


def _height(line: Line, name: str) -> float | None:
    cell = line.cells[name]
    busbw = shown_busbw_gb_s(line, cell)
    return cell.value if busbw is None else busbw


def _hover(line: Line, name: str) -> str:
    cell = line.cells[name]
    text = f"{name}, {format_bytes(line.size_bytes or 0)}: {value_text(line, cell)}"
    if cell.ratio:
        text += f", {ratio_text(cell.ratio)} {cell.ratio.verdict.value}"
    return text


def _add_ratios(figure: Figure, lines: Sequence[Line], name: str, index: int) -> None:
    points = [(line, r) for line in lines if (r := line.cells[name].ratio) is not None]
    if not points:
        return
    figure.add_scatter(
        x=[line.size_bytes for line, _ in points],
        y=[r.speed for _, r in points],
        error_y=_error_bars([r for _, r in points]),
        name=escape(name),
        legendgroup=name,
        showlegend=False,
        **curve_style(index),
        text=[escape(_hover(line, name)) for line, _ in points],
        hovertemplate="%{text}<extra></extra>",
        row=1,
        col=2,
    )


def _error_bars(ratios: Sequence[Ratio]) -> dict[str, object]:
    """Return error bars of speeds; none where an interval is unknown."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [(ratio.high or ratio.speed) - ratio.speed for ratio in ratios],
        "arrayminus": [ratio.speed - (ratio.low or ratio.speed) for ratio in ratios],
        "thickness": 1,
    }


def ratios(lines: Sequence[Line], comparison: Comparison) -> Figure:
    """Draw one row per line, a point with its interval for each side."""
    _, varying = split_fields(comparison.lines)
    labels = [_label(line, varying) or f"line {place}" for place, line in enumerate(lines, 1)]
    figure = go.Figure()
    for index, name in enumerate(comparison.names[1:], 1):
        points = [
            (label, line, r)
            for label, line in zip(labels, lines, strict=True)
            if (r := ratio_of(line, name))
        ]
        style = curve_style(index) | {"mode": "markers"}
        figure.add_scatter(
            y=[label for label, *_ in points],
            x=[r.speed for *_, r in points],
            error_x=_error_bars([r for *_, r in points]),
            name=escape(name),
            **style,
            text=[escape(f"{label}: {_hover(line, name)}") for label, line, _ in points],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.add_vline(x=1, line={"color": INK, "dash": "dash", "width": 1})
    figure.update_xaxes(title=f"speed over {escape(comparison.names[0])}")
    figure.update_yaxes(automargin=True, autorange="reversed")
    return styled(figure, height=160 + 24 * len(lines))


def _label(line: Line, varying: Sequence[str]) -> str:
    words = [line.fields.get(name) for name in varying]
    return " ".join(str(word) for word in words if word not in (None, ""))
