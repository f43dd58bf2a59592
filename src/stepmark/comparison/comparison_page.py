"""A comparison as a page: curves of every side, ratios with their intervals, all lines."""

from collections.abc import Iterator, Sequence

from stepmark.comparison.comparison import Comparison, Line
from stepmark.comparison.comparison_text import (
    closing,
    headline,
    mean_text,
    ratio_of,
    ratio_text,
    shown_value,
    split_fields,
    table_of,
    unit_text,
    value_text,
)
from stepmark.ground.ratio import EFFECT_FLOOR, Ratio
from stepmark.ground.units import format_bytes
from stepmark.tables.figures import Axis, Figure, Kind, Mark, Panel, Series
from stepmark.tables.page import Page, Section, paragraph, preformatted
from stepmark.tables.page_table import page_table

# Fields that divide lines into figures; size runs along the axis.
_GROUP = ("family", "dtype", "redop", "placement", "num_ranks", "phase")


def page(comparison: Comparison, lead: Sequence[str] = ()) -> Page:
    """Return the page; `lead` are lines that come first, such as a recommendation."""
    constant, _ = split_fields(comparison.lines)
    first = [preformatted(*lead)] if lead else []
    paragraphs = map(paragraph, [*map(mean_text, comparison.overall), *closing(comparison)])
    first_name, *others = comparison.names
    rest = others[0] if len(others) == 1 else f"{len(others)} others"
    return Page(
        title=f"Comparison of {first_name} with {rest}",
        lead=headline(comparison, constant),
        sections=[
            Section("Summary", [*first, *paragraphs]),
            *figures(comparison),
            Section("All lines", page_table(table_of(comparison))),
        ],
    )


def figures(comparison: Comparison) -> Iterator[Figure]:
    """Yield a figure of each group of lines."""
    sized: dict[tuple[str | int | float | None, ...], list[Line]] = {}
    for line in comparison.lines:
        if line.size_bytes:
            key = tuple(line.fields.get(name) for name in _GROUP)
            sized.setdefault(key, []).append(line)
    for key, lines in sized.items():
        if len(lines) > 1:
            title = " ".join(str(word) for word in key[:4] if word not in (None, "", "none"))
            title += f", {key[4]} ranks" if key[4] else ""
            yield over_size(title or "values", lines, comparison.names)
    rest = [line for line in comparison.lines if not line.size_bytes]
    if rest:
        yield ratios(rest, comparison)


def over_size(title: str, lines: Sequence[Line], names: Sequence[str]) -> Figure:
    """Return the values of each side, and on the right its speed over the baseline's."""
    ordered = sorted(lines, key=lambda line: line.size_bytes or 0)
    of_side = {name: [line for line in ordered if name in line.cells] for name in names}
    values = [
        Series(
            kind=Kind.CURVE,
            name=name,
            x=[line.size_bytes for line in own],
            y=[shown_value(line, name) for line in own],
            hover=[_hover(line, name) for line in own],
        )
        for name, own in of_side.items()
    ]
    speeds = []
    for name, own in of_side.items():
        points = [(line, r) for line in own if (r := line.cells[name].ratio) is not None]
        speeds.append(
            Series(
                kind=Kind.CURVE,
                name=name,
                x=[line.size_bytes for line, _ in points],
                y=[r.speed for _, r in points],
                intervals=[_interval(r) for _, r in points],
                hover=[_hover(line, name) for line, _ in points],
            )
        )
    size = Axis(title="size", base=2, words=format_bytes)
    speed = Axis(title="ratio of speed", limits=_window(ordered))
    band = Mark(y=(1 / (1 + EFFECT_FLOOR), 1 + EFFECT_FLOOR))
    return Figure(
        title=title,
        note=f"The second: speed over {names[0]}, with 99 % intervals; the band is "
        f"+-{EFFECT_FLOOR:.0%}.",
        x=size,
        y=Axis(title=unit_text(ordered[0]), base=10),
        series=values,
        right=Panel(x=size, y=speed, series=speeds, marks=[band]),
        height=420,
    )


def _window(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Return the range of all speeds; very wide intervals are cut, not to flatten the rest."""
    intervals = [cell.ratio for line in lines for cell in line.cells.values() if cell.ratio]
    if not intervals:
        return None
    slowest = min(r.speed for r in intervals)
    fastest = max(r.speed for r in intervals)
    low = max(slowest / 2, min(r.low or r.speed for r in intervals))
    high = min(fastest * 2, max(r.high or r.speed for r in intervals))
    low = min(low, 1 / (1 + EFFECT_FLOOR))
    high = max(high, 1 + EFFECT_FLOOR)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _hover(line: Line, name: str) -> str:
    cell = line.cells[name]
    text = f"{name}, {format_bytes(line.size_bytes or 0)}: {value_text(line, cell)}"
    if cell.ratio:
        text += f", {ratio_text(cell.ratio)} {cell.ratio.verdict.value}"
    return text


def _interval(ratio: Ratio) -> tuple[float, float]:
    """Return the interval of a speed; the speed alone where it is unknown."""
    return ratio.low or ratio.speed, ratio.high or ratio.speed


def ratios(lines: Sequence[Line], comparison: Comparison) -> Figure:
    """Return one row per line, a point with its interval for each side."""
    _, varying = split_fields(comparison.lines)
    labels = [_label(line, varying) or f"line {place}" for place, line in enumerate(lines, 1)]
    series = []
    for index, name in enumerate(comparison.names[1:], 1):
        points = [
            (label, line, r)
            for label, line in zip(labels, lines, strict=True)
            if (r := ratio_of(line, name))
        ]
        series.append(
            Series(
                kind=Kind.POINTS,
                name=name,
                x=[r.speed for *_, r in points],
                y=[label for label, *_ in points],
                index=index,
                intervals=[_interval(r) for *_, r in points],
                hover=[f"{label}: {_hover(line, name)}" for label, line, _ in points],
            )
        )
    return Figure(
        title="Ratios",
        note=f"Speed over {comparison.names[0]}, with 99 % intervals.",
        x=Axis(title="ratio of speed"),
        y=Axis(categories=labels),
        series=series,
        marks=[Mark(x=(1, 1))],
        height=160 + 24 * len(lines),
    )


def _label(line: Line, varying: Sequence[str]) -> str:
    words = [line.fields.get(name) for name in varying]
    return " ".join(str(word) for word in words if word not in (None, ""))
