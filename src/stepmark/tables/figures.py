"""Figures as plain data, and the one function that draws them, in the format of plotly.js.

Colours are near Okabe and Ito's, which colour-blind readers distinguish, on transparent ground:
each has a contrast of 3 to both white and dark paper. The page sets the ink by the reader's
light or dark scheme. All words are text: the drawing escapes
them, and a line feed in them begins a new line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from math import ceil, floor, isfinite, log2, log10
from textwrap import wrap
from typing import Any


class Kind(StrEnum):
    """How a series is drawn, as plotly calls it."""

    LINE = "lines"  # without points: a limit
    CURVE = "lines+markers"
    POINTS = "markers"
    BARS = "bar"  # on one another; spans, which begin where `starts` says, are not


COLOURS = ("#0068B0", "#D55E00", "#009E73", "#C66F9F", "#B07D00", "#4398D6", "#8C6BB1")
INK = "#777777"
GREY = "#808A96"
_GRID = "rgba(128,128,128,0.25)"
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
_PATTERNS = ("", "/", "x", ".")
_FEW_POWERS = 3  # of ten, on a logarithmic axis
_MOST_SIZES = 6  # powers of two, about
_MANY_POINTS = 20  # of a curve, which are drawn smaller
_MOST_EDGED = 400  # spans; edges of more would hide their colours
_BLACK = "#000000"
_WHITE = "#ffffff"
_CIVIDIS_MIDDLE = 0.47  # of the scale: its colour has the medium luminance
_MEDIUM = 0.179  # luminance on which black and white have one contrast
# The darkest and lightest of a colour that have a contrast of 3 to black and white paper.
SHADES = (0.135, 0.29)
_HALVES = ((0, 0.435), (0.565, 1))  # of the width, for two panels

Value = float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values under one name: series of one name have one style and one entry in the legend.

    x, y: numbers, or names of an axis of categories. None is a gap.
    colour: of the series, or of each bar; of COLOURS by default.
    index: chooses colour, dash, symbol and pattern; the place of the name by default.
    intervals: the lower and upper end of each value.
    labels: within bars. hover: per point; by default its place, value and name.
    """

    kind: Kind
    name: str
    x: Sequence[Value]
    y: Sequence[Value]
    colour: str | Sequence[str] = ""
    index: int | None = None
    dash: str = ""
    pattern: str = ""
    starts: Sequence[float] = ()
    intervals: Sequence[tuple[float, float]] = ()
    labels: Sequence[str] = ()
    hover: Sequence[str] = ()
    is_in_legend: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Squares of a map, coloured by value; light is fast, whichever way the unit goes.

    x, y: the columns and rows by number. limits: the values of the darkest and lightest colour.
    """

    x: Sequence[int]
    y: Sequence[int]
    values: Sequence[float]
    limits: tuple[float, float]
    unit: str
    more_is_better: bool
    labels: Sequence[str] = ()
    hover: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The title and places of an axis.

    base: of a logarithmic axis, 10 or 2; words: a tick of it as text.
    categories: the names along it, from the left or from the top. ticks: words by place.
    limits: the values at its ends; whole: those that a button of the page leads to.
    """

    title: str = ""
    base: int | None = None
    words: Callable[[float], str] = "{:g}".format
    has_zero: bool = False
    categories: Sequence[str] = ()
    ticks: Mapping[int, str] | Mapping[float, str] = field(default_factory=dict)
    limits: tuple[float, float] | None = None
    whole: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A dashed line across a panel, a shaded band, or a frame.

    x, y: both ends. With one axis it is a band across the panel, or a line where they are the
    same; with two it is a frame. name: at the right end of a line.
    """

    x: tuple[float, float] | None = None
    y: tuple[float, float] | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Series, or the cells of a map, on two axes."""

    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    cells: Cells | None = None
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Panel):
    """A panel with a title and a note; one on its right has the same legend.

    height, width: in pixels, by default as wide as the page.
    """

    title: str
    note: str
    height: int
    width: int | None = None
    right: Panel | None = None


def draw(figure: Figure) -> dict[str, Any]:
    """Return the data and the layout of a figure for plotly.js."""
    panels = [figure] if figure.right is None else [figure, figure.right]
    series = [each for panel in panels for each in panel.series]
    places = list(dict.fromkeys(each.name for each in series if not each.colour))
    layout = _layout(figure, has_spans=any(each.starts for each in series))
    data = []
    for number, panel in enumerate(panels):
        axis = str(number + 1) if number else ""
        traces = [_cells(panel.cells)] if panel.cells else []
        for each in panel.series:
            place = places.index(each.name) if each.name in places else 0
            trace = _trace(each, panel, place if each.index is None else each.index)
            trace["showlegend"] = each.is_in_legend and number == 0
            trace["legendgroup"] = trace["name"] if len(panels) > 1 else ""
            traces.append(trace)
        data += [trace | {"xaxis": f"x{axis}", "yaxis": f"y{axis}"} for trace in traces]
        layout[f"xaxis{axis}"] = _axis(panel, panel.x) | {"anchor": f"y{axis}"}
        layout[f"yaxis{axis}"] = _axis(panel, panel.y) | {"anchor": f"x{axis}"}
        if len(panels) > 1:
            layout[f"xaxis{axis}"]["domain"] = _HALVES[number]
        layout["shapes"] += [_shape(mark, axis) for mark in panel.marks]
        layout["annotations"] += [_name(mark, axis) for mark in panel.marks if mark.name]
    return {"data": data, "layout": layout}


