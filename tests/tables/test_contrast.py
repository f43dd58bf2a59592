"""Contrast of pages by WCAG 2: 4.5 of text, 3 of bars, lines and borders, in both schemes."""

import re
from itertools import product

import pytest

from stepmark.tables import page
from stepmark.tables.figures import (
    COLOURS,
    GREY,
    INK,
    SHADES,
    Axis,
    Cells,
    Figure,
    Kind,
    Series,
    draw,
    luminance,
    shade,
)
from stepmark.timeline import ledger_svg
from stepmark.traces import trace_page
from stepmark.workloads.workload_page import _shade

TEXT, GRAPHICS = 4.5, 3.0
CSS = page._data("page.css")
ON_EACH = {"bad": ("paper", "each"), "link": ("paper",)}  # ground of text, of all by default


def colours(css: str) -> dict[str, str]:
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})\b", css))
    return {
        n: "#" + "".join(2 * c for c in v[1:]) if len(v) == 4 else v for n, v in found.items()
    }


LIGHT = colours(CSS[: CSS.index("@media")])
DARK = {**LIGHT, **colours(re.findall(r"prefers-color-scheme: dark.*?\n\*", CSS, re.S)[0])}
PAPERS = {
    LIGHT["paper"],
    DARK["paper"],
    *(theme.paper for theme in (ledger_svg.LIGHT, ledger_svg.DARK)),
}


def brightness(colour: str) -> float:
    """The relative luminance of WCAG 2, here from its definition once more."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    light = [
        part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(
        share * part for share, part in zip((0.2126, 0.7152, 0.0722), light, strict=True)
    )


def contrast(first: str, second: str) -> float:
    dark, light = sorted(map(brightness, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_as_published() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # WebAIM's
    assert luminance("#c66f9f") == pytest.approx(brightness("#c66f9f"))


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_of_a_page_is_readable(scheme: dict[str, str]) -> None:
    grounds = ("paper", "each", "mark")
    for name in ("ink", "quiet", "bad", "link"):
        for ground in ON_EACH.get(name, grounds):
            assert contrast(scheme[name], scheme[ground]) >= TEXT, (name, ground)
    assert contrast(scheme["quiet"], scheme["paper"]) >= GRAPHICS  # of inputs and buttons


@pytest.mark.parametrize("theme", [ledger_svg.LIGHT, ledger_svg.DARK])
def test_text_of_a_picture_is_readable(theme: ledger_svg.Theme) -> None:
    for ink in (theme.ink, theme.quiet):
        assert contrast(ink, theme.paper) >= TEXT


def test_bars_and_lines_are_seen_on_any_paper() -> None:
    shades = [_shade(colour, n, 7) for colour, n in product(COLOURS, range(8))]
    drawn = {
        *(*COLOURS, GREY, INK, *shades),
        *ledger_svg._COLOURS.values(),
        *trace_page.COLOURS_OF.values(),
        *(colour for _, colour in trace_page._PARTS.values()),
    }
    for colour, paper in product(drawn, PAPERS):
        assert contrast(colour, paper) >= GRAPHICS, (colour, paper)
    assert len(set(COLOURS)) == 7


def test_chunks_of_a_stage_differ() -> None:
    for colour in COLOURS:
        dark, light = (shade(colour, value) for value in SHADES)
        assert contrast(dark, light) > 1.8
        assert _shade(colour, 0, 0) == colour


def test_labels_of_bars_are_readable() -> None:
    for colour in COLOURS:
        bars = Series(
            kind=Kind.BARS,
            name="a",
            x=[1.0],
            y=["b"],
            starts=[0.0],
            labels=["1"],
            colour=colour,
        )
        figure = Figure(
            title="", note="", x=Axis(), y=Axis(categories=["b"]), series=[bars], height=9
        )
        (trace,) = draw(figure)["data"]
        (label,) = {trace["insidetextfont"]["color"]}
        assert contrast(label, colour) >= TEXT


# Places and colours of the scale of maps, as a page has them.
SCALE = [
    (float(place), "#" + "".join(f"{int(part):02x}" for part in rgb.split(",")))
    for place, rgb in re.findall(
        r"\[([.\d]+),\"rgb\(([\d,]+)\)\"\]",
        re.findall(r"Cividis:\[(\[0,.*?\])\]", page.plotly_js())[0],
    )
]


@pytest.mark.parametrize("more_is_better", [True, False])
def test_squares_of_a_map_have_edges_and_readable_labels(more_is_better: bool) -> None:
    shares = [n / 100 for n in range(101)]
    cells = Cells(
        x=range(101),
        y=[0] * 101,
        values=shares,
        limits=(0.0, 1.0),
        unit="us",
        more_is_better=more_is_better,
        labels=["1"] * 101,
    )
    figure = Figure(title="", note="", x=Axis(), y=Axis(), cells=cells, height=9)
    (trace,) = draw(figure)["data"]
    assert trace["marker"]["line"]["color"] == INK
    places = dict(zip(shares, trace["insidetextfont"]["color"], strict=True))
    for place, ground in SCALE:
        share = place if more_is_better else 1 - place
        label = places[min(places, key=lambda each: abs(each - share))]
        assert contrast(label, ground) >= TEXT, (share, ground, label)