def _layout(figure: Figure, *, has_spans: bool) -> dict[str, Any]:
    return {
        "height": figure.height,
        "width": figure.width,
        "margin": {"l": 56, "r": 16, "t": 16, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "x": 0,
            "traceorder": "normal",
        },
        "barmode": "overlay" if has_spans else "stack",
        "bargap": 0.25,
        "uniformtext": {"mode": "hide" if has_spans else False, "minsize": 8},
        "showlegend": True,
        "shapes": [],
        "annotations": [],
    }


def _trace(series: Series, panel: Panel, index: int) -> dict[str, Any]:
    """Return a series as a trace. index: of its style."""
    trace: dict[str, Any] = {
        "type": "bar" if series.kind is Kind.BARS else "scatter",
        "name": _markup(series.name),
        "x": _values(series.x),
        "y": _values(series.y),
        **_hover(series, panel),
    }
    colour = series.colour or COLOURS[index % len(COLOURS)]
    if series.kind is Kind.BARS:
        # Above seven colours a pattern tells equal ones apart.
        pattern = _PATTERNS[index // len(COLOURS) % len(_PATTERNS)]
        marker = {"color": colour, "pattern": {"shape": series.pattern or pattern}}
        trace |= {"orientation": "h" if panel.y.categories else "v", "marker": marker}
        return trace | _bars(series, colour)
    dash = series.dash or _DASHES[index % len(_DASHES)]
    is_thin = series.kind is Kind.LINE or len(series.x) > _MANY_POINTS
    trace["line"] = {"color": colour, "width": 1.5 if is_thin else 2, "dash": dash}
    symbol = _SYMBOLS[index % len(_SYMBOLS)]
    size = 9 if series.kind is Kind.POINTS else 5 if is_thin else 7
    trace["marker"] = {"color": colour, "symbol": symbol, "size": size}
    trace["mode"] = series.kind.value
    if series.intervals:
        values, axis = (series.x, "x") if panel.y.categories else (series.y, "y")
        trace[f"error_{axis}"] = _error_bars(values, series.intervals)
    return trace


def _bars(series: Series, colour: str | Sequence[str]) -> dict[str, Any]:
    """Return what bars have besides their values."""
    bars: dict[str, Any] = {"textposition": "auto", "text": [*map(_markup, series.labels)]}
    if series.labels:
        bars["insidetextfont"] = {"color": _shortest(_label_colours(colour))}
    if series.starts:
        is_edged = bool(series.labels) and len(series.x) <= _MOST_EDGED
        bars |= {
            "base": series.starts,
            "width": 0.9,
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"size": 11},
        }
        edge = {"width": 0.5 if is_edged else 0, "color": "rgba(255,255,255,0.6)"}
        bars["marker"] = {"color": _shortest(colour), "line": edge}
    return bars


def _shortest(colours: str | Sequence[str]) -> str | Sequence[str]:
    """Return one colour for all bars if they have the same."""
    return colours if isinstance(colours, str) or len(set(colours)) > 1 else colours[0]


def _label_colours(colours: str | Sequence[str]) -> list[str]:
    """Return black or white, whichever is easier to read on each bar: above 4.5 of contrast."""
    named = [colours] if isinstance(colours, str) else colours
    return [_WHITE if luminance(each) < _MEDIUM else _BLACK for each in named]


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", as WCAG 2 defines it."""
    red, green, blue = _light(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def shade(colour: str, brightness: float) -> str:
    """Return a colour mixed with black or white such that it has a luminance."""
    own = luminance(colour)
    light = _light(colour)
    if brightness < own:
        mixed = [part * brightness / own for part in light]
    else:
        share = (brightness - own) / (1 - own)
        mixed = [part + (1 - part) * share for part in light]
    return "#" + "".join(f"{round(255 * _encoded(part)):02x}" for part in mixed)


def _light(colour: str) -> list[float]:
    """Return red, green and blue in parts of the light (IEC 61966-2-1)."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]


def _encoded(light: float) -> float:
    return 12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055


def _cells(cells: Cells) -> dict[str, Any]:
    """Return a map as bars: the plotly.js of a page has no heat maps, which saves 0.3 MB."""
    low, high = cells.limits
    shares = [(value - low) / ((high - low) or 1.0) for value in cells.values]
    shares = shares if cells.more_is_better else [1 - share for share in shares]
    labels = [_WHITE if share < _CIVIDIS_MIDDLE else _BLACK for share in shares]
    return {
        "type": "bar",
        "orientation": "h",
        "x": [1] * len(cells.x),
        "base": [column - 0.5 for column in cells.x],
        "y": cells.y,
        "width": 0.96,
        "marker": {
            "color": cells.values,
            "colorscale": "Cividis",
            "reversescale": not cells.more_is_better,
            "cmin": cells.limits[0],
            "cmax": cells.limits[1],
            "colorbar": {"title": {"text": cells.unit}, "thickness": 12, "outlinewidth": 0},
            "line": {"color": INK, "width": 1},  # the darkest and the lightest need an edge
        },
        "text": [*map(_markup, cells.labels)],
        "textposition": "inside",
        "insidetextfont": {"color": labels},
        "insidetextanchor": "middle",
        "textangle": 0,
        "hovertext": [*map(_markup, cells.hover)],
        "hoverinfo": "text",
        "showlegend": False,
    }


def _hover(series: Series, panel: Panel) -> dict[str, Any]:
    """Return the text of each point, or a template of its place, value and name."""
    if series.kind is Kind.LINE:
        return {"hoverinfo": "name"}
    if series.hover:
        return {"hoverinfo": "text", "hovertext": [*map(_markup, series.hover)]}
    if panel.y.categories:
        text = f"%{{y}}: %{{x:.5g}} {panel.x.title}"
    else:
        place = "" if panel.x.categories else f"{panel.x.title} "
        text = f"{place}%{{x}}: %{{y:.5g}} {panel.y.title}"
    return {"hovertemplate": f"{_markup(f'{text}, {series.name}')}<extra></extra>"}


def _error_bars(
    values: Sequence[Value], intervals: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    pairs = list(zip(values, intervals, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - float(value or 0) for value, (_, high) in pairs],
        "arrayminus": [float(value or 0) - low for value, (low, _) in pairs],
        "thickness": 1,
    }


def _axis(panel: Panel, axis: Axis) -> dict[str, Any]:
    has_bars = any(each.kind is Kind.BARS for each in panel.series)
    layout: dict[str, Any] = {
        "title": {"text": escape(axis.title)},
        "gridcolor": _GRID,
        "zeroline": False,
        "automargin": True,
        "showgrid": not (panel.cells or (has_bars and axis.categories)),
    }
    if axis.has_zero:
        layout["rangemode"] = "tozero"
    ticks = axis.ticks
    if axis.base:
        layout["type"] = "log"
        ticks = _log_ticks(axis, panel)
    if ticks:
        layout |= {"tickvals": [*ticks], "ticktext": [*map(_markup, ticks.values())]}
    if axis.limits:
        layout["range"] = axis.limits
    if axis.categories:
        layout |= {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [*map(_markup, axis.categories)],
            "autorange": "reversed" if axis is panel.y else True,
        }
    return layout


def _log_ticks(axis: Axis, panel: Panel) -> dict[float, str]:
    """Return some powers of two, or 1, 2, 5 of each power of ten; of many powers 1."""
    columns = [each.x if axis is panel.x else each.y for each in panel.series]
    values = [value for column in columns for value in column if isinstance(value, int | float)]
    positive = [value for value in values if value > 0]
    if not positive:
        return {}
    log = log2 if axis.base == 2 else log10
    low = floor(log(min(positive)))
    high = ceil(log(max(positive)))
    if axis.base == 2:
        step = max(1, ceil((high - low) / _MOST_SIZES))
        ticks = [2.0**power for power in range(low, high + 1, step)]
    else:
        steps = (1, 2, 5) if high - low <= _FEW_POWERS else (1,)
        ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return {tick: axis.words(tick) for tick in ticks}


def _shape(mark: Mark, axis: str) -> dict[str, Any]:
    """Return a mark on the axes of a panel; axis: their number, "" for the first."""
    shape: dict[str, Any] = {"type": "rect"}
    for name, ends in (("x", mark.x), ("y", mark.y)):
        across = f"{name}{axis} domain"
        shape[f"{name}ref"] = f"{name}{axis}" if ends else across
        shape[f"{name}0"], shape[f"{name}1"] = ends or (0, 1)
    if mark.x and mark.y:
        return shape | {"line": {"color": COLOURS[1], "width": 3}}
    (first, last) = mark.x or mark.y or (0, 1)
    if first == last:
        return shape | {"type": "line", "line": {"color": INK, "dash": "dash", "width": 1}}
    return shape | {"fillcolor": INK, "opacity": 0.2, "line": {"width": 0}, "layer": "below"}


def _name(mark: Mark, axis: str) -> dict[str, Any]:
    """Return the name of a line across a panel, below its right end."""
    assert mark.y
    return {
        **{"x": 1, "xref": f"x{axis} domain", "xanchor": "right"},
        **{"y": mark.y[0], "yref": f"y{axis}", "yanchor": "top"},
        **{"text": escape(mark.name), "font": {"size": 11}, "showarrow": False},
    }


def _values(values: Sequence[Value]) -> list[Value]:
    """Return numbers and names as they are drawn; what is not finite is a gap."""
    return [_markup(value) if isinstance(value, str) else _finite(value) for value in values]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _markup(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def folded(name: str) -> str:
    """Return a name in lines that leave room for the figure, also on a phone."""
    return "\n".join(wrap(name, 28, break_on_hyphens=False))


def unique(names: Sequence[str]) -> list[str]:
    """Number equal names, whose series or bars would be one."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]
